"""The serving half of the gRPC transport: what comes in on its methods."""

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
)
from contextlib import aclosing
from functools import partial
from typing import Any, Final, TypeAlias

import grpc

from jgraph.errors import JGError, MalformedMessageError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.answering import END, Answers
from jgraph.rpc.auth import Roles, check_role
from jgraph.rpc.codec import Buffer, encode, pack
from jgraph.rpc.decoder import Decoder
from jgraph.rpc.dial import ended_stream
from jgraph.rpc.exchange import HELLO_TIMEOUT_S, check_protocol
from jgraph.rpc.frames import body_of, frame, kind_of
from jgraph.rpc.inbound import Inbound, InboundStream
from jgraph.rpc.kept_buffers import KeptBuffers
from jgraph.rpc.local_door import LocalDoor, LocalOffer
from jgraph.rpc.serving import HELLO_METHOD, answer, expect_call
from jgraph.rpc.shared_memory import ReceiveMemory
from jgraph.rpc.statistics import Counters
from jgraph.rpc.status import to_status
from jgraph.rpc.tls import check_caller
from jgraph.rpc.transport import Frame, Handler

REQUEST_TIMEOUT_S: Final = 600.0
"""How long the request of one call may take to arrive."""

_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
_logger = logging.getLogger(__name__)


class Service:
    """Decodes what arrives and hands it to the task's handler.

    Args:
      handler: takes frames and calls.
      hello: who we are.
      counters: where received frames are counted.
      max_frame_bytes: larger frames are refused before memory is taken.
      buffers: memory for the tensors that come through streams.
      checks_certificates: callers must have the certificate of who they say to be.
      roles: which role may call which method; None: every one all.
      shares_memory: take tensors in shared memory from senders that offer it.
      door: where callers of this machine may connect; None: nowhere.
    """

    def __init__(
        self,
        handler: Handler,
        hello: pb.Hello,
        counters: Counters,
        max_frame_bytes: int,
        buffers: KeptBuffers,
        *,
        shares_memory: bool,
        door: LocalDoor | None = None,
        checks_certificates: bool = False,
        roles: Roles | None = None,
    ) -> None:
        self._handler = handler
        self._hello = hello
        self._counters = counters
        self._max_frame_bytes = max_frame_bytes
        self._buffers = buffers
        self._shares_memory = shares_memory
        self._door = door
        self._checks_certificates = checks_certificates
        self._roles = roles
        self._without_memory: set[TaskName] = set()
        self._closing = False
        self._running: set[asyncio.Task[Any]] = set()
        self.inbound = Inbound()

    def generic_handler(self) -> "grpc.GenericRpcHandler[bytes, bytes]":
        """Returns the gRPC handlers; messages stay bytes."""
        methods = {
            "Exchange": grpc.stream_stream_rpc_method_handler(self._exchange),
            "Call": grpc.stream_stream_rpc_method_handler(self._call),
            "Asks": grpc.stream_stream_rpc_method_handler(self._asks),
        }
        return grpc.method_handlers_generic_handler("jgraph.v1.Task", methods)

    def stop(self) -> None:
        """Ends the streams that are open; the other sides learn that we went away.

        gRPC's own way to abort them makes every client print a line.
        """
        self._closing = True
        for task in self._running:
            task.cancel()

    async def _exchange(self, requests: AsyncIterator[bytes], context: Any) -> None:
        del requests  # a generator around ``context.read``, slower than that
        await self._guard(self._receive(context), context)

    async def _call(self, requests: AsyncIterator[bytes], context: Any) -> None:
        self._counters.calls_served += 1
        await self._guard(self._answer(requests, context), context)

    async def _asks(self, requests: AsyncIterator[bytes], context: Any) -> None:
        del requests  # as above
        await self._guard(self._answer_all(context), context)

    async def _guard(self, body: Coroutine[Any, Any, None], context: Any) -> None:
        """Runs the body of a stream; tells the other side why it failed."""
        task = asyncio.current_task()
        assert task is not None  # gRPC runs handlers in tasks
        self._running.add(task)
        try:
            await body
        except asyncio.CancelledError:
            if not self._closing:
                raise
            task.uncancel()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "shutting down")
        except JGError as error:
            await _write(context, frame(status=to_status(error)))
        except TimeoutError:
            late = MalformedMessageError("the first frames did not arrive in time")
            await _write(context, frame(status=to_status(late)))
        except Exception as error:
            _logger.exception("An incoming stream failed.")
            await _write(context, frame(status=to_status(error)))
        finally:
            self._running.discard(task)

    async def _receive(self, context: Any) -> None:
        stream: InboundStream | None = None
        decoder = self._decoder()
        reply = pb.Hello()
        reply.CopyFrom(self._hello)
        try:
            try:
                async with asyncio.timeout(HELLO_TIMEOUT_S):
                    first, *early = await _first_frames(context, decoder)
                stream = self._introduce(first, context)
            except (JGError, TimeoutError):
                await _write(context, frame(hello=reply))
                raise
            decoder.shared = self._memory_of(stream.task, body_of(first))
            reply.shares_memory = decoder.shared is not None
            take = partial(self._feed, stream, decoder)
            offer = None
            if self._door is not None and decoder.shared is not None:
                offer = LocalOffer(self._door, take)
                reply.local_socket.CopyFrom(offer.message)
            await _write(context, frame(hello=reply))
            self._deliver(stream, early)
            if offer is None:
                await _read(context, take)
            else:
                await offer.beside(_read(context, take))
            decoder.finish()
        finally:
            if stream is not None and self.inbound.disconnect(stream):
                self._report_lost(stream.task, "ended its connection")

    def _feed(self, stream: InboundStream, decoder: Decoder, chunk: Buffer) -> None:
        before = decoder.shared_bytes
        received = decoder.feed(chunk)
        shared = decoder.shared_bytes - before
        self._counters.received(stream.task, nbytes=len(chunk), shared=shared)
        self._deliver(stream, received)

    def _decoder(self) -> Decoder:
        return Decoder(max_frame_bytes=self._max_frame_bytes, take=self._buffers.take)

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

    def _check_caller(self, context: Any, task: TaskName | None = None) -> None:
        if self._checks_certificates:
            check_caller(self._names(context), task)

    def _names(self, context: Any) -> Iterable[bytes]:
        """Returns the alternative names of the caller's certificate."""
        found: Iterable[bytes] = context.auth_context().get(
            "x509_subject_alternative_name", ()
        )
        return found

    def _may_call(self, context: Any) -> Callable[[str], None]:
        """Returns what refuses methods that the caller may not call."""
        names = tuple(self._names(context)) if self._checks_certificates else None

        def check(method: str) -> None:
            if method != HELLO_METHOD:
                check_role(self._roles, method, names)

        return check

    def _introduce(self, first: Frame, context: Any) -> InboundStream:
        if kind_of(first) != "hello":
            raise MalformedMessageError(
                f"an exchange begins with a Hello frame; '{kind_of(first)}' was sent"
            )
        hello: pb.Hello = body_of(first)
        check_protocol(self._hello, hello, hello.task[:80] or "the client")
        task = _task_name(hello)
        self._check_caller(context, task)
        stream, replaced = self.inbound.connect(task, hello.incarnation)
        if replaced:
            self._report_lost(task, "connected anew")
        return stream

    def _deliver(self, stream: InboundStream, received: list[Frame]) -> None:
        received.reverse()
        while received:
            # Kept nowhere here, or the memory of its tensors would be busy until more
            # comes.
            arrived = received.pop()
            if self.inbound.accept(stream, arrived.header.sequence):
                arrived.header.ClearField("sequence")
                self._counters.received(stream.task, frames=1)
                self._handler.frame_received(stream.task, arrived)

    def _report_lost(self, task: TaskName, why: str) -> None:
        if not self._closing:
            self._handler.peer_lost(task, ended_stream(task, why))

    async def _answer(self, requests: AsyncIterator[bytes], context: Any) -> None:
        self._check_caller(context)
        decoder = self._decoder()
        async with (
            asyncio.timeout(REQUEST_TIMEOUT_S),
            aclosing(_frames(requests, decoder)) as frames,
        ):
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                method = expect_call(await _next(frames))
            self._may_call(context)(method)
            request = await _next(frames)
        replies = answer(self._handler, self._hello, method, request)
        async with aclosing(replies):
            async for reply in replies:
                await _write(context, reply, self._max_frame_bytes)

    async def _answer_all(self, context: Any) -> None:
        self._check_caller(context)
        answers = Answers(
            self._handler,
            self._hello,
            self._may_call(context),
            context,
            self._decoder(),
            self._counters,
            self._max_frame_bytes,
            self._door,
        )
        await answers.run()


async def _read(context: _Context, take: Callable[[bytes], None]) -> None:
    while (chunk := await context.read()) is not END:
        take(chunk)


async def _frames(
    requests: AsyncIterator[bytes], decoder: Decoder
) -> AsyncGenerator[Frame, None]:
    async for chunk in requests:
        for received in decoder.feed(chunk):
            yield received
    decoder.finish()


async def _first_frames(context: _Context, decoder: Decoder) -> list[Frame]:
    received: list[Frame] = []
    while not received:
        chunk = await context.read()
        if chunk is END:
            raise _ended()
        received = decoder.feed(chunk)
    return received


def _ended() -> JGError:
    return MalformedMessageError("the stream ended before its first frames")


async def _write(
    context: _Context, reply: Frame, max_frame_bytes: int = 1 << 20
) -> None:
    for chunk in pack(encode(reply, max_frame_bytes=max_frame_bytes).pieces):
        await context.write(chunk)


async def _next(frames: AsyncGenerator[Frame, None]) -> Frame:
    async for received in frames:
        return received
    raise _ended()


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
