"""Frames of several writers, sent one after the other over one stream."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import final

from jgraph.rpc.codec import Encoded, Packer
from jgraph.rpc.local_socket import AT_ONCE_BYTES, LocalSocket


@final
class Outbox:
    """Sends what is put in, in order; small frames share a chunk.

    A writer that gives up leaves no half of a frame behind, as it could by writing
    itself.

    Example:
      >>> from jgraph.rpc._pb import jgraph_pb2 as pb
      >>> from jgraph.rpc.codec import encode
      >>> from jgraph.rpc.frames import frame
      >>> async def main():
      ...     sent = asyncio.Queue()
      ...     outbox = Outbox()
      ...     for _ in range(3):
      ...         outbox.put(encode(frame(empty=pb.Empty())))
      ...     sending = asyncio.create_task(outbox.run(sent.put))
      ...     print(len(await sent.get()), sent.empty())
      ...     sending.cancel()
      >>> asyncio.run(main())
      21 True
    """

    def __init__(self) -> None:
        self._idle_socket: LocalSocket | None = None
        self._frames: deque[Encoded] = deque()
        self._wake = asyncio.Event()

    def put(self, encoded: Encoded) -> None:
        """Queues a frame, or sends it if it is small and can leave; never blocks."""
        socket = self._idle_socket
        if socket is not None and socket.is_free and encoded.nbytes <= AT_ONCE_BYTES:
            socket.write_now(b"".join(encoded.pieces))
            return
        self._frames.append(encoded)
        self._idle_socket = None
        self._wake.set()

    async def run(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Sends until it is cancelled, or the stream fails.

        Args:
          write: sends a chunk.
        """
        while True:
            await self._wake.wait()
            await self._empty(write)

    async def run_over(self, socket: LocalSocket) -> None:
        """Sends over a socket until it is cancelled."""
        while True:
            await self._empty(socket.write)
            if not self._frames:  # or it would overtake what came during the last write
                self._idle_socket = socket
            await self._wake.wait()

    async def _empty(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        packer = Packer()
        self._wake.clear()
        while self._frames:
            for piece in self._frames.popleft().pieces:
                for chunk in packer.add(piece):
                    await write(chunk)
        if rest := packer.rest():
            await write(rest)
