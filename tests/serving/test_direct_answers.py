"""Small requests over HTTP that are answered where they are read, without a task."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

import jgraph as jg
from jgraph.coordination.serving import joining
from jgraph.rpc import http_port
from jgraph.serving import oip_http
from tests.support.http_calls import connected, heard
from tests.support.waiting import wait_until

INFER = "/v2/models/half_plus_three/infer"
X = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model takes so long that it would have to wait."""
    monkeypatch.setattr(joining, "SHORT_S", 10.0)
    monkeypatch.setattr(joining, "WORTH_S", 10.0)


@pytest.fixture
def none_by_tasks(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An inference that takes the way of all requests would fail."""

    def read(*_: Any) -> Any:
        raise AssertionError("the application was asked")

    monkeypatch.setattr(oip_http.HttpDoor, "body", read)


def request_of(
    server: jg.ModelServer,
    body: bytes,
    path: str = INFER,
    **more: str | None,
) -> bytes:
    headers: dict[str, str | None] = {
        "Host": "localhost",
        "Authorization": f"Bearer {server.token.value}",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    lines = [f"{name}: {value}" for name, value in headers.items() if value is not None]
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode() + body


def body_of(**more: Any) -> bytes:
    return json.dumps({"inputs": [X], **more}).encode()


def answers(told: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """Takes what came over a connection apart."""
    found = []
    while told:
        head, _, told = told.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        size = int(headers["content-length"])
        found.append((int(first.split()[1]), headers, told[:size]))
        told = told[size:]
    return found


def answered(server: jg.ModelServer, *packets: bytes) -> list[Any]:
    with connected(server) as pipe:
        for packet in packets:
            pipe.sendall(packet)
        return answers(heard(pipe))


@pytest.mark.usefixtures("none_by_tasks")
def test_requests_of_one_packet_are_answered_in_their_order(
    server: jg.ModelServer,
) -> None:
    packet = b"".join(request_of(server, body_of(id=f"{n}")) for n in range(3))
    last = request_of(server, body_of(id="last"), Connection="close")
    found = answered(server, packet + last)
    assert [status for status, _, _ in found] == [200] * 4
    assert [json.loads(body)["id"] for *_, body in found] == ["0", "1", "2", "last"]
    assert [headers.get("connection") for _, headers, _ in found][2:] == [None, "close"]
    assert json.loads(found[0][2])["outputs"][0]["data"] == [3.5]


@pytest.mark.usefixtures("none_by_tasks")
def test_each_request_of_a_connection_is_let_in_by_its_own_head(
    server: jg.ModelServer,
) -> None:
    """What a head means is found once, and another one is another matter."""
    good, bad = body_of(), b'{"inputs": []}'
    half = "/v2/models/half_plus_three/versions/1/infer"
    found = answered(
        server,
        request_of(server, good),
        request_of(server, bad),
        request_of(server, good, Authorization="Bearer of another"),
        request_of(server, good),
        request_of(server, good, half),
        request_of(server, good, Host="evil.example"),
        request_of(server, good, half.replace("1", "9")),
        request_of(server, good, Connection="close"),
    )
    assert [status for status, *_ in found] == [200, 400, 401, 200, 200, 421, 404, 200]


@pytest.mark.usefixtures("none_by_tasks")
def test_a_body_may_come_in_pieces(server: jg.ModelServer) -> None:
    body = body_of()
    whole = request_of(server, body, Connection="close")
    pieces = whole[: -len(body)], body[:10], body[10:]
    assert [status for status, *_ in answered(server, *pieces)] == [200]


def test_a_wish_for_another_protocol_is_ignored_and_the_body_is_read(
    server: jg.ModelServer,
) -> None:
    """``curl --http2``, and the client of Java, send it with each first request."""
    wish = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c"}
    wish["HTTP2_Settings"] = "AAMAAABkAARAAAAA"
    body = body_of()
    whole = request_of(server, body, **wish)
    last = request_of(server, body, Connection="close")
    found = answered(server, whole + whole, whole[:-9], whole[-9:] + last)
    assert [status for status, *_ in found] == [200] * 4
    assert json.loads(found[2][2])["outputs"][0]["data"] == [3.5]


def test_a_body_that_does_not_come_is_waited_for_as_a_head_is(
    server: jg.ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_port, "HEAD_S", 0.05)
    found = answered(server, request_of(server, body_of())[:-1])
    assert [status for status, *_ in found] == [408]


@pytest.mark.usefixtures("none_by_tasks")
def test_a_connection_that_is_kept_after_an_answer_ends_without_a_word(
    server: jg.ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_port, "HEAD_S", 0.05)
    found = answered(server, request_of(server, body_of()))
    assert [status for status, *_ in found] == [200]


@pytest.mark.parametrize(
    ("body", "more"),
    [
        (body_of(), {}),
        (body_of(id="7", parameters={"binary_data_output": True}), {}),
        (body_of(outputs=[{"name": "z"}]), {}),
        (b'{"inputs": [', {}),
        (b"[]", {}),
        (body_of(parameters={"signature_name": "no"}), {}),
        (body_of(), {"Authorization": None}),
        (body_of(), {"Host": "evil.example"}),
        (body_of(), {"Content_Type": "text/plain"}),
        (body_of(), {"Content_Encoding": "gzip"}),
        (body_of(), {"Inference_Header_Content_Length": "-1"}),
        (body_of(), {"path": "/v2/models/half_plus_three/versions/1/infer"}),
        (body_of(), {"path": "/v2/models/half_plus_three/versions/9/infer"}),
        (body_of(), {"path": "/v2/models/half_plus_three/labels/no/infer"}),
        (body_of(), {"path": "/v2/models/no/infer"}),
        (body_of(), {"path": f"{INFER}?a=b"}),
        (body_of(), {"path": "/v2/models/half%5Fplus_three/infer"}),
    ],
)
def test_an_answer_is_the_same_as_that_of_the_application(
    body: bytes, more: dict[str, str | None], server: jg.ModelServer
) -> None:
    path = more.pop("path", None) or INFER
    direct = request_of(server, body, path, **more, Connection="close")
    # Whoever asks whether to go on is answered by a task.
    other = direct.replace(
        b"\r\nContent-Length", b"\r\nExpect: 100-continue\r\nContent-Length", 1
    )
    [(status, headers, content)] = answered(server, direct)
    told = b""
    with connected(server) as pipe:
        pipe.sendall(other)
        told = heard(pipe)
    told = told.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    [(other_status, other_headers, other_content)] = answers(told)
    assert (status, content) == (other_status, other_content)
    dateless = [{**one, "date": ""} for one in (headers, other_headers)]
    assert dateless[0] == dateless[1]


def test_an_error_in_the_direct_way_is_an_answer_too(
    server: jg.ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("a value of somebody")

    monkeypatch.setattr(oip_http, "decoded", broken)
    [(status, _, body)] = answered(
        server, request_of(server, body_of(), Connection="close")
    )
    assert status == 500
    assert json.loads(body)["code"] == "JG-900"
    assert b"somebody" not in body


def test_a_request_that_is_half_there_when_its_server_ends_is_told_so(
    models: Path,
) -> None:
    server = jg.serve(models, watch_s=3600)
    ending = threading.Thread(target=server.stop)
    connections = server._uvicorn.server_state.connections
    try:
        whole = request_of(server, body_of())
        with connected(server) as pipe:
            pipe.sendall(whole[:-9])
            wait_until(lambda: [one for one in connections if one._body])
            ending.start()
            wait_until(lambda: server._models.is_ending)
            wait_until(lambda: not [one for one in connections if one._body])
            pipe.sendall(whole[-9:])
            [(status, headers, body)] = answers(heard(pipe))
    finally:
        if not ending.is_alive():
            server.stop()
        else:
            ending.join(30)
    assert (status, json.loads(body)["code"]) == (503, "JG-602")
    assert headers["connection"] == "close"
