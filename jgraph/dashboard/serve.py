"""HTTP server of a dashboard: the port, its limits, and how it ends."""

import asyncio
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jgraph.dashboard.app import App, Source
from jgraph.dashboard.guard import Guard
from jgraph.dashboard.metrics import exposition
from jgraph.errors import ConfigError, InsecureError, PortInUseError

PORT: Final = 8472
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
_HEAD_BYTES: Final = 64 << 10
_HEAD_S: Final = 10.0
_CONNECTIONS: Final = 256
_END_S: Final = 3


@final
@dataclass(frozen=True, slots=True)
class Options:
    """How a dashboard serves.

    Attributes:
      bind: address of loopback.
      port: 0 takes any free one.
      allowed_hosts: see ``Guard``.
      embed_origins: see ``Guard``.
      token_file: where the token is written, mode 0600; None: nowhere.
      metrics_token: see ``Guard``.
    """

    bind: str = "127.0.0.1"
    port: int = PORT
    allowed_hosts: Sequence[str] = ()
    embed_origins: Sequence[str] = ()
    token_file: Path | None = None
    metrics_token: str = field(default="", repr=False)


@final
class DashboardServer:
    """Serves a source at a port of this machine.

    Args:
      source: what is shown.
      options: how.

    Attributes:
      url: of the page, with its token.
      port: that it took.

    Raises:
      InsecureError: others could reach ``bind``, and read what goes there.
      PortInUseError: something listens there.
    """

    def __init__(self, source: Source, options: Options) -> None:
        if options.bind not in _LOOPBACK:
            raise InsecureError(
                f"a dashboard speaks plain HTTP, and --bind {options.bind} can be "
                "reached from elsewhere; leave it on 127.0.0.1, and forward the port: "
                f"ssh -L {options.port}:127.0.0.1:{options.port} HOST"
            )
        for origin in options.embed_origins:
            _check_origin(origin)
        self._socket = _bound(options.bind, options.port)
        self.port = self._socket.getsockname()[1]
        token = secrets.token_urlsafe(32)
        if options.token_file is not None:
            _write_secret(options.token_file, token)
        guard = Guard(
            token,
            self.port,
            options.allowed_hosts,
            options.embed_origins,
            options.metrics_token,
        )
        host = f"[{options.bind}]" if ":" in options.bind else options.bind
        self.url = f"http://{host}:{self.port}/#token={token}"
        self._app = App(source, guard, exposition(lambda: source.view(None)))
        # Somebody may have typed the token where it does not belong: into a query.
        logging.getLogger("uvicorn.access").disabled = True
        config = uvicorn.Config(
            self._app.asgi,
            http=_PatientProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            limit_concurrency=_CONNECTIONS,
            h11_max_incomplete_event_size=_HEAD_BYTES,
            timeout_graceful_shutdown=_END_S,
        )
        self._server = uvicorn.Server(config)
        self._app.streams.ends = lambda: self._server.should_exit

    def run(self, until: Callable[[], object] | None = None) -> None:
        """Serves until a signal, ``stop``, or the end of ``until``.

        Args:
          until: called in a thread of its own; None: nothing is waited for.
        """
        if until is not None:
            name = "jgraph-attended"
            threading.Thread(
                target=self._wait, args=(until,), name=name, daemon=True
            ).start()
        try:
            asyncio.run(self._server.serve([self._socket]))
        finally:
            self._socket.close()

    def _wait(self, until: Callable[[], object]) -> None:
        until()
        self.stop()

    def stop(self) -> None:
        """Ends ``run``, soon; from any thread."""
        self._server.should_exit = True


@final
class _PatientProtocol(H11Protocol):
    """Gives a connection up on which no request came whole for ten seconds."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head = self.loop.call_later(_HEAD_S, self._give_up)

    def _give_up(self) -> None:
        if getattr(self, "cycle", None) is None and not self.transport.is_closing():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head.cancel()
        super().connection_lost(exc)


def _bound(bind: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((bind, port))
    except OSError as error:
        listening.close()
        raise PortInUseError(
            f"cannot listen at {bind}:{port}: {error.strerror}; another dashboard may "
            "be there: name another with --port, or 0 for any free one"
        ) from error
    listening.listen(128)
    return listening


def _write_secret(path: Path, token: str) -> None:
    try:
        path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "w") as file:
            file.write(token + "\n")
    except OSError as error:
        raise ConfigError(
            f"cannot write the token to {path}: {error.strerror}; name a file in a "
            "directory of yours with --token-file"
        ) from error


def _check_origin(origin: str) -> None:
    scheme, _, rest = origin.partition("://")
    plain = rest.replace("-", "").replace(".", "").replace(":", "")
    if scheme not in {"http", "https"} or not (plain.isascii() and plain.isalnum()):
        raise ConfigError(
            f"--embed-origin {origin!r:.80} is no origin; write for example "
            "http://localhost:8888"
        )
