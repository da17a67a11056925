"""HTTP server of a dashboard: the port, its limits, and how it ends."""

import asyncio
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final, final

import uvicorn

from jgraph.dashboard.app import App, Source
from jgraph.dashboard.guard import Guard
from jgraph.dashboard.metrics import exposition
from jgraph.errors import ConfigError, InsecureError
from jgraph.rpc.http_port import PlainProtocol, bound_socket, http_config

PORT: Final = 8472
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
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
        self._socket = bound_socket(
            options.bind,
            options.port,
            "another dashboard may be there: name another with --port, or 0 for any "
            "free one",
        )
        self._socket.listen(128)
        self.port = self._socket.getsockname()[1]
        token = secrets.token_urlsafe(32)
        if options.token_file is not None:
            try:
                _write_secret(options.token_file, token)
            except ConfigError:
                self._socket.close()
                raise
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
        config = http_config(
            self._app.asgi,
            PlainProtocol,
            connections=_CONNECTIONS,
            end_s=_END_S,
            date_header=True,  # by which a page knows how old what it shows is
        )
        self._server = _QuietServer(config, self._app.streams.end)

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
        self._server.end()


@final
class _QuietServer(uvicorn.Server):
    """Waits for its end; uvicorn's own looks ten times a second whether it has come.

    Args:
      config: of uvicorn.
      on_end: called in the event loop, before connections are waited for.
    """

    def __init__(self, config: uvicorn.Config, on_end: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_end = on_end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over = asyncio.Event()

    async def main_loop(self) -> None:
        """See ``uvicorn.Server``."""
        self._loop = asyncio.get_running_loop()
        await self.on_tick(0)  # sets the headers of all answers
        if not self.should_exit:
            await self._over.wait()
        self._on_end()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See ``uvicorn.Server``: a signal has come."""
        super().handle_exit(sig, frame)
        self._wake()

    def end(self) -> None:
        """Ends it, soon; from any thread."""
        self.should_exit = True
        self._wake()

    def _wake(self) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._over.set)


def _write_secret(path: Path, token: str) -> None:
    try:
        path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "w") as file:
            file.write(token + "\n")
    except OSError as error:
        raise ConfigError(
            f"cannot write the token to {path}: {error.strerror}; name a file in a "
            "directory of yours with --view-token-file"
        ) from error


def _check_origin(origin: str) -> None:
    scheme, _, rest = origin.partition("://")
    plain = rest.replace("-", "").replace(".", "").replace(":", "")
    if scheme not in {"http", "https"} or not (plain.isascii() and plain.isalnum()):
        raise ConfigError(
            f"--embed-origin {origin!r:.80} is no origin; write for example "
            "http://localhost:8888"
        )
