"""Many numbers in typed contents over gRPC: aside, in parts, with the same answers."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

import jgraph as jg
from jgraph.serving import oip_grpc, oip_http
from jgraph.serving._pb import inference_pb2 as pb
from tests.support.held_call import HeldCall
from tests.support.http_calls import call

SERVICE = "/inference.GRPCInferenceService"
MANY = 100
ROWS = 3 * MANY + 1
WIDE = 2 * oip_http.LARGE // oip_http.NUMBER
Ask = Callable[[pb.ModelInferRequest], pb.ModelInferResponse]


@pytest.fixture(autouse=True)
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oip_grpc, "MANY", MANY)


@pytest.fixture
def channel(server: jg.ModelServer) -> Iterator[grpc.Channel]:
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(server.grpc_target, options) as channel:
        yield channel


@pytest.fixture
def ask(channel: grpc.Channel, server: jg.ModelServer) -> Ask:
    method = channel.unary_unary(
        f"{SERVICE}/ModelInfer",
        pb.ModelInferRequest.SerializeToString,
        pb.ModelInferResponse.FromString,
    )
    metadata = (("authorization", f"Bearer {server.token.value}"),)
    return lambda request: method(request, metadata=metadata, timeout=20)


def halves(count: int) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="half_plus_three", id=f"{count} rows")
    one = request.inputs.add(name="x", datatype="FP32", shape=[count])
    one.contents.fp32_contents.extend((np.arange(count) / 7).tolist())
    return request


def is_half(response: pb.ModelInferResponse, count: int) -> bool:
    [output] = response.outputs
    found = np.array(output.contents.fp32_contents)
    return (
        response.id == f"{count} rows"
        and list(output.shape) == [count]
        and np.allclose(found, np.arange(count) / 14 + 3, 1e-6)
    )


@pytest.mark.parametrize("what", ["inputs_of", "_response"])
def test_a_small_request_does_not_wait_for_many_numbers(
    what: str, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldCall(monkeypatch, oip_grpc, what)
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(ask, halves(ROWS))
        with held:
            assert is_half(ask(halves(1)), 1)
        assert is_half(large.result(), ROWS)


@pytest.mark.parametrize("count", [0, 1, MANY, MANY + 1, ROWS])
def test_answers_with_many_numbers_are_as_those_with_few(count: int, ask: Ask) -> None:
    assert is_half(ask(halves(count)), count)


def test_a_stream_gives_the_same_answers(
    channel: grpc.Channel, server: jg.ModelServer
) -> None:
    method = channel.stream_stream(
        f"{SERVICE}/ModelStreamInfer",
        pb.ModelInferRequest.SerializeToString,
        pb.ModelStreamInferResponse.FromString,
    )
    metadata = (("authorization", f"Bearer {server.token.value}"),)
    asked = {1, 40, ROWS}
    unknown = pb.ModelInferRequest(model_name="none", id="unknown")
    requests = iter([*map(halves, sorted(asked)), unknown])
    for one in method(requests, metadata=metadata, timeout=20):
        assert one.infer_response.parameters["triton_final_response"].bool_param
        if one.error_message:
            assert one.infer_response.id == "unknown"
            assert "JG-601" in one.error_message
            continue
        count = int(one.infer_response.id.removesuffix(" rows"))
        assert is_half(one.infer_response, count)
        asked.remove(count)
    assert not asked


def test_bytes_that_are_no_message_are_refused_and_a_stream_goes_on(
    channel: grpc.Channel, server: jg.ModelServer
) -> None:
    metadata = (("authorization", f"Bearer {server.token.value}"),)
    ask = channel.unary_unary(f"{SERVICE}/ModelMetadata", None, None)
    with pytest.raises(grpc.RpcError, match="JG-603 the 2 bytes are no ModelMetadataR"):
        ask(b"\xff\xff", metadata=metadata, timeout=20)
    asks = channel.stream_stream(
        f"{SERVICE}/ModelStreamInfer",
        None,
        pb.ModelStreamInferResponse.FromString,
    )
    asked = iter([b"\xff\xff", halves(1).SerializeToString()])
    told = list(asks(asked, metadata=metadata, timeout=20))
    (error,) = [one.error_message for one in told if one.error_message]
    assert error.startswith("JG-603 the 2 bytes are no ModelInferRequest")
    assert any(is_half(one.infer_response, 1) for one in told if not one.error_message)


def test_one_of_many_numbers_that_does_not_fit_is_refused(
    ask: Ask, server: jg.ModelServer
) -> None:
    request = pb.ModelInferRequest(model_name="ctr")
    user = request.inputs.add(name="user", datatype="INT32", shape=[ROWS])
    user.contents.int_contents.extend(range(ROWS))
    dense = request.inputs.add(name="dense", datatype="FP32", shape=[ROWS, 3])
    dense.contents.fp32_contents.extend([0.5] * 3 * ROWS)
    twice = {one.name: one.contents for one in ask(request).outputs}["twice"]
    assert list(twice.int_contents) == list(range(0, 2 * ROWS, 2))
    dense.contents.fp32_contents.pop()
    with pytest.raises(grpc.RpcError) as refused:
        ask(request)
    assert f"has {3 * ROWS - 1} values" in str(refused.value)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[jg.ModelServer]:
    """A server of a model that gives many numbers for one."""
    path = tmp_path_factory.mktemp("wide")
    many = np.ones(WIDE, np.float32)
    jg.export(lambda x: x[:, None] * many, np.zeros(1, np.float32), path / "wide")
    with jg.serve(path, watch_s=3600) as server:
        yield server


def test_a_large_answer_to_a_small_request_over_http_is_written_aside(
    wide: jg.ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., bytes] = vars(oip_http)["written_in_pieces"]
    names: list[str] = []

    def noted(value: Any) -> bytes:
        names.append(threading.current_thread().name)
        return real(value)

    monkeypatch.setattr(oip_http, "written_in_pieces", noted)
    body = b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [2]}]}'
    status, answer, _ = call(wide, "POST", "/v2/models/wide/infer", body)
    assert (status, answer["outputs"][0]["data"]) == (200, [2.0] * WIDE)
    assert [name.split("_")[0] for name in names] == ["jgraph-json"]
