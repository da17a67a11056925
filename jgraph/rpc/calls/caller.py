"""Client side of call streams: many calls over one resumable stream.

Opening a stream for each call costs several times what the call itself does.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Final, final

from jgraph.errors import (
    AddressError,
    CertificateError,
    ClusterBusyError,
    ClusterUnreachableError,
    JGError,
)
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.calls.stream import CallStream, Ended, Stream, StreamState
from jgraph.rpc.dial import deadline_error, lost_call
from jgraph.rpc.frames import body_of, frame, kind_of
from jgraph.rpc.resuming import RESUME_S, may_redial
from jgraph.rpc.serving import ROOM_METHOD
from jgraph.rpc.sockets.connecting import DataDialer
from jgraph.rpc.status import from_status
from jgraph.rpc.transport import Address, Frame
from jgraph.rpc.wire.codec import Prepared, encode, prepare
from jgraph.rpc.wire.decoder import Decoder

ASKS_METHOD: Final = "/jgraph.v1.Task/Asks"
MAX_ASK_BYTES: Final = 1 << 20
"""A larger request has a stream of its own, so that small ones need not wait for it."""


@final
class CallConnection:
    """Asks one server any number of things at a time, each of them once.

    A connection that breaks is made again, and what had not arrived is sent again, in
    both directions; not if nobody listens at the address any more, or another
    incarnation of the task does, or the server gave the line up.

    Args:
      address: where the server is.
      stream: of the method Asks, just opened.
      dial: opens another one.
      make_decoder: gives what turns the chunks of a stream into frames.
      hello: who we are, and which of our lines this is.
      near: take a socket that the server offers to callers of its machine.
      data: connects to its data port; None: nothing does.

    Attributes:
      is_broken: nothing can be asked any more.
    """

    def __init__(
        self,
        address: Address,
        stream: Stream,
        dial: Callable[[], Awaitable[Stream]],
        make_decoder: Callable[[], Decoder],
        hello: pb.Hello,
        *,
        near: bool,
        data: DataDialer | None = None,
    ) -> None:
        self.is_broken = False
        self._address = address
        self._dial = dial
        self._make_decoder = make_decoder
        self._hello = hello
        self._near = near
        self._data = data
        self._numbers = itertools.count(1)
        self._talk = StreamState()
        self._waiting: dict[int, Callable[[Frame | Ended], None]] = {}
        self._ended: Ended | None = None
        self._closing = False
        self._now = asyncio.get_running_loop().time
        self._stream = self._over(stream, incarnation=0)
        self._running = asyncio.create_task(self._run())

    async def ask(self, method: str, request: Prepared, timeout_s: float) -> Frame:
        """Returns the reply.

        Raises:
          DeadlineError: no reply within ``timeout_s``.
          TaskLostError: the server went away before it.
          JGError: whatever the other side raised.
        """
        waiting: asyncio.Future[Frame | Ended]
        waiting = asyncio.get_running_loop().create_future()
        number = self._begin(partial(_answer, waiting))
        self._talk.outbox.put(request.encoded(sequence=number, method=method))
        try:
            async with asyncio.timeout(timeout_s):
                return self._checked(method, await waiting)
        except TimeoutError as error:
            if isinstance(error, JGError):
                raise
            raise deadline_error(method, self._address, timeout_s) from None
        finally:
            was_answered = waiting.done() and not waiting.cancelled()
            self._forget(number, was_answered=was_answered)

    async def ask_in_turn(
        self, method: str, request: Prepared, timeout_s: float, *, at_once: bool
    ) -> Frame:
        """Returns the reply to a large request, sent when the server has room for it.

        Args:
          method: what is called.
          request: with its tensors.
          timeout_s: limit for all of it.
          at_once: send it first, and ask for room only if it is refused; not if its
            header is large, as the stream would end.

        Raises:
          ClusterBusyError: the server had no room for a while.
          JGError: as ``ask``.
        """
        end = self._now() + timeout_s
        if at_once and not request.has_large_header:
            try:
                return await self.ask(method, request, timeout_s)
            except ClusterBusyError as error:
                if error.details.get("refused") != method:
                    raise
        await self._make_room(method, request, end)
        return await self.ask(method, request, max(end - self._now(), 0.0))

    async def _make_room(self, method: str, request: Prepared, end: float) -> None:
        nbytes = sum([array.nbytes for array in request.arrays])
        if request.has_large_header:
            nbytes += request.header_bytes
        asked = prepare(frame(call=pb.Call(method=method, nbytes=nbytes)))
        await self.ask(ROOM_METHOD, asked, max(end - self._now(), 0.0))

    async def call(
        self, method: str, request: Prepared, timeout_s: float
    ) -> AsyncGenerator[Frame, None]:
        """Yields all replies.

        Raises: as ``ask``.
        """
        end = self._now() + timeout_s
        if request.has_large_header:
            await self._make_room(method, request, end)
        replies: asyncio.Queue[Frame | Ended] = asyncio.Queue()
        number = self._begin(replies.put_nowait)
        self._talk.outbox.put(
            request.encoded(sequence=number, method=method, every_reply=True)
        )
        is_over = False
        try:
            while True:
                async with asyncio.timeout_at(end):
                    reply = await replies.get()
                is_over = isinstance(reply, Ended) or kind_of(reply) in _LAST
                checked = self._checked(method, reply)
                if is_over:
                    return
                yield checked
        except TimeoutError as error:
            if isinstance(error, JGError):
                raise
            raise deadline_error(method, self._address, timeout_s) from None
        finally:
            self._forget(number, was_answered=is_over)

    def _begin(self, take: Callable[[Frame | Ended], None]) -> int:
        """Returns the number of a call; ``take`` gets the replies."""
        number = next(self._numbers)
        self._waiting[number] = take
        if self._ended is not None:  # since the line was chosen
            take(self._ended)
        return number

    def _checked(self, method: str, reply: Frame | Ended) -> Frame:
        """Returns a reply, unless it is an error."""
        if isinstance(reply, Ended):
            raise self._error(method, reply)
        if kind_of(reply) == "status":
            raise from_status(body_of(reply))
        return reply

    def _error(self, method: str, ended: Ended) -> JGError:
        if ended.error is not None:
            return ended.error
        return lost_call(method, self._address, self._closing)

    def _forget(self, number: int, *, was_answered: bool) -> None:
        if self._waiting.pop(number, None) is not None and not was_answered:
            self._talk.outbox.put(encode(frame(abandon=pb.Empty()), sequence=number))

    async def close(self) -> None:
        """Says goodbye; what is asked fails."""
        if not self.is_broken:
            self._closing = self.is_broken = True
            self._talk.outbox.put(encode(frame(goodbye=pb.Empty())))
            await self._stream.finish()
        self._running.cancel()
        await asyncio.wait([self._running])

    def _over(self, stream: Stream, incarnation: int) -> CallStream:
        return CallStream(
            self._address,
            stream,
            self._make_decoder,
            self._hello,
            self._talk,
            self._take,
            self._set_broken,
            incarnation=incarnation,
            near=self._near,
            data=self._data,
        )

    async def _run(self) -> None:
        ended, until = Ended(), self._now() + RESUME_S
        try:
            while True:
                ended = Ended()
                ended = await self._stream.run()
                if self._stream.was_accepted:
                    until = self._now() + RESUME_S
                # Without a question there is nothing to go on with.
                if not ended.may_resume or self._closing or not self._waiting:
                    return
                if not await self._again(until):
                    return
        except CertificateError as error:
            ended = Ended(error=error)
        finally:
            self.is_broken, self._ended = True, ended
            for take in list(self._waiting.values()):
                take(ended)

    async def _again(self, until: float) -> bool:
        """Opens another stream; returns whether it could.

        Raises:
          CertificateError: one has expired since the first stream.
        """
        while await may_redial(self._address, until, self._now):
            try:
                stream = await self._dial()
            except (AddressError, ClusterUnreachableError):
                continue
            except CertificateError:
                raise
            except JGError:
                return False
            self._stream = self._over(stream, self._stream.incarnation)
            return True
        return False

    def _set_broken(self) -> None:
        self.is_broken = True

    def _take(self, reply: Frame) -> None:
        take = self._waiting.get(reply.header.sequence)
        reply.header.ClearField("sequence")
        if take is not None:  # else it was given up
            take(reply)


_LAST: Final = frozenset({"goodbye", "status"})


def _answer(waiting: "asyncio.Future[Frame | Ended]", reply: Frame | Ended) -> None:
    if not waiting.done():
        waiting.set_result(reply)
