"""The serving half of Asks: calls with one reply, over a stream that stays open."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, final

import grpc

from jgraph.errors import ClusterBusyError, JGError, MalformedMessageError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.codec import Buffer, Prepared, encode, prepare
from jgraph.rpc.decoder import Decoder
from jgraph.rpc.exchange_stream import check_protocol
from jgraph.rpc.frames import body_of, frame, kind_of
from jgraph.rpc.local_door import LocalDoor, LocalOffer
from jgraph.rpc.local_socket import LAST_WORDS_S, LocalSocket
from jgraph.rpc.outbox import Outbox
from jgraph.rpc.serving import answer, only_reply
from jgraph.rpc.statistics import Counters
from jgraph.rpc.status import to_status
from jgraph.rpc.transport import Frame, Handler

MAX_UNANSWERED: Final = 1024
"""More calls of one caller at once are refused."""
END: Final[object] = grpc.aio.EOF  # type: ignore[attr-defined]  # stubs lack it


@final
class Answers:
    """Answers what comes in over one stream, each call as soon as it is done.

    Args:
      handler: what the task does with calls.
      hello: who answers.
      check: refuses methods that the caller may not call.
      context: gRPC's, of the stream.
      decoder: turns its chunks into frames.
      counters: where calls are counted.
      max_frame_bytes: larger replies become errors.
      door: where callers of this machine may connect; None: nowhere.
    """

    def __init__(
        self,
        handler: Handler,
        hello: pb.Hello,
        check: Callable[[str], None],
        context: Any,
        decoder: Decoder,
        counters: Counters,
        max_frame_bytes: int,
        door: LocalDoor | None,
    ) -> None:
        self._handler = handler
        self._hello = hello
        self._check = check
        self._context = context
        self._decoder = decoder
        self._counters = counters
        self._max_frame_bytes = max_frame_bytes
        self._offer = LocalOffer(door, self._feed, self._move) if door else None
        self._outbox = Outbox()
        self._socket: LocalSocket | None = None
        self._beside: set[asyncio.Task[None]] = set()
        self._do(self._outbox.run(context.write))
        self._answering: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Answers until the caller ends the stream; then nobody waits any more.

        Raises:
          MalformedMessageError: the stream is not one of calls.
        """
        streamed = self._outbox
        try:
            if self._offer is None:
                await self._read()
            else:
                await self._offer.beside(self._read())
            self._decoder.finish()
            await _flush(streamed)
        except JGError:
            await _flush(streamed)
            raise
        finally:
            left = [*self._beside, *self._answering.values()]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _do(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._beside.discard(task)
        if not task.cancelled():
            task.exception()  # a connection that broke; who reads it learns it

    async def _read(self) -> None:
        while (chunk := await self._context.read()) is not END:
            self._feed(chunk)
            await self._outbox.room()  # or who takes no replies would fill our memory

    def _feed(self, chunk: Buffer) -> None:
        for asked in self._decoder.feed(chunk):
            self._take(asked)
        if self._socket is not None and self._outbox.is_full:
            self._socket.pause_reading()
            self._do(self._read_again(self._socket))

    async def _read_again(self, socket: LocalSocket) -> None:
        await self._outbox.room()
        socket.resume_reading()

    def _move(self, socket: LocalSocket) -> None:
        """Sends replies over a socket from now on."""
        self._outbox, self._socket = Outbox(), socket
        self._do(self._outbox.run_over(socket))

    def _greet(self) -> None:
        reply = pb.Hello()
        reply.CopyFrom(self._hello)
        if self._offer is not None:
            reply.local_socket.CopyFrom(self._offer.message)
        self._outbox.put(encode(frame(hello=reply)))

    def _take(self, asked: Frame) -> None:
        number, method = asked.header.sequence, asked.header.method
        if kind_of(asked) == "hello" and not number:
            check_protocol(self._hello, body_of(asked), "the caller")
            self._greet()
            return
        if kind_of(asked) == "abandon":
            if number in self._answering:
                self._answering[number].cancel()
            return
        if not number or not method:
            raise MalformedMessageError(
                f"a call has a number and a method; '{kind_of(asked)}' came with "
                f"number {number} and method '{method[:80]}'"
            )
        if number in self._answering:
            raise MalformedMessageError(f"call {number} was made twice")
        self._counters.calls_served += 1
        asked.header.ClearField("sequence")
        asked.header.ClearField("method")
        answering = asyncio.create_task(self._answer(number, method, asked))
        self._answering[number] = answering

    async def _answer(self, number: int, method: str, request: Frame) -> None:
        try:
            reply = await self._reply(method, request)
            self._outbox.put(reply.encoded(sequence=number))
        finally:
            del self._answering[number]

    async def _reply(self, method: str, request: Frame) -> Prepared:
        try:
            if len(self._answering) > MAX_UNANSWERED:
                raise ClusterBusyError(
                    f"{self._hello.task} answers {MAX_UNANSWERED} calls of yours "
                    f"already and refused '{method}'; wait for some of them"
                )
            self._check(method)
            replies = answer(self._handler, self._hello, method, request)
            reply = await only_reply(replies, method, self._hello.task)
            return prepare(reply, max_frame_bytes=self._max_frame_bytes)
        except JGError as error:
            return prepare(frame(status=to_status(error)))


async def _flush(outbox: Outbox) -> None:
    """Lets go what waits for a stream: gRPC says nothing else while it is writing."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LAST_WORDS_S):
            await outbox.flushed()
