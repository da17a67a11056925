"""Send queue of a resumable stream: frames of many writers, in order, over any pipe."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterator
from typing import Final, Generic, Protocol, TypeVar, final

from jgraph.errors import NotTakingError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.resumable.backlog import Backlog
from jgraph.rpc.resumable.numbers import SentFrames
from jgraph.rpc.sockets.frame_socket import AT_ONCE_BYTES, FrameSocket
from jgraph.rpc.sockets.pipe import Pipe, not_counted
from jgraph.rpc.wire.codec import CHUNK_BYTES, Buffer, Encoded, encode

FULL_BYTES: Final = 64 << 20
FEW_BYTES: Final = 1 << 20
"""So few may not be acknowledged before others are there."""
UNACKNOWLEDGED_S: Final = 30.0
"""Who acknowledges nothing for so long does not read."""


class Sendable(Protocol):
    """What can be put in: it knows its size."""

    @property
    def nbytes(self) -> int:
        """Bytes of header and tensors."""


_Item = TypeVar("_Item", bound=Sendable)


def as_it_is(item: Encoded, number: int) -> Encoded:
    """Encodes what is encoded; its number is known by counting."""
    del number
    return item


@final
class Outbox(Generic[_Item]):
    """Sends what is put in, in order; small frames share a chunk.

    A writer that gives up leaves no half of a frame behind, as it could by writing
    itself. What left over a pipe that may break is kept until it is acknowledged, and
    sent again over the next pipe.

    Args:
      backlog: keeps what has not begun to leave.
      encode: gives the bytes of an item by its number.
      numbers: of the frames; from 1 unless given.
      moved: is told of bytes that leave.
      give_up_s: who acknowledges nothing for so long does not read; None: that is
        noticed elsewhere.

    Attributes:
      backlog: the same.
      sent: what left and is not acknowledged.
      lend: encodes an item for the pipe that there is now; None: ``encode`` does.
      is_finishing: nothing is put in any more, and ``run`` returns when all has left.

    Example:
      >>> from jgraph.rpc._pb import jgraph_pb2 as pb
      >>> from jgraph.rpc.wire.codec import encode
      >>> from jgraph.rpc.frames import frame
      >>> from jgraph.rpc.sockets.pipe import StreamPipe
      >>> async def main():
      ...     sent = asyncio.Queue()
      ...     outbox = Outbox(Backlog(), as_it_is)
      ...     for _ in range(3):
      ...         outbox.put(encode(frame(empty=pb.Empty())))
      ...     sending = asyncio.create_task(outbox.run(StreamPipe(sent.put)))
      ...     print(len(await sent.get()), sent.empty())
      ...     sending.cancel()
      >>> asyncio.run(main())
      21 True
    """

    def __init__(
        self,
        backlog: Backlog[_Item],
        encode: Callable[[_Item, int], Encoded],
        *,
        numbers: Iterator[int] | None = None,
        moved: Callable[[int], None] = not_counted,
        give_up_s: float | None = None,
    ) -> None:
        self.backlog = backlog
        self.sent = SentFrames[_Item](numbers)
        self.lend: Callable[[_Item, int], Awaitable[Encoded]] | None = None
        self.is_finishing = False
        self._encode = encode
        self._count = moved
        self._give_up_s = give_up_s
        self._give_up_at: float | None = None
        loop = asyncio.get_running_loop()
        self._now, self._soon = loop.time, loop.call_soon
        self._idle_socket: FrameSocket | None = None
        self._received: int | None = None  # to be told
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._when_sent: list[Callable[[], None]] = []
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._wake = asyncio.Event()

    def put(self, item: _Item, step: Hashable = None) -> None:
        """Queues a frame, or sends it if it is small and can leave; never blocks.

        Args:
          item: the frame.
          step: what ``backlog.withdraw`` names; None is never withdrawn.

        Raises:
          NotTakingError: too much waits already.
        """
        socket = self._idle_socket
        if (
            socket is not None
            and socket.is_free
            and item.nbytes <= AT_ONCE_BYTES
            and not self.sent.is_full
        ):
            number = self.sent.add(item, item.nbytes, keep=socket.keeps)
            data = b"".join(self._encode(item, number).pieces)
            socket.write_now(data)
            self._count(len(data))
            return
        self.backlog.add(item, item.nbytes, step=step, now=self._now())
        self._is_empty.clear()
        self._idle_socket = None
        self._note_room()
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

    def when_sent(self, callback: Callable[[], None]) -> None:
        """Calls back when all is there, or was dropped: what is put in meanwhile too.

        Of what left over a pipe that may break, ``FEW_BYTES`` may be on their way.
        Never at once: what is put in then might overtake what is being written.
        """
        if self._is_done:
            self._soon(callback)
        else:
            self._when_sent.append(callback)

    @property
    def _is_done(self) -> bool:
        return self._is_empty.is_set() and self.sent.nbytes < FEW_BYTES

    def finish(self) -> None:
        """Lets ``run`` return when all has left."""
        self.is_finishing = True
        self._wake.set()

    def acknowledge(self, received: int) -> None:
        """Forgets the frames that the other side has."""
        self.sent.acknowledge(received)
        self._give_up_at = None
        self._note_room()
        self._note_done()
        if self.backlog:
            self._wake.set()

    def tell(self, received: int) -> None:
        """Acknowledges that many frames (0 too), before all that waits."""
        self._received = received
        self._wake.set()

    def clear(self) -> None:
        """Drops everything."""
        self.backlog.clear()
        self.sent.clear()
        self._is_empty.set()
        self._note_done()

    async def run(self, pipe: Pipe, received: int = 0) -> None:
        """Sends until it is finishing, it is cancelled, or the pipe fails.

        Args:
          pipe: what frames leave through.
          received: number of the last frame that the other side has got over earlier
            pipes; those after it are sent again first.

        Raises:
          NotTakingError: the other side acknowledges nothing for long.
        """
        self.acknowledge(received)
        for number, item in self.sent:
            await pipe.write((await self._encoded(item, number)).pieces, self._moved)
        if not pipe.keeps:
            self.sent.clear()
        try:
            while True:
                await self._drain(pipe)
                if self.is_finishing:
                    return
                # Nothing came during the last write, or this would overtake it.
                if isinstance(pipe, FrameSocket):
                    self._idle_socket = pipe
                await self._wake.wait()
        finally:
            self._idle_socket = None

    async def _drain(self, pipe: Pipe) -> None:
        """Writes all that waits, also what comes meanwhile."""
        self._wake.clear()
        while self.backlog or self._received is not None:
            if self.sent.is_full and self._received is None:
                await self._acknowledged()
            else:
                await pipe.write(await self._next(keep=pipe.keeps), self._moved)
        self.backlog.finish_frame()
        self._is_empty.set()
        self._note_done()

    def _note_done(self) -> None:
        if self._when_sent and self._is_done:
            callbacks, self._when_sent = self._when_sent, []
            for callback in callbacks:
                self._soon(callback)

    def _moved(self, nbytes: int) -> None:
        self._count(nbytes)
        self.backlog.moved(now=self._now())

    def _note_room(self) -> None:
        """Takes more while the other side has to acknowledge, also if full.

        An acknowledgement comes behind what was sent before it.
        """
        if self.backlog.queued_bytes > FULL_BYTES and not self.sent.is_full:
            self._has_room.clear()
        else:
            self._has_room.set()

    async def _acknowledged(self) -> None:
        """Waits until something is acknowledged, or is to be."""
        if self._give_up_at is None and self._give_up_s is not None:
            self._give_up_at = self._now() + self._give_up_s
        try:
            async with asyncio.timeout_at(self._give_up_at):
                await self._wake.wait()
        except TimeoutError:
            raise NotTakingError(
                f"nothing of the last {self.sent.nbytes:,} bytes over a line of calls "
                f"was acknowledged for {self._give_up_s:g} s"
            ) from None
        self._wake.clear()

    async def _next(self, *, keep: bool) -> list[Buffer]:
        """Takes out what is to be sent next: a frame, or several small ones."""
        pieces: list[Buffer] = []
        nbytes = 0
        if self._received is not None:
            pieces += encode(frame(ack=pb.Ack(received=self._received))).pieces
            self._received = None
        while self.backlog and nbytes < CHUNK_BYTES and not self.sent.is_full:
            item = self.backlog.take(now=self._now())
            number = self.sent.add(item, item.nbytes, keep=keep)
            encoded = await self._encoded(item, number)
            pieces += encoded.pieces
            nbytes += encoded.nbytes
        self._note_room()
        return pieces

    async def _encoded(self, item: _Item, number: int) -> Encoded:
        if self.lend is not None:
            return await self.lend(item, number)
        return self._encode(item, number)


def line_outbox(backlog: Backlog[Encoded] | None = None) -> Outbox[Encoded]:
    """Returns one of a line of calls; its writers wait by themselves unless bounded."""
    return Outbox(
        Backlog() if backlog is None else backlog, as_it_is, give_up_s=UNACKNOWLEDGED_S
    )
