"""A TCP proxy on loopback that can go wrong: silent, slow, or cut off."""

import asyncio
from collections.abc import Iterable
from typing import Self

from jgraph.cluster import loop

_CHUNK = 1 << 16


class Proxy:
    """Passes bytes between whoever connects and ``target``.

    Attributes:
      address: where it listens.
      delay_s: each chunk arrives so much later, in order.
    """

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._passes = asyncio.Event()
        self._passes.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.delay_s = 0.0
        self.address = loop.run(self._start())

    async def _start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def silence(self) -> None:
        """Passes nothing any more, and closes nothing: half-open connections."""
        loop.event_loop().call_soon_threadsafe(self._passes.clear)

    def heal(self) -> None:
        """Passes bytes again, also those that came meanwhile."""
        loop.event_loop().call_soon_threadsafe(self._passes.set)

    def cut(self) -> None:
        """Resets all connections; new ones are taken."""
        loop.event_loop().call_soon_threadsafe(self._abort, tuple(self._writers))

    def close(self) -> None:
        """Ends everything."""
        loop.run(self._close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def _close(self) -> None:
        self._server.close()
        self._abort(tuple(self._writers))
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _abort(self, writers: Iterable[asyncio.StreamWriter]) -> None:
        for writer in writers:
            writer.transport.abort()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            there = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        for source, sink in ((reader, there[1]), (there[0], writer)):
            self._writers.add(sink)
            task = asyncio.ensure_future(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        passing = asyncio.ensure_future(self._pass_on(waiting, sink))
        now = asyncio.get_running_loop().time
        try:
            while chunk := await source.read(_CHUNK):
                waiting.put_nowait((now() + self.delay_s, chunk))
            waiting.put_nowait((now(), b""))
            await passing
        except (OSError, asyncio.CancelledError):
            passing.cancel()
        finally:
            self._writers.discard(sink)
            sink.close()

    async def _pass_on(
        self, waiting: "asyncio.Queue[tuple[float, bytes]]", sink: asyncio.StreamWriter
    ) -> None:
        now = asyncio.get_running_loop().time
        while True:
            due, chunk = await waiting.get()
            if due > now():
                await asyncio.sleep(due - now())
            await self._passes.wait()
            if not chunk:
                return
            sink.write(chunk)
            await sink.drain()
