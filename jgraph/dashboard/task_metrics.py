"""Metrics port of one task: what a server itself tells Prometheus."""

import asyncio
import threading
from typing import Any, Final, final

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from jgraph.client.status import ClusterStatus
from jgraph.client.watching import status_fact
from jgraph.clock import WallClock
from jgraph.coordination.watch.board import Board
from jgraph.dashboard.app import Guarded
from jgraph.dashboard.guard import Guard
from jgraph.dashboard.metrics import View, exposition
from jgraph.rpc.http_port import PlainProtocol, bound_socket, http_config
from jgraph.server.server import Server

_CONNECTIONS: Final = 32
_END_S: Final = 1
_ADVICE: Final = (
    "the token is missing or another one; show what is in the file of "
    "--metrics-token-file: Authorization: Bearer TOKEN"
)


@final
class TaskMetrics:
    """Answers ``GET /metrics`` with the facts of one task, and nothing else.

    The names are those of a dashboard; runs, of which a master knows, are not there.

    Args:
      server: the task, which listens.
      bind: address to listen on.
      port: 0 takes any free one.
      token: what a scrape has to show; it is good for nothing else.

    A task with a certificate shows that one; else this is plain HTTP.

    Attributes:
      port: that it took.
      url: of the metrics.

    Raises:
      PortInUseError: something listens there.
    """

    def __init__(self, server: Server, bind: str, port: int, token: str) -> None:
        self._facts = server.status_message
        self._clock = WallClock()
        self._board = Board()
        self._lock = threading.Lock()
        advice = "name another port with --metrics-port, or 0 for any free one"
        self._socket = bound_socket(bind, port, advice)
        self._socket.listen(_CONNECTIONS)
        self.port: int = self._socket.getsockname()[1]
        self._text = exposition(self._view)
        guard = Guard("", self.port, metrics_token=token, any_host=True, advice=_ADVICE)
        app = Guarded(Starlette(routes=[Route("/metrics", self._show)]), guard)
        certificate: dict[str, Any] = {}
        tls, scheme = server.tls, "http"
        if tls is not None:
            certificate = {"ssl_certfile": tls.cert, "ssl_keyfile": tls.key}
            scheme = "https"
        host = server.address.rpartition(":")[0]
        self.url = f"{scheme}://{host}:{self.port}/metrics"
        config = http_config(
            app,
            PlainProtocol,
            connections=_CONNECTIONS,
            end_s=_END_S,
            date_header=False,
            **certificate,
        )
        self._http = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._serve, name="jgraph-metrics", daemon=True
        )

    def start(self) -> None:
        """Begins to answer, in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Answers no more; returns when the port is free."""
        self._http.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        asyncio.run(self._http.serve([self._socket]))

    async def _show(self, request: Request) -> Response:
        text, kind = await run_in_threadpool(self._text)
        return PlainTextResponse(text, media_type=kind)

    def _view(self) -> View:
        """Returns what is known of the task, as it is now."""
        status = ClusterStatus.from_message(self._facts())
        with self._lock:  # Prometheus may ask from two places
            self._board.take(status_fact(status, self._clock.now()))
            return self._board.view()
