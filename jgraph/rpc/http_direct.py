"""HTTP/1.1 by httptools, whose small requests may be answered where they are read.

A request of uvicorn is a task, a dict for the application and messages to and from it,
which is half of what an answer costs that is there at once. There is no httptools for
Windows, and so no such module.
"""

import asyncio
import sys
from collections.abc import Mapping
from functools import cache
from http import HTTPStatus
from typing import Final, final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jgraph.errors import HttpRequestError
from jgraph.rpc.http_port import HEAD_BYTES, Direct, DirectBody, HttpBounds

BODY_BYTES: Final = 64 << 10
"""Of a request that is answered directly, at most."""


class FastProtocol(HttpBounds, HttpToolsProtocol):
    """HTTP/1.1 by httptools, with a bound on the bytes of a head."""

    _head_bytes = 0
    _is_in_head = False
    _came = 0
    """Bytes that are being read."""
    _read_to = -1
    """Where a head ended that wishes for another protocol; -1: there was none."""
    _came_with_others = 0
    """Of these, if a request ended among them."""
    _body: bytearray | None = None
    """Of a request that may be answered directly, as far as it is here."""
    _head: tuple[bytes, list[tuple[bytes, bytes]]] | None = None
    """Path and headers of the last request, but for its length."""
    _answer: DirectBody | None = None
    """What answers requests with this head."""

    def answering(self, path: str, headers: Mapping[str, str]) -> DirectBody | None:
        """Returns what answers a POST with such a head; None: the application does."""
        return None

    def on_message_begin(self) -> None:
        """Counts the bytes of a head from here."""
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, -self._came_with_others

    def data_received(self, data: bytes) -> None:
        """Reads on; a head has a bound."""
        while data:
            self._came, self._came_with_others = len(data), 0
            self._read_to = -1
            super().data_received(data)
            data = self._plain(data[self._read_to :]) if self._read_to >= 0 else b""
        if not self._is_in_head:
            return
        self._head_bytes += self._came
        if self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            large = f"the head of a request has {HEAD_BYTES:,} bytes at most"
            error = HttpRequestError(large)
            self.end(431, "Request Header Fields Too Large", error)

    def on_headers_complete(self) -> None:
        """Waits for the body of what may be answered directly."""
        self._is_in_head = False
        if self._wishes_for_another():
            return
        if self._may_be_direct():
            self._body = bytearray()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Takes a part of a body."""
        if self._body is None:
            super().on_body(body)
        else:
            self._body += body

    def on_message_complete(self) -> None:
        """Answers, or lets the application do so."""
        if self._wishes_for_another():
            return
        self._came_with_others = self._came
        if self._body is not None:
            if self._is_answered(bytes(self._body)):
                self._body = None
                return
            self._hand_over()
        super().on_message_complete()

    def _wishes_for_another(self) -> bool:
        """Whether a request would change the protocol, as that of HTTP/2 in plain."""
        parser = self.parser
        return parser.should_upgrade() and parser.get_method() != b"CONNECT"

    def _unsupported_upgrade_warning(self) -> None:
        """Notes where the head ended: httptools read no further, and lost the body."""
        error = sys.exception()
        if self._wishes_for_another() and error is not None:
            self._read_to = error.args[0]

    def _plain(self, rest: bytes) -> bytes:
        """Returns a request as it is without the wish, which a server may ignore."""
        parser = self.parser
        version = parser.get_http_version().encode()
        lines = [b" ".join([parser.get_method(), self.url, b"HTTP/" + version])]
        lines += [b": ".join(one) for one in self.headers if one[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        return b"\r\n".join([*lines, b"", rest])

    def shutdown(self) -> None:
        """Ends when what has begun is answered: by the application, that it ends."""
        if self._body is not None:
            self._hand_over()
        super().shutdown()

    def _hand_over(self) -> None:
        body, self._body = self._body, None
        super().on_headers_complete()
        if body:
            super().on_body(bytes(body))

    def _may_be_direct(self) -> bool:
        """Whether a request has nothing of the less usual parts of HTTP."""
        parser = self.parser
        if parser.get_method() != b"POST" or parser.get_http_version() != "1.1":
            return False
        if self.expect_100_continue or parser.should_upgrade():
            return False
        if self.cycle is not None and not self.cycle.response_complete:
            return False  # answers go out in the order of requests
        if self.flow.write_paused:
            return False
        lengths = [value for name, value in self.headers if name == b"content-length"]
        return len(lengths) == 1 and 0 < _number(lengths[0]) <= BODY_BYTES

    def _is_answered(self, body: bytes) -> bool:
        pairs = [one for one in self.headers if one[0] != b"content-length"]
        if (head := (self.url, pairs)) != self._head:  # callers repeat themselves
            headers = {
                name.decode("latin-1"): value.decode("latin-1")
                for name, value in reversed(pairs)  # the first of a name counts
            }
            self._answer = self.answering(self.url.decode("latin-1"), headers)
            self._head = head
        answer = self._answer and self._answer(body)
        if answer is None:
            return False
        self._write(*answer)
        self.stop_timer()
        self.on_response_complete()
        return True

    def _write(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        lines = [_first_line(status)]
        for name, value in self.server_state.default_headers:
            lines.append(f"{name.decode('latin-1')}: {value.decode('latin-1')}")
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if "content-length" not in headers:
            lines.append(f"content-length: {len(body)}")
        keeps = self.parser.should_keep_alive()
        if not keeps:
            lines.append("connection: close")
        head = "\r\n".join([*lines, "", ""])
        self.transport.write(head.encode("latin-1") + body)
        if not keeps:
            self.transport.close()


@cache
def _first_line(status: int) -> str:
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"


def direct_protocol(direct: Direct) -> type[asyncio.Protocol]:
    """Returns a protocol that asks this first, once a small request is here."""

    @final
    class DirectProtocol(FastProtocol):
        """One that has it."""

        def answering(self, path: str, headers: Mapping[str, str]) -> DirectBody | None:
            return direct(path, headers)

    return DirectProtocol


def _number(length: bytes) -> int:
    """Returns a length; a number that is too long is none of ours."""
    return int(length) if length.isdigit() and len(length) < 10 else -1
