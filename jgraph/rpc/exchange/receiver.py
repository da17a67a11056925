"""Receiving side of pairs of tasks: frames that arrive over Exchange streams."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol, TypeAlias, final

import grpc

from jgraph.errors import JGError, MalformedMessageError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.calls.answering import END
from jgraph.rpc.dial import ended_stream, is_refused
from jgraph.rpc.exchange.inbound import Inbound, InboundStream
from jgraph.rpc.exchange.stream import HELLO_TIMEOUT_S, check_protocol
from jgraph.rpc.frames import body_of, frame, kind_of
from jgraph.rpc.serving import HELLO_METHOD
from jgraph.rpc.shared_memory.shared_memory import ReceiveMemory
from jgraph.rpc.sockets.frame_socket import FrameSocket
from jgraph.rpc.sockets.listener import Caller
from jgraph.rpc.sockets.offer import Doors, SocketEnded, SocketOffer
from jgraph.rpc.statistics import Counters
from jgraph.rpc.transport import Address, Frame, Handler
from jgraph.rpc.wire.codec import Buffer, encode, pack
from jgraph.rpc.wire.decoder import Decoder

RETURN_S: Final = 4.0
"""How long a sender whose connection broke may take to resume it."""
LOOK_EVERY_S: Final = 0.25
"""How often its address is asked meanwhile: no one tells that a process is gone."""
_HELLO_S: Final = 1.0

IsGone: TypeAlias = Callable[[TaskName, int], Awaitable[bool]]
_logger = logging.getLogger(__name__)


@final
class Receiver:
    """Takes the frames of other tasks, each once and in order.

    Args:
      handler: takes frames.
      hello: who we are.
      counters: where received frames are counted.
      make_decoder: gives what turns the chunks of a stream into frames.
      shares_memory: take tensors in shared memory from senders that offer it.
      doors: where senders may connect beside their streams.
      is_gone: whether nothing can come any more from an incarnation of a task.
    """

    def __init__(
        self,
        handler: Handler,
        hello: pb.Hello,
        counters: Counters,
        make_decoder: Callable[[], Decoder],
        *,
        shares_memory: bool,
        doors: Doors,
        is_gone: IsGone,
    ) -> None:
        self._handler = handler
        self._hello = hello
        self._counters = counters
        self._make_decoder = make_decoder
        self._shares_memory = shares_memory
        self._doors = doors
        self._is_gone = is_gone
        self._without_memory: set[TaskName] = set()
        # By sender whose connection broke: set when it is back.
        self._returned: dict[TaskName, asyncio.Event] = {}
        self._awaited: set[asyncio.Task[None]] = set()
        self._closing = False
        self.inbound = Inbound()

    def stop(self) -> None:
        """Waits for nobody, and reports nobody, any more."""
        self._closing = True
        for waiting in self._awaited:
            waiting.cancel()

    async def receive(
        self, context: Any, check_caller: Callable[[TaskName], None]
    ) -> None:
        """Reads one stream to its end.

        Raises:
          JGError: what is wrong with it.
          TimeoutError: its first frames did not come.
        """
        decoder = self._make_decoder()
        reply = pb.Hello()
        reply.CopyFrom(self._hello)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first, *early = await first_frames(context, decoder)
            stream = self._introduce(first, check_caller)
        except (JGError, TimeoutError):
            await write_frame(context, frame(hello=reply))
            raise
        broke = False
        take = partial(self._read_socket, stream, decoder)
        offer = SocketOffer(Caller.of_stream(context), decoder.room, take)
        try:
            decoder.shared = self._memory_of(stream.task, body_of(first))
            reply.shares_memory = decoder.shared is not None
            reply.received = stream.received.tell()
            offer.put_into(reply, self._doors, is_near=decoder.shared is not None)
            await write_frame(context, frame(hello=reply))
            self._deliver(stream, early)
            reading = self._read(context, stream, decoder)
            await offer.beside(reading, lambda: stream.is_over)
            broke = not stream.is_over
            decoder.finish()
        except (asyncio.CancelledError, grpc.aio.InternalError, SocketEnded):
            # gRPC tells of a connection that broke by any of the first two.
            broke = not stream.is_over
            raise
        finally:
            offer.close()
            # What left over a Unix socket is not kept: only a task's end ends it.
            self._over(stream, broke=broke and not offer.is_local)

    async def _read(
        self, context: Any, stream: InboundStream, decoder: Decoder
    ) -> None:
        received = stream.received
        while (chunk := await context.read()) is not END:
            self._feed(stream, decoder, chunk)
            if received.is_ack_due(len(chunk)):
                ack = pb.Ack(received=received.tell())
                await write_frame(context, frame(ack=ack))

    def _read_socket(
        self,
        stream: InboundStream,
        decoder: Decoder,
        socket: FrameSocket,
        data: memoryview,
    ) -> None:
        """Takes what came over the socket beside a stream."""
        self._feed(stream, decoder, data)
        if stream.is_over:
            socket.close()
        elif socket.keeps and stream.received.is_ack_due(len(data)):
            socket.acknowledge(stream.received.tell())

    def _feed(self, stream: InboundStream, decoder: Decoder, chunk: Buffer) -> None:
        before = decoder.shared_bytes
        received = decoder.feed(chunk)
        shared = decoder.shared_bytes - before
        self._counters.received(stream.task, nbytes=len(chunk), shared=shared)
        self._deliver(stream, received)

    def _deliver(self, stream: InboundStream, received: list[Frame]) -> None:
        received.reverse()
        while received:
            # Kept nowhere here, or the memory of its tensors would be busy until more
            # comes.
            arrived = received.pop()
            number = arrived.header.sequence
            if number == 0 and kind_of(arrived) == "goodbye":
                stream.is_over = True
            elif self.inbound.accept(stream, number):
                arrived.header.ClearField("sequence")
                self._counters.received(stream.task, frames=1)
                self._handler.frame_received(stream.task, arrived)

    def _memory_of(self, task: TaskName, hello: pb.Hello) -> ReceiveMemory | None:
        """Returns the memory that a sender shares, if it can be mapped from here."""
        if not self._shares_memory or not hello.HasField("shared_memory"):
            return None
        try:
            return ReceiveMemory(hello.shared_memory)
        except MalformedMessageError as error:
            if task not in self._without_memory:
                self._without_memory.add(task)
                _logger.info(
                    "Tensors from %s come through the stream, not through shared "
                    "memory: %s.",
                    task,
                    error.message,
                )
            return None

    def _introduce(
        self, first: Frame, check_caller: Callable[[TaskName], None]
    ) -> InboundStream:
        if kind_of(first) != "hello":
            raise MalformedMessageError(
                f"an exchange begins with a Hello frame; '{kind_of(first)}' was sent"
            )
        hello: pb.Hello = body_of(first)
        check_protocol(self._hello, hello, hello.task[:80] or "the client")
        task = _task_name(hello)
        check_caller(task)
        if hello.resumes:
            stream, replaced = self.inbound.resume(task, hello.incarnation), False
        else:
            stream, replaced = self.inbound.connect(task, hello.incarnation, hello.line)
        if task in self._returned:
            self._returned.pop(task).set()
        if replaced:
            self._report_lost(task, "connected anew")
        return stream

    def _over(self, stream: InboundStream, *, broke: bool) -> None:
        if broke and not self._closing and self.inbound.broke(stream):
            returned = self._returned[stream.task] = asyncio.Event()
            waiting = asyncio.create_task(self._await_return(stream, returned))
            self._awaited.add(waiting)
            waiting.add_done_callback(self._awaited.discard)
        elif not broke and self.inbound.disconnect(stream):
            self._report_lost(stream.task, "ended its connection")

    async def _await_return(
        self, stream: InboundStream, returned: asyncio.Event
    ) -> None:
        """Reports a sender whose connection broke, unless it resumes that soon."""
        with suppress(TimeoutError):
            async with asyncio.timeout(RETURN_S):
                while not await self._is_gone(stream.task, stream.incarnation):
                    with suppress(TimeoutError):
                        await asyncio.wait_for(returned.wait(), LOOK_EVERY_S)
                        return
        if self.inbound.is_broken(stream) and self.inbound.disconnect(stream):
            del self._returned[stream.task]
            self._report_lost(stream.task, "ended its connection")

    def _report_lost(self, task: TaskName, why: str) -> None:
        if not self._closing:
            self._handler.peer_lost(task, ended_stream(task, why))


class _Ask(Protocol):
    async def __call__(
        self, dst: Address, method: str, request: Frame, *, timeout_s: float
    ) -> Frame: ...


async def is_gone(
    ask: _Ask,
    address_of: Callable[[TaskName], Address | None],
    task: TaskName,
    incarnation: int,
) -> bool:
    """Whether nothing can come any more from an incarnation of a task.

    Args:
      ask: of the transport.
      address_of: gives the address of a task, if it is known.
      task: the task.
      incarnation: which start of it.
    """
    address = address_of(task)
    if address is None or await is_refused(address):
        return True
    try:
        request = frame(call=pb.Call(method=HELLO_METHOD))
        reply = await ask(address, HELLO_METHOD, request, timeout_s=_HELLO_S)
    except JGError:
        return False  # perhaps the network is broken, and not the task
    theirs: pb.Hello = body_of(reply)
    return theirs.task != task or theirs.incarnation != incarnation


async def write_frame(context: Any, reply: Frame) -> None:
    """Writes a frame to a stream of gRPC."""
    for chunk in pack(encode(reply).pieces):
        await context.write(chunk)


async def first_frames(context: Any, decoder: Decoder) -> list[Frame]:
    """Returns what the first chunks of a stream of gRPC bring; one frame at least.

    Raises:
      MalformedMessageError: it ended before.
    """
    received: list[Frame] = []
    while not received:
        chunk = await context.read()
        if chunk is END:
            raise MalformedMessageError("the stream ended before its first frames")
        received = decoder.feed(chunk)
    return received


def _task_name(hello: pb.Hello) -> TaskName:
    """Returns the canonical task that sent a Hello."""
    try:
        name = DeviceSpec.from_string(hello.task).task_name
    except JGError:
        name = None
    if name != hello.task or not hello.incarnation:
        raise MalformedMessageError(
            f"a Hello from '{hello.task[:80]}', incarnation {hello.incarnation}, is "
            f"not from a task"
        )
    return TaskName(name)
