"""Send queue of a call stream: interleaves the frames of several writers in order."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, final

from jgraph.errors import NotTakingError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.in_flight import InFlightWindow
from jgraph.rpc.sockets.frame_socket import AT_ONCE_BYTES, FrameSocket
from jgraph.rpc.wire.codec import Encoded, Packer, encode, pack

FULL_BYTES: Final = 64 << 20
UNTOLD_BYTES: Final = 1 << 30
"""More than this, and the frame that left last, waits until some is acknowledged."""
UNTOLD_S: Final = 30.0
"""Who acknowledges nothing for so long does not read."""
FRAME_BYTES: Final = 512
"""What a frame costs that is kept, beside its own bytes."""


@final
class Outbox:
    """Sends what is put in, in order; small frames share a chunk.

    A writer that gives up leaves no half of a frame behind, as it could by writing
    itself. What left over a stream of gRPC is kept until it is acknowledged, and sent
    again over the next stream; what left over a socket is not.

    Example:
      >>> from jgraph.rpc._pb import jgraph_pb2 as pb
      >>> from jgraph.rpc.wire.codec import encode
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
        self._idle_socket: FrameSocket | None = None
        self._frames: deque[Encoded] = deque()
        self._nbytes = 0
        self._kept = InFlightWindow[Encoded]()
        self._number = 0
        self._received = 0
        self._give_up_s: float | None = None
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._wake = asyncio.Event()

    def put(self, encoded: Encoded) -> None:
        """Queues a frame, or sends it if it is small and can leave; never blocks."""
        socket = self._idle_socket
        if socket is not None and socket.is_free and encoded.nbytes <= AT_ONCE_BYTES:
            socket.write_now(b"".join(encoded.pieces))
            return
        self._frames.append(encoded)
        self._is_empty.clear()
        self._nbytes += encoded.nbytes
        self._note_room()
        self._idle_socket = None
        self._wake.set()

    @property
    def is_full(self) -> bool:
        """Whether no more should be put in: much waits to leave."""
        return not self._has_room.is_set()

    async def room(self) -> None:
        """Waits until it is not full."""
        await self._has_room.wait()

    async def flushed(self) -> None:
        """Waits until all has left."""
        await self._is_empty.wait()

    def acknowledge(self, received: int) -> None:
        """Forgets the frames that the other side has."""
        self._kept.acknowledge(received)
        self._give_up_s = None
        self._note_room()
        if self._frames:
            self._wake.set()

    def tell(self, received: int) -> None:
        """Acknowledges the frames of the other side, before all that waits."""
        self._received = received
        self._wake.set()

    async def run(
        self, write: Callable[[bytes], Awaitable[None]], received: int = 0
    ) -> None:
        """Sends until it is cancelled, or the stream fails.

        Args:
          write: sends a chunk.
          received: how many frames the other side has of earlier streams; those after
            them are sent again first.

        Raises:
          NotTakingError: the other side acknowledges nothing for long.
        """
        self.acknowledge(received)
        for _, encoded in list(self._kept):
            for chunk in pack(encoded.pieces):
                await write(chunk)
        while True:
            await self._empty(write, keep=True)
            await self._wake.wait()

    async def run_over(self, socket: FrameSocket) -> None:
        """Sends over a socket until it is cancelled."""
        while True:
            await self._empty(lambda chunk: socket.write((chunk,)), keep=False)
            if not self._frames:  # or it would overtake what came during the last write
                self._idle_socket = socket
            await self._wake.wait()

    async def _empty(
        self, write: Callable[[bytes], Awaitable[None]], *, keep: bool
    ) -> None:
        packer = Packer()
        self._wake.clear()
        while self._frames or self._received:
            if self._has_to_wait and not self._received:
                if rest := packer.rest():
                    await write(rest)
                await self._told()
                continue
            encoded = self._next(keep)
            for piece in encoded.pieces:
                for chunk in packer.add(piece):
                    await write(chunk)
        if rest := packer.rest():
            await write(rest)
        if not self._frames:
            self._is_empty.set()

    @property
    def _has_to_wait(self) -> bool:
        return self._kept.nbytes - self._kept.last_nbytes > UNTOLD_BYTES

    def _note_room(self) -> None:
        """Takes more while the other side has to acknowledge, also if full.

        An acknowledgement comes behind what was sent before it.
        """
        if self._nbytes > FULL_BYTES and not self._has_to_wait:
            self._has_room.clear()
        else:
            self._has_room.set()

    async def _told(self) -> None:
        """Waits until something is acknowledged, or is to be."""
        if self._give_up_s is None:
            self._give_up_s = asyncio.get_running_loop().time() + UNTOLD_S
        try:
            async with asyncio.timeout_at(self._give_up_s):
                await self._wake.wait()
        except TimeoutError:
            raise NotTakingError(
                f"nothing of the last {self._kept.nbytes:,} bytes over a line of calls "
                f"was acknowledged for {UNTOLD_S:g} s"
            ) from None
        self._wake.clear()

    def _next(self, keep: bool) -> Encoded:
        """Takes out what is to be sent next."""
        if self._received:
            told = pb.Ack(received=self._received)
            self._received = 0
            return encode(frame(ack=told))
        encoded = self._frames.popleft()
        self._nbytes -= encoded.nbytes
        if keep:
            self._number += 1
            self._kept.add(self._number, encoded, encoded.nbytes + FRAME_BYTES)
        self._note_room()
        return encoded
