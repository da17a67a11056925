"""Frames of several writers, sent one after the other over one stream."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import final

from jgraph.rpc.codec import Encoded, Packer


@final
class Outbox:
    """Sends what is put in, in order; small frames share a chunk.

    A writer that gives up leaves no half of a frame behind, as it could by writing
    itself.

    Args:
      write: sends a chunk.

    Example:
      >>> from jgraph.rpc._pb import jgraph_pb2 as pb
      >>> from jgraph.rpc.codec import encode
      >>> from jgraph.rpc.frames import frame
      >>> async def main():
      ...     sent = asyncio.Queue()
      ...     outbox = Outbox(sent.put)
      ...     sending = asyncio.create_task(outbox.run())
      ...     for _ in range(3):
      ...         outbox.put(encode(frame(empty=pb.Empty())))
      ...     print(len(await sent.get()), sent.empty())
      ...     sending.cancel()
      >>> asyncio.run(main())
      21 True
    """

    def __init__(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        self._write = write
        self._frames: deque[Encoded] = deque()
        self._wake = asyncio.Event()

    def put(self, encoded: Encoded) -> None:
        """Queues a frame; never blocks."""
        self._frames.append(encoded)
        self._wake.set()

    async def run(self) -> None:
        """Sends until it is cancelled, or the stream fails."""
        packer = Packer()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._frames:
                for piece in self._frames.popleft().pieces:
                    for chunk in packer.add(piece):
                        await self._write(chunk)
            if rest := packer.rest():
                await self._write(rest)
