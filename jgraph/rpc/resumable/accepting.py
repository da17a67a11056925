"""Accepting end of a resumable link: its streams one after another, and their pipes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, final

import grpc

from jgraph.errors import (
    DeadlineError,
    JGError,
    MalformedMessageError,
    NotTakingError,
    TaskLostError,
)
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame, kind_of
from jgraph.rpc.resumable.admission_control import LOOK_EVERY_S, Admission
from jgraph.rpc.resumable.backlog import Backlog
from jgraph.rpc.resumable.numbers import ReceivedFrames
from jgraph.rpc.resumable.outbox import line_outbox
from jgraph.rpc.sockets.frame_socket import LAST_WORDS_S, FrameSocket
from jgraph.rpc.sockets.listener import Caller
from jgraph.rpc.sockets.offer import Doors, SocketEnded, SocketOffer
from jgraph.rpc.sockets.pipe import Pipe, StreamPipe, not_counted
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.codec import Buffer, Encoded, encode
from jgraph.rpc.wire.decoder import Decoder

RETURN_S: Final = 4.0
"""How long a caller whose connection broke may take to resume it."""
ASK_EVERY_S: Final = 0.25
"""How often its address is asked meanwhile: no one tells that a process is gone."""
_MAX_QUEUED_FRAMES: Final = 1 << 24
"""So many are never small enough that a writer who waits for room puts them in."""
_GIVES_UP: Final = (NotTakingError, DeadlineError)
_END: Final[object] = grpc.aio.EOF  # type: ignore[attr-defined]  # stubs lack it
_logger = logging.getLogger(__name__)


async def _never_gone() -> bool:
    return False


@final
class AcceptingEnd:
    """Takes what one caller sends, each frame once, over one stream after another.

    Args:
      hello: who accepts.
      doors: where callers may connect beside their streams.
      take: gets each frame that arrives, and counts it in ``received``.
      give_up: called when no stream goes on with the link any more.
      max_queued_bytes: more than this should not wait for the caller.
      received: what arrived before; nothing unless given.
      is_gone: whether nothing can come any more from the caller.

    Attributes:
      outbox: for the caller.
      received: what arrived.
      intake: lets in what comes over the stream that there is now.
    """

    intake: Admission

    def __init__(
        self,
        hello: pb.Hello,
        doors: Doors,
        take: Callable[[Frame], None],
        give_up: Callable[[], None],
        *,
        max_queued_bytes: int | None = None,
        received: ReceivedFrames | None = None,
        is_gone: Callable[[], Awaitable[bool]] = _never_gone,
    ) -> None:
        backlog = Backlog[Encoded](
            *(hello.task, "a caller", "", max_queued_bytes, _MAX_QUEUED_FRAMES)
        )
        self.outbox = line_outbox(backlog)
        self.received = received or ReceivedFrames()
        self._hello = hello
        self._doors = doors
        self._take = take
        self._give_up = give_up
        self._is_gone = is_gone
        self._turn = 0
        self._is_over = self._is_stopped = False
        self._may_return = True
        self._returning: asyncio.Task[None] | None = None
        # All but one of them only have to end.
        self._streams: set[asyncio.Task[Any]] = set()
        # Of the stream that there is now.
        self._serving: asyncio.Task[Any] | None = None
        self._refused: JGError | None = None
        self._socket: FrameSocket | None = None
        self._peer_has = 0
        self._is_sending = False
        self._beside: set[asyncio.Task[None]] = set()

    async def serve(
        self,
        context: Any,
        intake: Admission,
        first: list[Frame],
        moved: Callable[[int], None] = not_counted,
        *,
        is_near: bool = True,
    ) -> None:
        """Reads a stream to its end; takes over from one that is still there.

        Args:
          context: gRPC's, of the stream.
          intake: lets frames in.
          first: the Hello of the caller, and what came with it.
          moved: is told of bytes that arrive.
          is_near: the caller may be a process of this machine.

        Raises:
          MalformedMessageError: the stream is not one of frames.
          NotTakingError: the caller acknowledges nothing.
          DeadlineError: it does not go on with a frame that it began.
          TaskLostError: the link ended while this stream waited for the one before.
        """
        theirs: pb.Hello = body_of(first[0])
        self._turn += 1
        turn = self._turn
        if self._returning is not None:
            self._returning.cancel()

        decoder = intake.decoder

        def feed(chunk: Buffer) -> None:
            shared = decoder.shared_bytes
            received = decoder.feed(chunk)
            moved(len(chunk))
            if received:
                self._deliver(received)
            # The sender waits for what it has lent as well.
            self._acknowledge(len(chunk) + decoder.shared_bytes - shared)

        caller = Caller.of_stream(context)
        offer = SocketOffer(caller, decoder.room, feed, self._send_over)
        try:
            await self._take_over()
            self.intake, self._peer_has = intake, theirs.received
            self._socket, self._is_sending = None, False
            streamed = StreamPipe(context.write)
            reply = pb.Hello(
                received=self.received.tell(),
                shares_memory=decoder.shared is not None,
            )
            reply.MergeFrom(self._hello)
            offer.put_into(reply, self._doors, is_near=is_near)
            await streamed.write(encode(frame(hello=reply)).pieces)
            self._do(self._watch(intake))
            if early := first[1:]:
                self._send_over(streamed)
                self._deliver(early)
            reading = self._read(context, streamed, feed)
            await offer.beside(reading, lambda: self._is_over)
            self._may_return = self._resumable(theirs, offer)
            if not self._may_return:
                decoder.finish()
                await self._flush()
        except (SocketEnded, grpc.aio.InternalError, asyncio.CancelledError):
            # gRPC tells of a connection that broke by any of the last two.
            self._may_return = self._refused is None and self._resumable(theirs, offer)
            if self._refused is not None:
                raise self._refused from None
            raise
        except JGError:
            self._may_return = False
            await self._flush()
            raise
        finally:
            offer.close()
            try:
                await cancel_all(self._beside)
            finally:  # gRPC may cancel this meanwhile
                if turn == self._turn:
                    self._ended()

    def _resumable(self, theirs: pb.Hello, offer: SocketOffer) -> bool:
        # What left over a Unix socket is not kept: only a process's end ends it.
        is_done = self._is_over or self._is_stopped
        return bool(theirs.line) and not is_done and not offer.is_local

    def _ended(self) -> None:
        """Waits for the caller to come back, if it may."""
        if self._may_return:
            self._returning = asyncio.create_task(self._await_return())
        else:
            self._give_up()

    async def _await_return(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(RETURN_S):
                while not await self._is_gone():  # noqa: ASYNC110  # none tells us
                    await asyncio.sleep(ASK_EVERY_S)
        self._may_return = False
        self._give_up()

    def stop(self) -> None:
        """Waits for nobody to come back any more."""
        self._is_stopped = True
        self._may_return = False
        if self._returning is not None:
            self._returning.cancel()

    async def _take_over(self) -> None:
        """Ends the streams before this one; a later one may do so with this one.

        Each ends by itself, and waits for none: what there is of a stream that has
        begun to end is not of the next.
        """
        mine, before = asyncio.current_task(), set(self._streams)
        assert mine is not None  # gRPC runs handlers in tasks
        self._streams.add(mine)
        mine.add_done_callback(self._streams.discard)
        for task in before:
            task.cancel()
        if before:
            await asyncio.wait(before)
        if not self._may_return:
            raise given_up()
        self._serving = mine

    def _do(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._beside.discard(task)
        if task.cancelled():
            return
        error = task.exception()  # a connection that broke: who reads it learns it
        if isinstance(error, _GIVES_UP):
            self.refuse(error)

    def refuse(self, error: JGError) -> None:
        """Gives the link up; its caller learns why if it listens."""
        if self._refused is not None or self._serving is None:
            return
        _logger.warning("%s closes a connection: %s", self._hello.task, error.message)
        self._refused = error
        self._may_return = False
        self._serving.cancel()
        if self._returning is not None and not self._returning.done():
            self._returning.cancel()
            self._give_up()

    async def _read(
        self, context: Any, streamed: Pipe, feed: Callable[[Buffer], None]
    ) -> None:
        while not self._is_over and (chunk := await context.read()) is not _END:
            self._send_over(streamed)
            feed(chunk)
            # Or who takes nothing would fill our memory.
            await self.outbox.room()

    async def _watch(self, intake: Admission) -> None:
        """Gives a caller up that has room for a frame and does not go on sending it."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            # While its replies wait, nothing is read of it.
            if not self.outbox.is_full and intake.is_stuck():
                raise DeadlineError(
                    f"what {self._hello.task} has room for did not go on arriving for "
                    f"{2 * LOOK_EVERY_S:g} s, and the room was given back; look at the "
                    "caller and at the network, and try again",
                    task=self._hello.task,
                )

    def _deliver(self, received: list[Frame]) -> None:
        received.reverse()
        while received:
            # Kept nowhere here, or the memory of its tensors would be busy until more
            # comes.
            arrived = received.pop()
            kind = kind_of(arrived)
            if kind == "ack":
                self.outbox.acknowledge(body_of(arrived).received)
            elif kind == "goodbye" and not arrived.header.sequence:
                self._is_over = True
            else:
                self._take(arrived)

    def _acknowledge(self, nbytes: int) -> None:
        """Tells the caller now and then what arrived; waits if that takes nothing."""
        socket = self._socket
        keeps = socket is None or socket.keeps
        if keeps and self.received.is_ack_due(nbytes):
            self.outbox.tell(self.received.tell())
        if socket is None:
            return
        if self._is_over:
            socket.close()
        elif self.outbox.is_full:
            socket.pause_reading()
            self._do(self._read_again(socket))

    async def _read_again(self, socket: FrameSocket) -> None:
        await self.outbox.room()
        socket.resume_reading()

    def _send_over(self, pipe: Pipe) -> None:
        """Sends through what the caller uses: its first frame says that."""
        if not self._is_sending:
            self._is_sending = True
            self._socket = pipe if isinstance(pipe, FrameSocket) else None
            self._do(self.outbox.run(pipe, self._peer_has))

    async def _flush(self) -> None:
        """Lets go what waits: gRPC says nothing else while it is writing."""
        if not self._is_sending:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self.outbox.flushed()


def given_up() -> TaskLostError:
    """Returns what a caller learns that comes back too late."""
    return TaskLostError(
        "a connection cannot be resumed: it was given up, and what was called over it "
        "stopped"
    )


async def first_frames(context: Any, decoder: Decoder) -> list[Frame]:
    """Returns what the first chunks of a stream bring: a Hello, and perhaps more.

    Raises:
      MalformedMessageError: it ended before, or begins with something else.
    """
    received: list[Frame] = []
    while not received:
        chunk = await context.read()
        if chunk is _END:
            raise MalformedMessageError("the stream ended before its first frames")
        received = decoder.feed(chunk)
    if (kind := kind_of(received[0])) != "hello":
        raise MalformedMessageError(
            f"a stream begins with a Hello frame; '{kind}' was sent"
        )
    return received


async def cancel_all(tasks: "set[asyncio.Task[None]]") -> None:
    """Cancels tasks, and waits for their end."""
    remaining = list(tasks)
    for task in remaining:
        task.cancel()
    await asyncio.gather(*remaining, return_exceptions=True)
