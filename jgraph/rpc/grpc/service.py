"""Server side of the gRPC transport: its methods and their streams."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, TypeAlias

import grpc

from jgraph.errors import JGError, MalformedMessageError
from jgraph.graph.device import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.calls.answering import Answers
from jgraph.rpc.calls.sessions import CallSessions, Check
from jgraph.rpc.dial import CONNECT_TIMEOUT_S, SHUTTING_DOWN
from jgraph.rpc.dial_only.address import dial_only_address
from jgraph.rpc.dial_only.offered_streams import OfferedStreams
from jgraph.rpc.dial_only.offering import DialledContext
from jgraph.rpc.dial_only.relay import asked_relay, relay
from jgraph.rpc.exchange.inbound import StreamReplaced
from jgraph.rpc.exchange.receiver import Presence, Receiver, task_of
from jgraph.rpc.frames import body_of, check_protocol, frame
from jgraph.rpc.resumable.accepting import first_frames
from jgraph.rpc.resumable.admission_control import (
    Admission,
    Admit,
    Announced,
    RequestBudget,
)
from jgraph.rpc.resumable.dialing import HELLO_TIMEOUT_S
from jgraph.rpc.security.auth import Roles, check_role
from jgraph.rpc.security.tls import check_caller, may_be_task
from jgraph.rpc.serving import HELLO_METHOD
from jgraph.rpc.sockets.offer import Doors, SocketEnded
from jgraph.rpc.sockets.pipe import StreamPipe
from jgraph.rpc.statistics import Counters
from jgraph.rpc.status import to_status
from jgraph.rpc.transport import Frame, Handler
from jgraph.rpc.wire.buffer_pool import BufferPool
from jgraph.rpc.wire.codec import encode
from jgraph.rpc.wire.decoder import Decoder

_logger = logging.getLogger(__name__)
_Names: TypeAlias = tuple[bytes, ...] | None
_Serve: TypeAlias = Callable[
    [Any, Admission, list[Frame], _Names], Coroutine[None, None, None]
]


class Service:
    """Decodes what arrives and hands it to the task's handler.

    Args:
      handler: takes frames and calls.
      hello: who we are.
      counters: where received frames are counted.
      max_frame_bytes: larger frames are refused before memory is taken.
      max_queued_bytes: a caller for whom more replies wait is given up.
      buffers: memory for the tensors that come through streams.
      room: for the bytes of calls.
      checks_certificates: callers must have the certificate of who they say to be.
      roles: which role may call which method; None: every one all.
      shares_memory: take tensors in shared memory from senders that offer it.
      doors: where callers may connect beside their streams.
      presence: tells whether a sender is gone whose connection broke.
      offered: keeps the streams that tasks offer which only dial.
    """

    def __init__(
        self,
        handler: Handler,
        hello: pb.Hello,
        counters: Counters,
        max_frame_bytes: int,
        max_queued_bytes: int,
        buffers: BufferPool,
        room: RequestBudget,
        *,
        shares_memory: bool,
        presence: Presence,
        doors: Doors,
        offered: OfferedStreams,
        checks_certificates: bool = False,
        roles: Roles | None = None,
    ) -> None:
        self._handler = handler
        self._hello = hello
        self._counters = counters
        self._max_frame_bytes = max_frame_bytes
        self._max_queued_bytes = max_queued_bytes
        self._buffers = buffers
        self._room = room
        self._doors = doors
        self._offered = offered
        self._checks_certificates = checks_certificates
        self._roles = roles
        self._closing = False
        self._running: set[asyncio.Task[Any]] = set()
        self._callers = CallSessions(hello, self._make_answers)
        self._receiver = Receiver(
            handler,
            hello,
            counters,
            shares_memory=shares_memory,
            doors=doors,
            presence=presence,
        )

    def generic_handler(self) -> "grpc.GenericRpcHandler[bytes, bytes]":
        """Returns the gRPC handlers; messages stay bytes."""
        methods = {
            "Exchange": grpc.stream_stream_rpc_method_handler(self._exchange),
            "Asks": grpc.stream_stream_rpc_method_handler(self._asks),
            "Offer": grpc.stream_stream_rpc_method_handler(self._offer),
            "Relay": grpc.stream_stream_rpc_method_handler(self._relay),
        }
        return grpc.method_handlers_generic_handler("jgraph.v1.Task", methods)

    @property
    def repeats(self) -> int:
        """How many frames came twice."""
        return self._receiver.inbound.repeats

    def stop(self) -> None:
        """Ends the streams that are open; the other sides learn that we went away.

        gRPC's own way to abort them makes every client print a line.
        """
        self._closing = True
        self._receiver.stop()
        self._callers.stop()
        for task in self._running:
            task.cancel()

    async def _exchange(self, requests: AsyncIterator[bytes], context: Any) -> None:
        del requests  # a generator around ``context.read``, slower than that
        await self._guard(self._serve(context, self._receive), context)

    async def _asks(self, requests: AsyncIterator[bytes], context: Any) -> None:
        del requests  # as above
        await self._guard(self._serve(context, self._answer), context)

    async def serve_dialled(self, method: str, context: DialledContext) -> None:
        """Serves a stream that this side opened, and another task uses, to its end."""
        serve = {"Exchange": self._receive, "Asks": self._answer}.get(method)
        if serve is None:
            what = f"a task that only dials has no method '{method[:80]}'"
            await self._guard(_refuse(MalformedMessageError(what)), context)
        else:
            await self._guard(self._serve(context, serve), context)

    async def _offer(self, requests: AsyncIterator[bytes], context: Any) -> None:
        del requests  # as above
        await self._guard(self._keep_offered(context), context)

    async def _keep_offered(self, context: Any) -> None:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            first = await first_frames(context, Decoder())
        hello: pb.Hello = body_of(first[0])
        check_protocol(self._hello, hello, hello.task[:80] or "the caller")
        task = task_of(hello)
        if self._checks_certificates:
            check_caller(_names(context), task)
        address = dial_only_address(task, hello.incarnation)
        await self._offered.offer(address, context)

    async def _relay(self, requests: AsyncIterator[bytes], context: Any) -> None:
        del requests  # as above
        await self._guard(self._pass_on(context), context)

    async def _pass_on(self, context: Any) -> None:
        names: tuple[bytes, ...] = ()
        if self._checks_certificates:
            names = tuple(_names(context))
            check_caller(names, None)
        address, method = asked_relay(context)
        try:
            async with self._offered.take(
                address, method, names, CONNECT_TIMEOUT_S
            ) as stream:
                await relay(context, stream)
        except grpc.aio.AioRpcError as broke:
            await context.abort(grpc.StatusCode.UNAVAILABLE, broke.details() or "")

    async def _serve(self, context: Any, serve: _Serve) -> None:
        """Serves a stream from its Hello to its end."""
        names: tuple[bytes, ...] | None = None
        if self._checks_certificates:
            names = tuple(_names(context))
            check_caller(names, None)
        intake = Admission(self._room, self._decoder, of_calls=serve == self._answer)
        try:
            try:
                async with asyncio.timeout(HELLO_TIMEOUT_S):
                    first = await first_frames(context, intake.decoder)
                hello: pb.Hello = body_of(first[0])
                intake.of_task = bool(hello.task) and may_be_task(names)
                serving = serve(context, intake, first, names)
            except (JGError, TimeoutError):
                await _write(context, frame(hello=self._hello))
                raise
            await serving
        finally:
            intake.close()

    def _receive(
        self, context: Any, intake: Admission, first: list[Frame], names: _Names
    ) -> Coroutine[None, None, None]:
        def check(task: TaskName) -> None:
            if names is not None:
                check_caller(names, task)

        return self._receiver.receive(context, intake, first, check)

    def _answer(
        self, context: Any, intake: Admission, first: list[Frame], names: _Names
    ) -> Coroutine[None, None, None]:
        def check(method: str) -> None:
            if method != HELLO_METHOD:
                check_role(self._roles, method, names)

        return self._callers.serve(context, intake, first, check, names)

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
            await context.abort(grpc.StatusCode.UNAVAILABLE, SHUTTING_DOWN)
        except JGError as error:
            await _write(context, frame(status=to_status(error)))
        except TimeoutError:
            late = MalformedMessageError("the first frames did not arrive in time")
            await _write(context, frame(status=to_status(late)))
        except (SocketEnded, StreamReplaced):
            # The caller notices that late, if its packets are dropped; and of two
            # streams the one that began first may have taken over from the other.
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it goes on over another")
        except grpc.aio.InternalError:
            raise  # it is over, and gRPC says so
        except Exception as error:
            _logger.exception("An incoming stream failed.")
            await _write(context, frame(status=to_status(error)))
        finally:
            self._running.discard(task)

    def _decoder(self, admit: Admit, announced: Announced) -> Decoder:
        return Decoder(
            max_frame_bytes=self._max_frame_bytes,
            take=self._buffers.take,
            admit=admit,
            announced=announced,
        )

    def _make_answers(self, check: Check, give_up: Callable[[], None]) -> Answers:
        return Answers(
            self._handler,
            self._hello,
            self._counters,
            self._max_frame_bytes,
            self._max_queued_bytes,
            self._room,
            self._doors,
            check,
            give_up,
        )


def _names(context: Any) -> Iterable[bytes]:
    """Returns the alternative names of the caller's certificate."""
    found: Iterable[bytes] = context.auth_context().get(
        "x509_subject_alternative_name", ()
    )
    return found


async def _refuse(error: JGError) -> None:
    raise error


async def _write(context: Any, message: Frame) -> None:
    await StreamPipe(context.write).write(encode(message).pieces)
