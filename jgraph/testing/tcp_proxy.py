"""TCP proxy on loopback with faults: disconnected, silent, slow or corrupting."""

import asyncio
from typing import Self, final

_CHUNK = 1 << 16


@final
class TcpProxy:
    """Passes bytes between whoever connects and a target, until told otherwise.

    All methods belong to the event loop that ``open`` runs on.

    Args:
      target: ``host:port``.

    Attributes:
      address: where it listens.
      passed_bytes: of all connections, towards the target.
      cut_after_bytes: once this many have passed towards the target, all connections
        are reset, and the number is forgotten.
      delay_s: what arrives is passed on so much later.
      flips: so many times one bit of what passes next, either way, is another.
      held: set when something arrived that is not passed on, because it is silent.

    Example:
      >>> async def main():
      ...     async with TcpProxy("127.0.0.1:1") as proxy:
      ...         print(proxy.address.startswith("127.0.0.1:"))
      >>> asyncio.run(main())
      True
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._sinks: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self.address = ""
        self.passed_bytes = 0
        self.cut_after_bytes: int | None = None
        self.delay_s = 0.0
        self.flips = 0
        self.held = asyncio.Event()
        self._passes = asyncio.Event()
        self._passes.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        for pump in tuple(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def lead_to(self, target: str) -> None:
        """Sends connections that are made from now on to another address."""
        self._target = target

    def cut(self) -> None:
        """Resets all connections; new ones are taken."""
        for sink in tuple(self._sinks):
            sink.transport.abort()

    def silence(self) -> None:
        """Passes nothing on, and closes nothing: half-open connections."""
        self.held.clear()
        self._passes.clear()

    def heal(self) -> None:
        """Passes bytes on again, also those that came meanwhile."""
        self._passes.set()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        host, _, port = self._target.rpartition(":")
        try:
            back, there = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        for source, sink, counts in ((reader, there, True), (back, writer, False)):
            self._sinks.add(sink)
            pump = asyncio.create_task(self._pump(source, sink, counts))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, counts: bool
    ) -> None:
        try:
            while chunk := await source.read(_CHUNK):
                if self.delay_s:  # it plays a slow network
                    await asyncio.sleep(self.delay_s)
                if not self._passes.is_set():
                    self.held.set()
                    await self._passes.wait()
                sink.write(self._flipped(chunk))
                await sink.drain()
                if counts:
                    self._count(len(chunk))
        except OSError:
            pass
        finally:
            self._sinks.discard(sink)
            sink.close()

    def _flipped(self, chunk: bytes) -> bytes:
        if not self.flips:
            return chunk
        self.flips -= 1
        # Somewhere else each time, and the same places in each run.
        bit = self.passed_bytes % (8 * len(chunk))
        wrong = bytearray(chunk)
        wrong[bit // 8] ^= 1 << bit % 8
        return bytes(wrong)

    def _count(self, nbytes: int) -> None:
        self.passed_bytes += nbytes
        limit = self.cut_after_bytes
        if limit is not None and self.passed_bytes >= limit:
            self.cut_after_bytes = None
            self.cut()
