"""Callers over HTTP that go away, dawdle, or crowd in; and what is logged of them."""

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import jgraph as jg
from jgraph.cluster import event_loop
from jgraph.rpc import http_port
from jgraph.serving._pb import inference_pb2 as pb
from tests.support.exported import half_plus_three
from tests.support.http_calls import call, connected, heard, infer, queued

pytestmark = pytest.mark.bad_input_row(24)
INFER = "/v2/models/half_plus_three/infer"
PREDICT = "/v1/models/half_plus_three:predict"
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
PATIENT = "max_rows = 8\nmax_delay_ms = 60000\ntimeout_ms = 60000\n"


@contextmanager
def patient(models: Path, more: str = "", **options: Any) -> Iterator[jg.ModelServer]:
    """A server at which a request of less than 8 rows waits for others."""
    half_plus_three(models)
    text = f"[batching]\n{PATIENT}{more}"
    (models / "half_plus_three" / "model.toml").write_text(text)
    with jg.serve(models, watch_s=3600, **options) as server:
        yield server


def request_of(server: jg.ModelServer, path: str, body: Any) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {server.token.value}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


@pytest.mark.parametrize(
    ("path", "body"), [(INFER, BODY), (PREDICT, {"instances": [1.0]})]
)
def test_a_caller_that_hangs_up_takes_its_request_out_of_the_queue(
    path: str, body: Any, tmp_path: Path
) -> None:
    with patient(tmp_path) as server:
        with connected(server) as pipe:
            pipe.sendall(request_of(server, path, body))
            assert queued(server, 1)
        assert queued(server, 0)


def test_a_full_queue_is_told_with_when_to_come_again_over_both_protocols(
    tmp_path: Path,
) -> None:
    with (
        patient(tmp_path, "max_queued_rows = 2\n") as server,
        connected(server) as one,
        connected(server) as two,
    ):
        for number, pipe in enumerate((one, two)):
            pipe.sendall(request_of(server, INFER, BODY))
            assert queued(server, number + 1)
        status, answer, headers = call(server, "POST", INFER, BODY)
        assert (status, answer["code"]) == (429, "JG-604")
        assert answer["error"].startswith("JG-604 2 rows wait already, of 2 that may")
        assert int(headers["retry-after"]) >= 1
        request = pb.ModelInferRequest(model_name="half_plus_three")
        request.inputs.add(name="x", datatype="FP32", shape=[1])
        request.raw_input_contents.append(np.float32(1).tobytes())
        with pytest.raises(grpc.RpcError) as refused:
            infer(server, request)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        metadata: Any = refused.value.trailing_metadata()
        ((key, after_s),) = metadata
        assert key == "retry-after"
        assert int(after_s) >= 1
        # An overload is no outage: balancers go on to send requests here.
        assert call(server, "GET", "/v2/health/ready")[0] == 200


def test_a_token_that_is_typed_into_an_address_is_in_no_log(
    models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    access = logging.getLogger("uvicorn.access")
    with jg.serve(models, watch_s=3600) as server:
        caplog.set_level(logging.INFO)
        caplog.set_level(logging.INFO, "uvicorn.access")
        access.addHandler(caplog.handler)
        try:
            path = f"/v2/models/mean?token={server.token.value}"
            assert call(server, "GET", path)[0] == 200
            assert call(server, "GET", path, headers={"Authorization": ""})[0] == 401
        finally:
            access.removeHandler(caplog.handler)
    assert server.token.value not in caplog.text


def test_tracing_a_server_shows_no_address(
    models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(5)
    with jg.serve(models, watch_s=3600) as server:
        path = f"/v2/models/mean?token={server.token.value}"
        assert call(server, "GET", path)[0] == 200
    assert server.token.value not in caplog.text


@pytest.mark.parametrize(
    ("sent", "answer"), [(b"", b""), (b"GET /v2 HTTP/1.1\r\nHost:", b"HTTP/1.1 408 ")]
)
def test_a_connection_without_the_head_of_a_request_is_ended(
    sent: bytes,
    answer: bytes,
    server: jg.ModelServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_port, "HEAD_S", 0.05)
    with connected(server) as pipe:
        pipe.sendall(sent)
        told = heard(pipe)
    assert told.startswith(answer)
    assert bool(told) is bool(answer)


def test_the_second_head_of_a_connection_may_take_no_longer_than_the_first(
    server: jg.ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_port, "HEAD_S", 0.5)
    with connected(server) as pipe:
        pipe.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while b'{"live":true}' not in (told := pipe.recv(4096)):
            assert told
        pipe.sendall(b"G")
        assert heard(pipe).startswith(b"HTTP/1.1 408 ")


def test_a_head_without_end_is_read_no_further(server: jg.ModelServer) -> None:
    with connected(server) as pipe:
        told = b""
        try:
            pipe.sendall(b"GET / HTTP/1.1\r\n")
            for number in range(200):
                pipe.sendall(f"X-{number}: {'y' * 8000}\r\n".encode())
            told = heard(pipe)
        except (ConnectionResetError, BrokenPipeError):
            return  # it did not wait to be heard
    assert told.startswith(b"HTTP/1.1 431 ")


def test_more_connections_than_there_may_be_are_refused_and_others_go_on(
    models: Path,
) -> None:
    with (
        jg.serve(models, watch_s=3600, max_connections=2) as server,
        ExitStack() as stack,
    ):
        kept = stack.enter_context(connected(server))
        get = b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n"
        kept.sendall(get)
        assert kept.recv(4096).startswith(b"HTTP/1.1 200 ")
        stack.enter_context(connected(server))
        with connected(server) as third:
            told = heard(third)
        assert told.startswith(b"HTTP/1.1 429 ")
        assert b"\r\nretry-after: 1\r\n" in told
        assert json.loads(told.partition(b"\r\n\r\n")[2])["code"] == "JG-604"
        kept.sendall(get)
        assert kept.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_a_wait_for_a_model_server_names_it(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def show(what: str) -> Any:
        said.append(what)
        return nullcontext()

    monkeypatch.setattr(event_loop, "QUIET_S", 0.0)
    monkeypatch.setattr(event_loop, "show_wait", show)
    with jg.serve(models, watch_s=3600) as server:
        server.refresh()
        server.predict("half_plus_three", [1.0])
    assert len(said) >= 3
    assert "waiting for the cluster" not in said
    assert said[-1] == "ending the model server"
