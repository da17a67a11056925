"""HTTP port: bounds of its connections and of the heads of requests, and what it logs.

Below the applications that answer: they see requests whose head is here.
"""

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jgraph.errors import HttpRequestError, JGError, OverloadedError, PortInUseError

HEAD_S: Final = 10.0
"""The head of a request is here by then."""
HEAD_BYTES: Final = 64 << 10
DirectAnswer: TypeAlias = tuple[int, Mapping[str, str], bytes]
"""Status, headers and body."""
DirectBody: TypeAlias = Callable[[bytes], DirectAnswer | None]
"""Answers a POST by its body; None leaves it to the application."""
Direct: TypeAlias = Callable[[str, Mapping[str, str]], DirectBody | None]
"""Finds by path and headers what answers a POST, also the next one with the same."""


class HttpBounds(asyncio.Protocol):
    """Ends connections that are too many, or on which no head of a request comes."""

    loop: Any
    transport: Any
    connections: Any
    cycle: Any
    access_log: bool
    limit_concurrency: int | None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Somebody may have typed a token where it does not belong: into a query.
        self.access_log = False
        self._most, self.limit_concurrency = self.limit_concurrency, None
        self._head_timer: asyncio.TimerHandle | None = None
        self._has_begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes a connection, if there is room."""
        super().connection_made(transport)
        self._look_at_head()
        if self._most is not None and len(self.connections) > self._most:
            error = OverloadedError(
                f"{self._most} connections are open already, and more are not taken; "
                "come again, and close those that you do not need"
            )
            self.end(429, "Too Many Requests", error)

    def data_received(self, data: bytes) -> None:
        """Reads on, for as long as a request may take."""
        if self.transport.is_closing():
            return
        self._has_begun = True
        super().data_received(data)
        self._look_at_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets a connection."""
        self.stop_timer()
        super().connection_lost(exc)

    def _look_at_head(self) -> None:
        """Has a head end in time: from when its connection, or its first byte, came."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.stop_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._give_up)

    def stop_timer(self) -> None:
        """Waits for no head any more."""
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer, self._has_begun = None, False

    def _give_up(self) -> None:
        if self.transport.is_closing():
            return
        if self._has_begun:
            late = f"the request was not here in {HEAD_S:g} s"
            self.end(408, "Request Timeout", HttpRequestError(late))
        else:  # it may be a connection that is kept for later
            self.transport.close()

    def end(self, status: int, reason: str, error: JGError) -> None:
        """Ends the connection with an answer."""
        body = json.dumps({"error": str(error), "code": error.code}).encode()
        retry = "retry-after: 1\r\n" if status == 429 else ""
        head = (
            f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n"
            f"{retry}content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class PlainProtocol(HttpBounds, H11Protocol):
    """HTTP/1.1 by h11, which bounds the bytes of a head itself."""


def http_config(
    app: Any,
    protocol: type[asyncio.Protocol],
    *,
    connections: int,
    end_s: float,
    **options: Any,
) -> uvicorn.Config:
    """Returns how to serve an application at a port.

    Args:
      app: answers.
      protocol: ``PlainProtocol``, or what ``direct_protocol`` returns.
      connections: at most.
      end_s: answers under way are given so long at the end.
      **options: further ones of uvicorn.
    """
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=connections,
        h11_max_incomplete_event_size=HEAD_BYTES,
        timeout_graceful_shutdown=int(end_s),
        **options,
    )
    config.load()
    config.loaded_app = app  # else all addresses are logged where tracing is on
    return config


def bound_socket(bind: str, port: int, advice: str) -> socket.socket:
    """Returns a socket that has an address; 0 takes any port that is free.

    Raises:
      PortInUseError: something listens there; says ``advice``.
    """
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((bind, port))
    except OSError as error:
        listener.close()
        host = f"[{bind}]" if ":" in bind else bind
        raise PortInUseError(
            f"cannot listen at {host}:{port}: {error.strerror}; {advice}"
        ) from error
    return listener
