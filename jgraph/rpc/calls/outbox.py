"""Send queue of a call stream: interleaves the frames of several writers in order."""

import asyncio
from collections import deque
from typing import Final, final

from jgraph.errors import NotTakingError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.in_flight import InFlightWindow
from jgraph.rpc.sockets.frame_socket import AT_ONCE_BYTES, FrameSocket
from jgraph.rpc.sockets.pipe import Pipe
from jgraph.rpc.wire.codec import CHUNK_BYTES, Buffer, Encoded, encode

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
    itself. What left for another host is kept until it is acknowledged, and sent again
    over the next pipe; what left over a Unix socket is not.

    Example:
      >>> from jgraph.rpc._pb import jgraph_pb2 as pb
      >>> from jgraph.rpc.wire.codec import encode
      >>> from jgraph.rpc.frames import frame
      >>> from jgraph.rpc.sockets.pipe import StreamPipe
      >>> async def main():
      ...     sent = asyncio.Queue()
      ...     outbox = Outbox()
      ...     for _ in range(3):
      ...         outbox.put(encode(frame(empty=pb.Empty())))
      ...     sending = asyncio.create_task(outbox.run(StreamPipe(sent.put)))
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
        self._received: int | None = None  # to be told
        self._give_up_s: float | None = None
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._wake = asyncio.Event()

    def put(self, encoded: Encoded) -> None:
        """Queues a frame, or sends it if it is small and can leave; never blocks."""
        socket = self._idle_socket
        if (
            socket is not None
            and socket.is_free
            and encoded.nbytes <= AT_ONCE_BYTES
            and not self._has_to_wait
        ):
            if socket.keeps:
                self._keep(encoded)
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
        """Acknowledges that many frames (0 too), before all that waits."""
        self._received = received
        self._wake.set()

    async def run(self, pipe: Pipe, received: int = 0) -> None:
        """Sends until it is cancelled, or the pipe fails.

        Args:
          pipe: what frames leave through.
          received: how many frames the other side has of earlier pipes; those after
            them are sent again first.

        Raises:
          NotTakingError: the other side acknowledges nothing for long.
        """
        self.acknowledge(received)
        for _, encoded in list(self._kept):
            await pipe.write(encoded.pieces)
        try:
            while True:
                await self._empty(pipe)
                # Or it would overtake what came during the last write.
                if isinstance(pipe, FrameSocket) and not self._frames:
                    self._idle_socket = pipe
                await self._wake.wait()
        finally:
            self._idle_socket = None

    async def _empty(self, pipe: Pipe) -> None:
        self._wake.clear()
        while self._frames or self._received is not None:
            if self._must_wait:
                await self._told()
            else:
                await pipe.write(self._next(keep=pipe.keeps))
        self._is_empty.set()

    @property
    def _must_wait(self) -> bool:
        """Whether nothing may leave but acknowledgements, and there are none."""
        return self._has_to_wait and self._received is None

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

    def _next(self, *, keep: bool) -> list[Buffer]:
        """Takes out what is to be sent next: a frame, or several small ones."""
        pieces: list[Buffer] = []
        nbytes = 0
        if self._received is not None:
            pieces += encode(frame(ack=pb.Ack(received=self._received))).pieces
            self._received = None
        while self._frames and nbytes < CHUNK_BYTES and not self._has_to_wait:
            encoded = self._frames.popleft()
            self._nbytes -= encoded.nbytes
            nbytes += encoded.nbytes
            pieces += encoded.pieces
            if keep:
                self._keep(encoded)
        self._note_room()
        return pieces

    def _keep(self, encoded: Encoded) -> None:
        self._number += 1
        self._kept.add(self._number, encoded, encoded.nbytes + FRAME_BYTES)
