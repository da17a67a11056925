"""Control connections: what the Spark tasks of a cluster tell the driver, and are told.

One line of JSON a message, over TLS with a certificate of this cluster: a task of Spark
checks it, and shows a secret that came with its order. A line says what, and nothing is
evaluated.
"""

import asyncio
import hmac
import json
import logging
import ssl
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, final

from jgraph.cluster import event_loop
from jgraph.graph.device import TaskName
from jgraph.launch.spark.keeper import BEAT_S, SILENT_BEATS

Message: TypeAlias = Mapping[str, Any]

_LOG = logging.getLogger("jgraph.spark")
_HELLO_S: Final = 90.0
"""A task of Spark looks for its versions before it says hello."""
_LONGEST: Final = 1 << 20
"""Bytes of a line: the end of a log, or a cluster of some thousands of tasks."""


class Seat(Protocol):
    """What is told of the Spark tasks of one task of the cluster; must not block."""

    def seated(self, link: "KeeperLink") -> None:
        """A Spark task is there."""

    def heard(self, link: "KeeperLink", message: Message) -> None:
        """It has said something."""

    def lost(self, link: "KeeperLink") -> None:
        """It is there no more."""


@final
class KeeperLink:
    """The connection of one Spark task.

    Attributes:
      hello: what it said first.
    """

    def __init__(self, writer: asyncio.StreamWriter, hello: Message) -> None:
        self._writer = writer
        self.hello = hello

    @property
    def address(self) -> str:
        """How others reach its host."""
        address = str(self.hello["address"])
        return f"[{address}]" if ":" in address else address

    def tell(self, **order: Any) -> None:
        """Sends an order, from any thread; nobody hears it if the link is lost."""
        data = json.dumps(order).encode() + b"\n"
        event_loop.event_loop().call_soon_threadsafe(self._write, data)

    def close(self) -> None:
        """Ends the connection, and what runs there with it."""
        event_loop.event_loop().call_soon_threadsafe(self._writer.close)

    def _write(self, data: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(data)


@final
class ControlServer:
    """Listens for the Spark tasks of one cluster.

    Args:
      directory: with ``launcher.crt`` and ``launcher.key``.
      secret: what each of them shows.
      seats: whom their connections concern.
    """

    def __init__(
        self, directory: Path, secret: str, seats: Mapping[TaskName, Seat]
    ) -> None:
        self._secret = secret
        self._seats = seats
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.load_cert_chain(
            directory / "launcher.crt", directory / "launcher.key"
        )
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[Any]] = set()

    def start(self, host: str) -> int:
        """Listens on a host's address; returns the port.

        Raises:
          OSError: that is no address of this host.
        """
        return event_loop.run(self._start(host))

    def close(self) -> None:
        """Ends all connections."""
        event_loop.run(self._close())

    async def _start(self, host: str) -> int:
        self._server = await asyncio.start_server(
            self._serve, host, 0, ssl=self._context, limit=_LONGEST
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        for serving in list(self._serving):
            serving.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        serving = asyncio.current_task()
        assert serving is not None  # this is one
        self._serving.add(serving)
        try:
            with suppress(OSError, ValueError, TimeoutError):
                async with asyncio.timeout(_HELLO_S):
                    hello = await self._hello(reader)
                if hello is None:
                    _LOG.warning(
                        "a caller of the control port without its secret was refused"
                    )
                else:
                    await self._follow(reader, KeeperLink(writer, hello))
        except asyncio.CancelledError:
            pass  # the cluster was closed
        finally:
            self._serving.discard(serving)
            writer.close()

    async def _hello(self, reader: asyncio.StreamReader) -> Message | None:
        message = json.loads(await reader.readline())
        hello = message.get("hello") if isinstance(message, dict) else None
        if not isinstance(hello, dict):
            return None
        secret = str(hello.get("secret", "")).encode()
        if not hmac.compare_digest(secret, self._secret.encode()):
            return None
        return hello if hello.get("task") in self._seats else None

    async def _follow(self, reader: asyncio.StreamReader, link: KeeperLink) -> None:
        seat = self._seats[TaskName(link.hello["task"])]
        beating = asyncio.create_task(_beat(link))
        seat.seated(link)
        try:
            while True:
                async with asyncio.timeout(BEAT_S * SILENT_BEATS):
                    line = await reader.readline()
                if not line:
                    break
                message = json.loads(line)
                if "beat" not in message:
                    seat.heard(link, message)
        finally:
            beating.cancel()
            seat.lost(link)


async def _beat(link: KeeperLink) -> None:
    while True:
        await asyncio.sleep(BEAT_S)
        link.tell(beat=True)
