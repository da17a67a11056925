"""Requests over gRPC that come again with other numbers: their form is remembered."""

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import jgraph as jg
from jgraph.serving import oip_grpc
from jgraph.serving._pb import inference_pb2 as pb
from tests.support.exported import half_plus_three

pytestmark = pytest.mark.usefixtures("little_garbage")

INFER = "/inference.GRPCInferenceService/ModelInfer"
Ask = Callable[[bytes], pb.ModelInferResponse]


@pytest.fixture
def own(models: Path) -> Iterator[jg.ModelServer]:
    """A server that nobody has asked yet."""
    with jg.serve(models, http_port=None, watch_s=3600) as server:
        yield server


def asking(server: jg.ModelServer) -> Iterator[Ask]:
    metadata = (("authorization", f"Bearer {server.token.value}"),)
    with grpc.insecure_channel(server.grpc_target) as channel:
        method = channel.unary_unary(INFER, None, pb.ModelInferResponse.FromString)
        yield lambda data: method(data, metadata=metadata, timeout=20)


@pytest.fixture
def ask(own: jg.ModelServer) -> Iterator[Ask]:
    yield from asking(own)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of requests that were read, and not only compared."""
    sizes: list[int] = []
    parsed = oip_grpc._parsed

    def noted(kind: Any, data: bytes) -> Any:
        sizes.append(len(data))
        return parsed(kind, data)

    monkeypatch.setattr(oip_grpc, "_parsed", noted)
    return sizes


def request(model: str = "half_plus_three", **inputs: Any) -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name=model)
    kinds = {"float32": "FP32", "int32": "INT32", "int64": "INT64"}
    for name, value in inputs.items():
        made.inputs.add(name=name, datatype=kinds[value.dtype.name], shape=value.shape)
        made.raw_input_contents.append(value.tobytes())
    return made


def halves(*numbers: float) -> bytes:
    return request(x=np.array(numbers, np.float32)).SerializeToString()


def outputs(response: pb.ModelInferResponse) -> list[list[float]]:
    kinds = {"FP32": np.float32, "INT32": np.int32}
    found = zip(response.outputs, response.raw_output_contents, strict=True)
    return [np.frombuffer(raw, kinds[one.datatype]).tolist() for one, raw in found]


def test_a_request_that_came_before_is_compared_and_its_numbers_are_new(
    ask: Ask, read: list[int]
) -> None:
    assert [outputs(ask(halves(n, n))) for n in (1, 2, 5)] == [
        [[3.5, 3.5]],
        [[4.0, 4.0]],
        [[5.5, 5.5]],
    ]
    assert read == [len(halves(1, 1))] * 2
    assert outputs(ask(halves(1))) == [[3.5]]
    assert len(read) == 3


def test_a_repeated_request_has_the_answer_of_a_first_one(
    own: jg.ModelServer, ask: Ask
) -> None:
    first, second, again = (ask(halves(1, 2, 5)) for _ in range(3))
    assert first == second == again
    with jg.serve(own.path or "", http_port=None) as other:
        for asked in asking(other):
            assert asked(halves(1, 2, 5)) == first


def test_several_inputs_in_any_order_are_told_apart(ask: Ask, read: list[int]) -> None:
    for turn in range(3):
        user = np.array([turn, 2], np.int32)
        dense = np.full((2, 3), turn, np.float32)
        score, twice = [turn * 4.0, turn * 3.0 + 2], [turn * 2, 4]
        for inputs in ({"user": user, "dense": dense}, {"dense": dense, "user": user}):
            made = request("ctr", **inputs)
            assert outputs(ask(made.SerializeToString())) == [score, twice]
            made.outputs.add(name="twice")
            assert outputs(ask(made.SerializeToString())) == [twice]
    assert len(read) == 6  # nothing is remembered of the first of each size


def test_what_makes_a_request_another_one_is_read_each_time(
    ask: Ask, read: list[int]
) -> None:
    for _ in range(2):
        ask(halves(1))
    named = pb.ModelInferRequest.FromString(halves(1))
    named.id = "7"
    patient = pb.ModelInferRequest.FromString(halves(1))
    patient.parameters["timeout"].int64_param = 10**6
    for other in (named, patient):
        for _ in range(2):
            response = ask(other.SerializeToString())
            assert outputs(response) == [[3.5]]
            assert response.id == other.id
    assert len(read) == 6


def test_bytes_in_another_order_or_with_more_behind_them_are_read_each_time(
    ask: Ask, read: list[int]
) -> None:
    """Fields of protobuf may come in any order, and unknown ones are passed over."""
    made = pb.ModelInferRequest.FromString(halves(1))
    raw = pb.ModelInferRequest(raw_input_contents=made.raw_input_contents)
    del made.raw_input_contents[:]
    first = raw.SerializeToString() + made.SerializeToString()
    more = halves(1) + b"\xfa\x7f\x04abcd"  # field 2047
    for data in (first, more, first, more):
        assert outputs(ask(data)) == [[3.5]]
    assert len(read) == 4


def test_a_first_request_that_is_refused_teaches_nothing(
    ask: Ask, read: list[int]
) -> None:
    wrong = request(x=np.array([1, 2], np.int64)).SerializeToString()
    for _ in range(2):
        with pytest.raises(grpc.RpcError, match="the model takes FP32"):
            ask(wrong)
    assert len(read) == 2


def test_a_repeated_request_goes_to_the_version_that_answers_now(
    tmp_path: Path, read: list[int]
) -> None:
    """Of another signature too: then it is refused, as it would be the first time."""
    half_plus_three(tmp_path)
    x = np.zeros(1, np.float32)
    with jg.serve(tmp_path, http_port=None, watch_s=3600) as server:
        for ask in asking(server):
            for _ in range(2):
                assert outputs(ask(halves(2))) == [[4.0]]
            jg.export(lambda x: x * 10, x, tmp_path / "half_plus_three")
            server.refresh()
            for _ in range(2):
                response = ask(halves(2))
                assert outputs(response) == [[20.0]]
                assert response.model_version == "2"
            wide = np.zeros((1, 2), np.float32)
            jg.export(lambda x: x * 10, wide, tmp_path / "half_plus_three")
            server.refresh()
            for _ in range(2):
                with pytest.raises(grpc.RpcError, match="has the shape"):
                    ask(halves(2))
    assert len(read) == 2


def test_an_unloaded_version_is_not_kept_by_what_was_asked_of_it(
    tmp_path: Path,
) -> None:
    half_plus_three(tmp_path)
    with jg.serve(tmp_path, http_port=None, watch_s=3600) as server:
        for ask in asking(server):
            for _ in range(3):
                ask(halves(2))
            versions = server._models.by_name["half_plus_three"].versions
            (held,) = map(weakref.ref, versions.values())
            del versions
            x = np.zeros(1, np.float32)
            jg.export(lambda x: x, x, tmp_path / "half_plus_three")
            server.refresh()
            gc.collect()
            assert held() is None
            assert outputs(ask(halves(2))) == [[2.0]]


def test_bytes_that_are_no_request_are_refused_in_words(ask: Ask) -> None:
    with pytest.raises(grpc.RpcError, match="no ModelInferRequest") as caught:
        ask(b"\xff\xff\xff")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_forms_are_bounded_however_many_come(models: Path) -> None:
    forms = oip_grpc._Forms()
    for size in range(1, 200):
        data = halves(*[1.0] * size)
        for _ in range(2):
            forms.learn(data, pb.ModelInferRequest.FromString(data))
    for model in "aabcdefgh":
        one = request(model, x=np.zeros(1, np.float32))
        forms.learn(one.SerializeToString(), one)
    kept = forms._by_size.values()
    assert len(kept) <= oip_grpc.FORMS
    assert max(map(len, kept)) == oip_grpc.FORMS_OF_A_SIZE
    large = halves(*[0.0] * oip_grpc.FORM_BYTES)
    forms.learn(large, pb.ModelInferRequest.FromString(large))
    assert forms.of(large) is None


def test_sizes_that_come_once_take_no_place_from_those_that_come_again() -> None:
    forms = oip_grpc._Forms()
    again = halves(1)
    for _ in range(2):
        forms.learn(again, pb.ModelInferRequest.FromString(again))
    for size in range(2, 200):
        data = halves(*[1.0] * size)
        forms.learn(data, pb.ModelInferRequest.FromString(data))
    assert forms.of(again) is not None
    assert len(forms._by_size) == 1
    assert len(forms._once) <= oip_grpc.FORMS


def test_a_form_that_several_bring_at_once_takes_one_place() -> None:
    """Each was read before one of them had its answer."""
    forms = oip_grpc._Forms()
    other, same = request("a", x=np.zeros(1, np.int32)), request("b", x=np.ones(1, int))
    other.model_name += "." * (len(same.SerializeToString()) - other.ByteSize())
    for one in (other, other, same, same, same, same, same):
        forms.learn(one.SerializeToString(), one)
    (kept,) = forms._by_size.values()
    assert [form.model for form in kept] == [other.model_name, "b"]
