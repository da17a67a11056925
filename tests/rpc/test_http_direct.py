"""Requests that come one after the other, without waiting for answers."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("httptools")

from uvicorn.server import ServerState

from jgraph.rpc.http_direct import direct_protocol
from jgraph.rpc.http_port import HEAD_BYTES, DirectBody, http_config
from tests.support.run_async import run_async


class Written(asyncio.Transport):
    """What an HTTP port answers."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.data += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


def answered(path: str, headers: Mapping[str, str]) -> DirectBody:
    del path, headers
    return lambda body: (200, {}, body)


HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
REQUEST = HEAD + bytes(1000)


@pytest.mark.parametrize(
    ("first", "then", "answers"),
    [(REQUEST * 100, HEAD[:20], 100), (b"", HEAD[:-2] + b"X: " + b"x" * HEAD_BYTES, 0)],
)
def test_bytes_of_earlier_requests_do_not_count_in_the_bound_of_a_head(
    first: bytes, then: bytes, answers: int
) -> None:
    async def main() -> None:
        kind, transport = direct_protocol(answered), Written()
        config = http_config(None, kind, connections=1, end_s=1.0)
        port: Any = kind(config, ServerState(), {})  # type: ignore[call-arg]
        port.connection_made(transport)
        port.data_received(first + then)
        assert transport.data.count(b"HTTP/1.1 200 OK") == answers
        assert (b"HTTP/1.1 431 " in transport.data) == transport.is_closed
        assert transport.is_closed is not bool(answers)
        port.connection_lost(None)

    run_async(main())
