"""Server side of call streams: answers calls over one resumable stream."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from contextlib import aclosing, suppress
from typing import Any, Final, final

import grpc

from jgraph.errors import (
    ClusterBusyError,
    DeadlineError,
    JGError,
    MalformedMessageError,
    MessageTooLargeError,
    NotTakingError,
    TaskLostError,
)
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.calls.admission_control import (
    LOOK_EVERY_S,
    CallAdmission,
    RequestBudget,
)
from jgraph.rpc.calls.stream import StreamState
from jgraph.rpc.frames import body_of, frame, kind_of
from jgraph.rpc.serving import ROOM_METHOD, answer, only_reply
from jgraph.rpc.sockets.frame_socket import LAST_WORDS_S, FrameSocket
from jgraph.rpc.sockets.listener import Caller
from jgraph.rpc.sockets.offer import Doors, SocketEnded, SocketOffer
from jgraph.rpc.sockets.pipe import Pipe, StreamPipe
from jgraph.rpc.statistics import Counters
from jgraph.rpc.status import to_status
from jgraph.rpc.transport import Frame, Handler
from jgraph.rpc.wire.codec import Buffer, Prepared, encode, pack, prepare, too_large

_logger = logging.getLogger(__name__)

MAX_UNANSWERED: Final = 1024
"""More calls of one caller at once are refused."""
_GIVES_UP: Final = (NotTakingError, DeadlineError)
END: Final[object] = grpc.aio.EOF  # type: ignore[attr-defined]  # stubs lack it


@final
class Answers:
    """Answers one line of a caller, each call as soon as it is done.

    Args:
      handler: what the task does with calls.
      hello: who answers.
      counters: where calls are counted.
      max_frame_bytes: larger replies become errors.
      room: for the bytes of calls, given back as they are answered.

    Attributes:
      turn: how many streams it has had.
      may_return: the last stream has not ended for good; another may go on there.
    """

    def __init__(
        self,
        handler: Handler,
        hello: pb.Hello,
        counters: Counters,
        max_frame_bytes: int,
        room: RequestBudget,
    ) -> None:
        self.turn = 0
        self.may_return = True
        self._handler = handler
        self._hello = hello
        self._counters = counters
        self._max_frame_bytes = max_frame_bytes
        self._room = room
        self._talk = StreamState()
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._is_over = False
        # All but one of them only have to end.
        self._streams: set[asyncio.Task[Any]] = set()
        # Of the stream that there is now.
        self._serving: asyncio.Task[Any] | None = None
        self._check: Callable[[str], None] | None = None
        self._given_up: NotTakingError | DeadlineError | None = None
        self._intake: CallAdmission | None = None
        self._socket: FrameSocket | None = None
        self._peer_has = 0
        self._is_sending = False
        self._beside: set[asyncio.Task[None]] = set()

    async def serve(
        self,
        context: Any,
        intake: CallAdmission,
        first: list[Frame],
        check: Callable[[str], None],
        doors: Doors,
    ) -> None:
        """Answers until the stream ends; takes over from one that is still there.

        Args:
          context: gRPC's, of the stream.
          intake: lets calls in.
          first: the Hello of the caller, and what came with it.
          check: refuses methods that the caller may not call.
          doors: where callers may connect beside their streams.

        Raises:
          MalformedMessageError: the stream is not one of calls.
          NotTakingError: the caller acknowledges nothing.
          DeadlineError: it does not go on with a call that it began.
          TaskLostError: the line ended while this stream waited for the one before.
        """
        hello, *early = first
        self.turn += 1

        def feed(chunk: Buffer) -> None:
            self._feed(intake.feed(chunk), len(chunk))

        room, caller = intake.decoder.room, Caller.of_stream(context)
        offer = SocketOffer(caller, room, lambda _, data: feed(data), self._send_over)
        try:
            await self._take_over()
            self._check, self._intake = check, intake
            self._socket, self._is_sending = None, False
            self._peer_has = body_of(hello).received
            await self._greet(context, offer, doors)
            self._do(self._watch(intake))
            streamed = StreamPipe(context.write)
            if early:
                self._send_over(streamed)
            for asked in early:
                self._take(asked)
            reading = self._read(context, streamed, feed)
            await offer.beside(reading, lambda: self._is_over)
            self.may_return = self._resumable(body_of(hello), offer)
            if not self.may_return:
                intake.decoder.finish()
                await self._flush()
        except (SocketEnded, grpc.aio.InternalError, asyncio.CancelledError):
            # gRPC tells of a connection that broke by any of the last two.
            if self._given_up is not None:
                self.may_return = False
                raise self._given_up from None
            self.may_return = self._resumable(body_of(hello), offer)
            raise
        except JGError:
            self.may_return = False
            await self._flush()
            raise
        finally:
            offer.close()
            await _end(self._beside)

    def _resumable(self, hello: pb.Hello, offer: SocketOffer) -> bool:
        return bool(hello.line) and not self._is_over and not offer.is_local

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
        if not self.may_return:
            raise given_up()
        self._serving = mine

    def stop(self) -> None:
        """Stops what is being answered: nobody waits for it any more."""
        for answering in self._answering.values():
            answering.cancel()

    async def end(self) -> None:
        """Stops what is being answered, and waits until it has."""
        await _end(self._answering.values())

    def _do(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._beside.discard(task)
        if task.cancelled():
            return
        error = task.exception()  # a connection that broke: who reads it learns it
        if isinstance(error, _GIVES_UP) and self._serving is not None:
            _logger.warning(
                "%s closes a connection: %s", self._hello.task, error.message
            )
            self._given_up = error
            self._serving.cancel()

    async def _greet(self, context: Any, offer: SocketOffer, doors: Doors) -> None:
        reply = pb.Hello(received=self._talk.received.last)
        reply.MergeFrom(self._hello)
        offer.put_into(reply, doors, is_near=self.turn == 1)
        for chunk in pack(encode(frame(hello=reply)).pieces):
            await context.write(chunk)

    async def _read(
        self, context: Any, streamed: Pipe, feed: Callable[[Buffer], None]
    ) -> None:
        while not self._is_over and (chunk := await context.read()) is not END:
            self._send_over(streamed)
            feed(chunk)
            # Or who takes no replies would fill our memory.
            await self._talk.outbox.room()

    async def _watch(self, intake: CallAdmission) -> None:
        """Gives a caller up that has room for a call and does not go on sending it."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            # While its replies wait, nothing is read of it.
            if not self._talk.outbox.is_full and intake.is_stuck():
                raise DeadlineError(
                    f"a call to {self._hello.task} did not go on arriving for "
                    f"{2 * LOOK_EVERY_S:g} s, and its room was given back; look at the "
                    "caller and at the network, and make the call again",
                    task=self._hello.task,
                )

    def _feed(self, received: list[Frame], nbytes: int) -> None:
        for asked in received:
            self._take(asked)
        socket = self._socket
        if socket is None or socket.keeps:
            self._talk.took(nbytes)
        if socket is None:
            return
        if self._is_over:
            socket.close()
        elif self._talk.outbox.is_full:
            socket.pause_reading()
            self._do(self._read_again(socket))

    async def _read_again(self, socket: FrameSocket) -> None:
        await self._talk.outbox.room()
        socket.resume_reading()

    def _send_over(self, pipe: Pipe) -> None:
        """Sends replies through what the caller uses: its first frame says that."""
        if not self._is_sending:
            self._is_sending = True
            self._socket = pipe if isinstance(pipe, FrameSocket) else None
            self._do(self._talk.outbox.run(pipe, self._peer_has))

    async def _flush(self) -> None:
        """Lets go what waits: gRPC says nothing else while it is writing."""
        if not self._is_sending:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._talk.outbox.flushed()

    def _take(self, asked: Frame) -> None:
        number, method = asked.header.sequence, asked.header.method
        kind = kind_of(asked)
        if kind == "ack":
            self._talk.outbox.acknowledge(body_of(asked).received)
            return
        self._talk.received.last += 1
        if kind == "goodbye":
            self._is_over = True
        elif kind == "abandon":
            if number in self._answering:
                self._answering[number].cancel()
        elif not number or not method:
            raise MalformedMessageError(
                f"a call has a number and a method; '{kind}' came with "
                f"number {number} and method '{method[:80]}'"
            )
        elif number in self._answering:
            raise MalformedMessageError(f"call {number} was made twice")
        else:
            self._begin(number, method, asked)

    def _begin(self, number: int, method: str, asked: Frame) -> None:
        assert self._intake is not None  # something was read
        try:
            nbytes = self._intake.begin(number, method, self._hello.task)
        except ClusterBusyError as error:
            self._refuse(number, error)
            return
        self._counters.calls_served += 1
        work = self._answer_each if asked.header.every_reply else self._answer
        if method == ROOM_METHOD:
            work = self._make_room
        for name in ("sequence", "method", "every_reply"):
            asked.header.ClearField(name)
        answering = asyncio.create_task(work(number, method, asked))
        self._answering[number] = answering
        # Also of one that is given up before it began.
        answering.add_done_callback(lambda _: self._end_of(number, nbytes))

    def _end_of(self, number: int, nbytes: int) -> None:
        del self._answering[number]
        self._room.give(nbytes)

    def _refuse(self, number: int, error: ClusterBusyError) -> None:
        if not self._room.has_refused:  # one line while it lasts
            self._room.has_refused = True
            _logger.warning("%s.", error.message)
        self._put(number, prepare(frame(status=to_status(error))))

    async def _make_room(self, number: int, method: str, request: Frame) -> None:
        """Tells the caller when the call that it names will be let in."""
        intake = self._intake
        assert intake is not None  # something was read
        try:
            if kind_of(request) != "call":
                raise MalformedMessageError(
                    f"'{method}' takes a 'call', and '{kind_of(request)}' was sent"
                )
            wanted = body_of(request)
            if wanted.nbytes > self._max_frame_bytes:
                limit = self._max_frame_bytes
                raise MessageTooLargeError(too_large("call", wanted.nbytes, limit))
            self._may_answer(wanted.method)
            await intake.reserve(wanted.nbytes, wanted.method, self._hello.task)
            self._put(number, prepare(frame(empty=pb.Empty())))
        except ClusterBusyError as error:
            self._refuse(number, error)
        except JGError as error:
            self._put(number, prepare(frame(status=to_status(error))))

    async def _answer(self, number: int, method: str, request: Frame) -> None:
        try:
            self._may_answer(method)
            replies = answer(self._handler, self._hello, method, request)
            reply = await only_reply(replies, method, self._hello.task)
            self._put(number, self._prepared(reply))
        except JGError as error:
            self._put(number, prepare(frame(status=to_status(error))))

    async def _answer_each(self, number: int, method: str, request: Frame) -> None:
        try:
            self._may_answer(method)
            replies = answer(self._handler, self._hello, method, request)
            async with aclosing(replies):
                async for reply in replies:
                    self._put(number, self._prepared(reply))
                    await self._talk.outbox.room()
            self._put(number, prepare(frame(goodbye=pb.Empty())))
        except JGError as error:
            self._put(number, prepare(frame(status=to_status(error))))

    def _may_answer(self, method: str) -> None:
        if len(self._answering) > MAX_UNANSWERED:
            raise ClusterBusyError(
                f"{self._hello.task} answers {MAX_UNANSWERED} calls of yours "
                f"already and refused '{method}'; wait for some of them",
                refused=method,
                task=self._hello.task,
            )
        assert self._check is not None  # something was read
        self._check(method)

    def _prepared(self, reply: Frame) -> Prepared:
        return prepare(reply, max_frame_bytes=self._max_frame_bytes)

    def _put(self, number: int, reply: Prepared) -> None:
        self._talk.outbox.put(reply.encoded(sequence=number))


def given_up() -> TaskLostError:
    """Returns what a caller learns that comes back too late."""
    return TaskLostError(
        "a connection cannot be resumed: it was given up, and what was called over it "
        "stopped"
    )


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    left = list(tasks)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
