"""Server side of call streams: answers calls over one link."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Final, final

from jgraph.errors import (
    ClusterBusyError,
    JGError,
    MalformedMessageError,
    MessageTooLargeError,
    NotTakingError,
)
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame, kind_of
from jgraph.rpc.resumable.accepting import AcceptingEnd
from jgraph.rpc.resumable.admission_control import RequestBudget
from jgraph.rpc.serving import ROOM_METHOD, answer, only_reply
from jgraph.rpc.sockets.offer import Doors
from jgraph.rpc.statistics import Counters
from jgraph.rpc.status import to_status
from jgraph.rpc.transport import Frame, Handler
from jgraph.rpc.wire.codec import Prepared, prepare, too_large

_logger = logging.getLogger(__name__)

MAX_UNANSWERED: Final = 1024
"""More calls of one caller at once are refused."""


@final
class Answers:
    """Answers one line of a caller, each call as soon as it is done.

    Args:
      handler: what the task does with calls.
      hello: who answers.
      counters: where calls are counted.
      max_frame_bytes: larger replies become errors.
      max_queued_bytes: a caller for whom more than this waits is given up.
      room: for the bytes of calls, given back as they are answered.
      doors: where callers may connect beside their streams.
      check: refuses methods that the caller may not call.
      give_up: called when no stream goes on with the line any more.

    Attributes:
      end: of the line.
    """

    def __init__(
        self,
        handler: Handler,
        hello: pb.Hello,
        counters: Counters,
        max_frame_bytes: int,
        max_queued_bytes: int,
        room: RequestBudget,
        doors: Doors,
        check: Callable[[str], None],
        give_up: Callable[[], None],
    ) -> None:
        self._handler = handler
        self._hello = hello
        self._counters = counters
        self._max_frame_bytes = max_frame_bytes
        self._room = room
        self._check = check
        self._answering: dict[int, asyncio.Task[None]] = {}
        self.end = AcceptingEnd(
            *(hello, doors, self._take, give_up), max_queued_bytes=max_queued_bytes
        )

    def stop(self) -> None:
        """Stops what is being answered: nobody waits for it any more."""
        self.end.stop()
        for answering in self._answering.values():
            answering.cancel()

    def _take(self, asked: Frame) -> None:
        number, method = asked.header.sequence, asked.header.method
        kind = kind_of(asked)
        self.end.received.count()
        if kind == "abandon":
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
        try:
            nbytes = self.end.intake.begin(number, method, self._hello.task)
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
        intake = self.end.intake
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
                    await self.end.outbox.room()
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
        self._check(method)

    def _prepared(self, reply: Frame) -> Prepared:
        return prepare(reply, max_frame_bytes=self._max_frame_bytes)

    def _put(self, number: int, reply: Prepared) -> None:
        try:
            self.end.outbox.put(reply.encoded(sequence=number))
        except NotTakingError as error:  # with nothing between a call and its reply
            self.end.refuse(error)
