"""Client side of call streams: many calls over one link.

Opening a stream for each call costs several times what the call itself does.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Final, TypeAlias, final

from jgraph.errors import ClusterBusyError, JGError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.dial import deadline_error, lost_call
from jgraph.rpc.frames import body_of, frame, kind_of
from jgraph.rpc.resumable.dialing import DialingEnd, LinkLost, OpenStream
from jgraph.rpc.resumable.outbox import line_outbox
from jgraph.rpc.serving import ROOM_METHOD
from jgraph.rpc.sockets.connecting import DataDialer
from jgraph.rpc.sockets.frame_socket import LAST_WORDS_S
from jgraph.rpc.status import from_status
from jgraph.rpc.transport import Address, Frame
from jgraph.rpc.wire.codec import Prepared, encode, prepare
from jgraph.rpc.wire.decoder import Decoder

ASKS_METHOD: Final = "/jgraph.v1.Task/Asks"
MAX_ASK_BYTES: Final = 1 << 20
"""A larger request has a stream of its own, so that small ones need not wait for it."""
_Reply: TypeAlias = Frame | JGError | LinkLost
_LAST: Final = frozenset({"goodbye", "status"})


@final
class CallConnection:
    """Asks one server any number of things at a time, each of them once.

    Args:
      address: where the server is.
      hello: who we are, and which of our lines this is.
      open_stream: opens a stream of the method Asks.
      make_decoder: gives what turns the chunks of a stream into frames.
      near: take a socket that the server offers to callers of its machine.
      data: connects to its data port; None: nothing does.
    """

    def __init__(
        self,
        address: Address,
        hello: pb.Hello,
        open_stream: OpenStream,
        make_decoder: Callable[[], Decoder],
        *,
        near: bool,
        data: DataDialer | None = None,
    ) -> None:
        self._address = address
        self._numbers = itertools.count(1)
        self._outbox = line_outbox()
        self._waiting: dict[int, Callable[[_Reply], None]] = {}
        self._ended: JGError | LinkLost | None = None
        self._closing = False
        self._now = asyncio.get_running_loop().time
        self._end = DialingEnd(
            *(address, hello, self._outbox, open_stream, make_decoder, self._take),
            near=near,
            data=data,
            # Without a question there is nothing to go on with.
            goes_on=lambda: bool(self._waiting) and not self._closing,
        )
        self._running = asyncio.create_task(self._run())

    @property
    def is_broken(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._closing or self._end.is_broken

    async def ask(self, method: str, request: Prepared, timeout_s: float) -> Frame:
        """Returns the reply.

        Raises:
          DeadlineError: no reply within ``timeout_s``.
          TaskLostError: the server went away before it.
          JGError: whatever the other side raised.
        """
        waiting: asyncio.Future[_Reply]
        waiting = asyncio.get_running_loop().create_future()
        number = self._begin(partial(_answer, waiting))
        self._outbox.put(request.encoded(sequence=number, method=method))
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
        replies: asyncio.Queue[_Reply] = asyncio.Queue()
        number = self._begin(replies.put_nowait)
        self._outbox.put(
            request.encoded(sequence=number, method=method, every_reply=True)
        )
        is_over = False
        try:
            while True:
                async with asyncio.timeout_at(end):
                    reply = await replies.get()
                is_over = isinstance(reply, Exception) or kind_of(reply) in _LAST
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

    def _begin(self, take: Callable[[_Reply], None]) -> int:
        """Returns the number of a call; ``take`` gets the replies."""
        number = next(self._numbers)
        self._waiting[number] = take
        if self._ended is not None:  # since the line was chosen
            take(self._ended)
        return number

    def _checked(self, method: str, reply: _Reply) -> Frame:
        """Returns a reply, unless it is an error."""
        if isinstance(reply, LinkLost):
            raise lost_call(method, self._address, reply.why, self._closing)
        if isinstance(reply, JGError):
            raise reply
        if kind_of(reply) == "status":
            raise from_status(body_of(reply))
        return reply

    def _forget(self, number: int, *, was_answered: bool) -> None:
        if self._waiting.pop(number, None) is not None and not was_answered:
            self._outbox.put(encode(frame(abandon=pb.Empty()), sequence=number))

    async def close(self) -> None:
        """Says goodbye; what is asked fails."""
        self._closing = True
        self._outbox.finish()
        await asyncio.wait([self._running], timeout=LAST_WORDS_S)
        self._running.cancel()
        await asyncio.wait([self._running])

    async def _run(self) -> None:
        ended: JGError | LinkLost = LinkLost()
        try:
            await self._end.run()
        except (JGError, LinkLost) as error:
            ended = error
        finally:
            self._ended = ended
            for take in list(self._waiting.values()):
                take(ended)

    def _take(self, reply: Frame) -> None:
        self._end.received.count()
        take = self._waiting.get(reply.header.sequence)
        reply.header.ClearField("sequence")
        if take is not None:  # else it was given up
            take(reply)


def _answer(waiting: "asyncio.Future[_Reply]", reply: _Reply) -> None:
    if not waiting.done():
        waiting.set_result(reply)
