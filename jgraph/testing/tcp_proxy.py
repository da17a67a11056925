"""TCP proxy on loopback with faults: disconnected, silent, slow or corrupting."""

import asyncio
import re
import struct
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Self, final

_CHUNK = 1 << 16
_LINE_CHUNK = 1 << 13
"""Of a slow line: nobody waits longer for a turn than this takes."""
_PORT = struct.Struct("<I")
_DATA_SOCKET = re.compile(rb"\x0d(..\0\0)\x12\x20.{32}\x1a\x20.{32}", re.DOTALL)
"""The message of that name, as gRPC sends it without TLS."""


@final
class TcpProxy:
    """Passes bytes between whoever connects and a target, until told otherwise.

    A data socket that the target offers on the way leads through the proxy too, unless
    the offer is encrypted: its port is replaced.

    All methods belong to the event loop that ``open`` runs on.

    Args:
      target: ``host:port``.

    Attributes:
      address: where it listens.
      passed_bytes: of all connections, towards the target.
      data_bytes: of those to data ports, towards the target.
      cut_after_bytes: once this many have passed towards the target, all connections
        are reset, and the number is forgotten.
      watch: is given what passes to and from data ports.
      delay_s: what arrives is passed on so much later.
      bytes_per_s: so much passes each way at most, of connections that are made from
        now on together; more waits, as at the end of a slow line, and ``delay_s``
        comes on top of each byte once. 0: without bound.
      free_at: when the line is free, either way; proxies that have one are one line.
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
        self._servers: dict[int, asyncio.Server] = {}
        self._beginning = asyncio.Lock()
        self._sinks: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self.address = ""
        self.passed_bytes = 0
        self.data_bytes = 0
        self.cut_after_bytes: int | None = None
        self.watch: Callable[[bytes], object] = len
        self.delay_s = 0.0
        self.bytes_per_s = 0.0
        self.free_at = {True: 0.0, False: 0.0}  # either way
        self.flips = 0
        self.held = asyncio.Event()
        self._passes = asyncio.Event()
        self._passes.set()

    async def __aenter__(self) -> Self:
        self.address = f"127.0.0.1:{await self.lead_data(0)}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        for server in self._servers.values():
            server.close()
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

    async def lead_data(self, data_port: int) -> int:
        """Returns the port that leads to a data port (0: to the target itself)."""
        async with self._beginning:  # or two callers would begin two, and lose one
            if data_port not in self._servers:
                self._servers[data_port] = await asyncio.start_server(
                    partial(self._serve, data_port), "127.0.0.1", 0
                )
        port: int = self._servers[data_port].sockets[0].getsockname()[1]
        return port

    async def _serve(
        self,
        data_port: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        host, _, port = self._target.rpartition(":")
        try:
            back, there = await asyncio.open_connection(host, data_port or int(port))
        except OSError:
            writer.transport.abort()
            return
        is_data = bool(data_port)
        for source, sink, is_back in ((reader, there, False), (back, writer, True)):
            self._sinks.add(sink)
            pump = asyncio.create_task(self._pump(source, sink, is_back, is_data))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        is_back: bool,
        is_data: bool,
    ) -> None:
        try:
            async with aclosing(self._arrivals(source, is_back)) as arrivals:
                async for chunk in arrivals:
                    if not self._passes.is_set():
                        self.held.set()
                        await self._passes.wait()
                    passing = chunk[: None if is_back else self._remaining()]
                    if is_back and not is_data:
                        passing = await self._led_here(chunk)
                    if is_data:
                        self.watch(passing)
                    sink.write(self._flipped(passing))
                    await sink.drain()
                    if not is_back:
                        self.data_bytes += is_data * len(passing)
                        self._count(len(passing))
        except OSError:
            pass
        finally:
            self._sinks.discard(sink)
            sink.close()

    async def _arrivals(
        self, source: asyncio.StreamReader, is_back: bool
    ) -> AsyncGenerator[bytes, None]:
        """Yields what comes from one end when it arrives at the other."""
        if not self.bytes_per_s:
            while chunk := await source.read(_CHUNK):
                if self.delay_s:  # it plays a slow network
                    await asyncio.sleep(self.delay_s)
                yield chunk
            return
        line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sending = asyncio.create_task(self._send(source, line, is_back))
        now = asyncio.get_running_loop().time
        try:
            while True:
                due, chunk = await line.get()
                await asyncio.sleep(max(due - now(), 0.0))
                if not chunk:
                    return
                yield chunk
        finally:
            sending.cancel()

    async def _send(
        self,
        source: asyncio.StreamReader,
        line: "asyncio.Queue[tuple[float, bytes]]",
        is_back: bool,
    ) -> None:
        """Puts what comes on the line, one chunk after the other, and last nothing."""
        now, chunk = asyncio.get_running_loop().time, b" "
        while chunk:
            try:
                chunk = await source.read(_LINE_CHUNK)
            except OSError:
                chunk = b""
            began = max(now(), self.free_at[is_back])
            self.free_at[is_back] = began + len(chunk) / self.bytes_per_s
            await asyncio.sleep(self.free_at[is_back] - now())
            line.put_nowait((now() + self.delay_s, chunk))

    async def _led_here(self, chunk: bytes) -> bytes:
        """Returns what the target said, with our ports in place of its data ports."""
        found = _DATA_SOCKET.search(chunk)
        if found is None:
            return chunk
        port = await self.lead_data(_PORT.unpack(found[1])[0])
        return chunk[: found.start(1)] + _PORT.pack(port) + chunk[found.end(1) :]

    def _flipped(self, chunk: bytes) -> bytes:
        if not self.flips:
            return chunk
        self.flips -= 1
        # Somewhere else each time, and the same places in each run.
        bit = self.passed_bytes % (8 * len(chunk))
        wrong = bytearray(chunk)
        wrong[bit // 8] ^= 1 << bit % 8
        return bytes(wrong)

    def _remaining(self) -> int | None:
        """Returns how many bytes may pass before all is cut."""
        limit = self.cut_after_bytes
        return None if limit is None else max(limit - self.passed_bytes, 1)

    def _count(self, nbytes: int) -> None:
        self.passed_bytes += nbytes
        limit = self.cut_after_bytes
        if limit is not None and self.passed_bytes >= limit:
            self.cut_after_bytes = None
            self.cut()
