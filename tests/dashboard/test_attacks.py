"""Requests that no browser of ours makes, by raw sockets at a port."""

import asyncio
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.exceptions import HTTPException
from starlette.types import Message

from jgraph.dashboard import serve, stream
from jgraph.dashboard.serve import DashboardServer, Options
from jgraph.errors import ConfigError, InsecureError, PortInUseError
from jgraph.rpc import http_port
from tests.support.dashboards import Imagined, scene, serving


@pytest.fixture(scope="module")
def server() -> Iterator[DashboardServer]:
    with serving(Imagined(scene())) as running:
        yield running


def token_of(server: DashboardServer) -> str:
    return urlsplit(server.url).fragment.removeprefix("token=")


def said(server: DashboardServer, request: bytes) -> bytes:
    """All that is answered to some bytes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as made:
        made.sendall(request)
        pieces = []
        while piece := made.recv(1 << 16):
            pieces.append(piece)
    return b"".join(pieces)


def status(answer: bytes) -> int:
    return int(answer.split(None, 2)[1])


def request(
    server: DashboardServer, line: str = "GET /api/v1/state HTTP/1.1", *headers: str
) -> bytes:
    usual = [
        f"Host: 127.0.0.1:{server.port}",
        f"Authorization: Bearer {token_of(server)}",
    ]
    return "\r\n".join([line, *usual, *headers, "Connection: close", "", ""]).encode()


def test_a_good_request_is_answered(server: DashboardServer) -> None:
    answer = said(server, request(server))
    assert status(answer) == 200
    assert b"content-security-policy: default-src 'none'" in answer
    assert b"server:" not in answer.lower()
    assert b"cookie" not in answer.lower()


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["GET / HTTP/1.1", "Host: evil.example"], 421),
        (["GET / HTTP/1.1", "Host: 127.0.0.1.evil.example:{port}"], 421),
        (["GET / HTTP/1.1", "Host: evil@127.0.0.1:{port}"], 421),
        (["GET / HTTP/1.1", "Host: 127.0.0.1:1"], 421),
        (["GET / HTTP/1.1"], 400),
        (["GET / HTTP/1.1", "Host: 127.0.0.1:{port}", "Host: evil.example"], 400),
        (["GET / HTTP/1.0"], 400),
        (["GET / HTTP/1.1", "Host: [::1]:{port}"], 200),
        (["TRACE / HTTP/1.1", "Host: 127.0.0.1:{port}"], 405),
        (["CONNECT evil.example:443 HTTP/1.1", "Host: 127.0.0.1:{port}"], 405),
        (["GET http://evil.example/ HTTP/1.1", "Host: 127.0.0.1:{port}"], 404),
        (["GET //etc/passwd HTTP/1.1", "Host: 127.0.0.1:{port}"], 404),
        (["GET /page/../../../etc/passwd HTTP/1.1", "Host: 127.0.0.1:{port}"], 404),
        (["GET /page/%2e%2e/x HTTP/1.1", "Host: 127.0.0.1:{port}"], 404),
        (["GET /page/%00 HTTP/1.1", "Host: 127.0.0.1:{port}"], 404),
        (["NONSENSE"], 400),
    ],
)
def test_what_is_odd_is_refused(
    server: DashboardServer, lines: list[str], expected: int
) -> None:
    text = "\r\n".join([*lines, "Connection: close", "", ""])
    answer = said(server, text.replace("{port}", str(server.port)).encode())
    assert status(answer) == expected
    assert token_of(server).encode() not in answer


@pytest.mark.parametrize(
    "head", ["GET /" + "x" * 200_000, "GET / HTTP/1.1\r\nX: " + "y" * 200_000]
)
def test_a_head_without_end_is_read_no_further(
    server: DashboardServer, head: str
) -> None:
    answer = b""
    with suppress(ConnectionResetError, BrokenPipeError):  # it says why, if it can
        answer = said(server, head.encode())
    assert not answer or status(answer) == 400


def test_a_websocket_is_not_opened(server: DashboardServer) -> None:
    upgrade = (
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: eA==",
    )
    answer = said(server, request(server, "GET /api/v1/stream2 HTTP/1.1", *upgrade))
    assert status(answer) == 404


def test_who_sends_half_a_request_is_given_up(
    server: DashboardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_port, "HEAD_S", 0.05)
    assert status(said(server, b"GET / HTTP/1.1\r\nHost: 127")) == 408
    assert said(server, b"") == b""


def test_who_sends_half_of_a_second_request_is_given_up(
    server: DashboardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_port, "HEAD_S", 0.5)
    whole = f"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as made:
        made.sendall(whole.encode())
        while b'{"alive":true}' not in (heard := made.recv(4096)):
            assert heard
        made.sendall(b"G")
        assert status(made.recv(4096)) == 408


def test_more_streams_than_there_may_be_are_refused_in_words(
    server: DashboardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "MOST", 2)
    line = "GET /api/v1/stream HTTP/1.1"
    where = ("127.0.0.1", server.port)
    with ExitStack() as stack:
        for _ in range(2):
            made = stack.enter_context(socket.create_connection(where, timeout=10))
            made.sendall(request(server, line))
            assert status(made.recv(100)) == 200
        answer = said(server, request(server, line))
        assert status(answer) == 503
        body = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert body["error"].startswith("JG-621 2 pages are open")


def test_more_connections_than_there_may_be_are_refused_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "_CONNECTIONS", 3)
    with serving(Imagined(scene())) as server, ExitStack() as stack:
        where, whole = ("127.0.0.1", server.port), request(server)
        for _ in range(3):  # they say nothing
            stack.enter_context(socket.create_connection(where, timeout=10))
        refused = socket.create_connection(where, timeout=10)
        with refused:
            answer = refused.recv(1 << 16)
        assert status(answer) == 429
        assert b"3 connections are open already" in answer
        stack.close()
        assert status(said_once_there_is_room(server, whole)) == 200


def said_once_there_is_room(server: DashboardServer, request: bytes) -> bytes:
    """The answer when connections that were closed are known to be."""
    answer = b"HTTP/1.1 429"
    for _ in range(100):
        answer = said(server, request)
        if status(answer) != 429:
            break
    return answer


class Breaking(Imagined):
    """Has no view from some time on."""

    is_broken = False

    def view(self, at: float | None) -> Mapping[str, Any]:
        if self.is_broken:
            raise KeyError("no such thing")
        return super().view(at)


def test_a_stream_tells_the_view_and_then_what_changes() -> None:
    source = Imagined(scene()[:50])
    rest = scene()[50:]
    with (
        serving(source) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as made,
    ):
        made.sendall(request(server, "GET /api/v1/stream HTTP/1.1"))
        heard = b""
        while b"event: state" not in heard or b'"version":1' not in heard:
            heard += made.recv(1 << 16)
        for fact in rest:
            source.board.take(fact)
        while b"event: patch\nid: 2\ndata: " not in heard:
            heard += made.recv(1 << 16)
        assert b"x-accel-buffering: no" in heard


def test_readers_are_told_where_the_view_cannot_be_made_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "EVERY_S", 0.01)
    source = Breaking(scene()[:50])
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))
        if b"event: state" in sent[-1]:
            source.is_broken = True
            source.board.take(scene()[-1])

    async def run() -> None:
        await asyncio.wait_for(stream.Streams(source).run(send), 10)

    with pytest.raises(KeyError, match="no such thing"):
        asyncio.run(run())
    assert not any(b"event: patch" in data for data in sent)


def test_streams_are_counted_when_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "MOST", 2)
    asked: Any = None

    async def run() -> None:
        streams = stream.Streams(Imagined(scene()))
        for _ in range(2):
            await streams.open(asked)
        with pytest.raises(HTTPException, match="2 pages are open"):
            await streams.open(asked)
        streams.leave()
        await streams.open(asked)

    asyncio.run(run())


def test_who_never_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SEND_S", 0.05)

    async def send(message: Message) -> None:
        if b"event: state" in message.get("body", b""):
            await asyncio.Event().wait()  # nobody takes it

    async def run() -> None:
        await stream.Streams(Imagined(scene())).run(send)

    with pytest.raises(TimeoutError):
        asyncio.run(run())


def test_nothing_but_loopback_is_listened_at() -> None:
    for bind in ("0.0.0.0", "192.0.2.1", "head.example"):
        with pytest.raises(InsecureError, match=r"ssh -L 8472:127\.0\.0\.1:8472 HOST"):
            DashboardServer(Imagined(), Options(bind=bind))


def test_a_port_that_is_taken_is_named(server: DashboardServer) -> None:
    with pytest.raises(PortInUseError, match=f"127.0.0.1:{server.port}"):
        DashboardServer(Imagined(), Options(port=server.port))


@pytest.mark.parametrize(
    "origin", ["*", "http://*", "localhost:8888", "http://a b", "http://a;script-src *"]
)
def test_an_origin_cannot_change_the_policy(origin: str) -> None:
    with pytest.raises(ConfigError, match="is no origin"):
        DashboardServer(Imagined(), Options(port=0, embed_origins=[origin]))


def test_the_token_is_written_where_asked_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("of yesterday")
    path.chmod(0o644)
    with serving(Imagined(), token_file=path) as server:
        assert path.read_text().strip() == token_of(server)
        assert path.stat().st_mode & 0o777 == 0o600
    with serving(Imagined()) as other:
        assert token_of(other) != token_of(server)


def test_the_token_is_in_no_log(
    server: DashboardServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    for line in ("GET / HTTP/1.1", "GET /x HTTP/1.1", "GET /api/v1/state HTTP/1.1"):
        said(server, request(server, line))
    said(server, request(server, f"GET /?token={token_of(server)} HTTP/1.1"))
    assert token_of(server) not in caplog.text
