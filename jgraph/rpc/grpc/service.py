"""Server side of the gRPC transport: its methods and their streams."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from functools import partial
from typing import Any

import grpc

from jgraph.errors import JGError, MalformedMessageError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.calls.admission_control import (
    Admit,
    Announced,
    CallAdmission,
    RequestBudget,
)
from jgraph.rpc.calls.answering import Answers
from jgraph.rpc.calls.sessions import CallSessions
from jgraph.rpc.dial import SHUTTING_DOWN
from jgraph.rpc.exchange.inbound import StreamReplaced
from jgraph.rpc.exchange.receiver import IsGone, Receiver, first_frames, write_frame
from jgraph.rpc.exchange.stream import HELLO_TIMEOUT_S
from jgraph.rpc.frames import frame
from jgraph.rpc.security.auth import Roles, check_role
from jgraph.rpc.security.tls import check_caller
from jgraph.rpc.serving import HELLO_METHOD
from jgraph.rpc.sockets.offer import Doors, SocketEnded
from jgraph.rpc.statistics import Counters
from jgraph.rpc.status import to_status
from jgraph.rpc.transport import Handler
from jgraph.rpc.wire.buffer_pool import BufferPool
from jgraph.rpc.wire.decoder import Decoder

_logger = logging.getLogger(__name__)


class Service:
    """Decodes what arrives and hands it to the task's handler.

    Args:
      handler: takes frames and calls.
      hello: who we are.
      counters: where received frames are counted.
      max_frame_bytes: larger frames are refused before memory is taken.
      buffers: memory for the tensors that come through streams.
      room: for the bytes of calls.
      checks_certificates: callers must have the certificate of who they say to be.
      roles: which role may call which method; None: every one all.
      shares_memory: take tensors in shared memory from senders that offer it.
      doors: where callers may connect beside their streams.
      is_gone: whether nothing can come any more from an incarnation of a task.
    """

    def __init__(
        self,
        handler: Handler,
        hello: pb.Hello,
        counters: Counters,
        max_frame_bytes: int,
        buffers: BufferPool,
        room: RequestBudget,
        *,
        shares_memory: bool,
        is_gone: IsGone,
        doors: Doors,
        checks_certificates: bool = False,
        roles: Roles | None = None,
    ) -> None:
        self._handler = handler
        self._hello = hello
        self._counters = counters
        self._max_frame_bytes = max_frame_bytes
        self._buffers = buffers
        self._room = room
        self._doors = doors
        self._checks_certificates = checks_certificates
        self._roles = roles
        self._closing = False
        self._running: set[asyncio.Task[Any]] = set()
        self._callers = CallSessions(hello, self._make_answers)
        self._receiver = Receiver(
            handler,
            hello,
            counters,
            self._decoder,
            shares_memory=shares_memory,
            doors=doors,
            is_gone=is_gone,
        )

    def generic_handler(self) -> "grpc.GenericRpcHandler[bytes, bytes]":
        """Returns the gRPC handlers; messages stay bytes."""
        methods = {
            "Exchange": grpc.stream_stream_rpc_method_handler(self._exchange),
            "Asks": grpc.stream_stream_rpc_method_handler(self._asks),
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
        reading = self._receiver.receive(context, partial(self._check_caller, context))
        await self._guard(reading, context)

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
            await context.abort(grpc.StatusCode.UNAVAILABLE, SHUTTING_DOWN)
        except JGError as error:
            await write_frame(context, frame(status=to_status(error)))
        except TimeoutError:
            late = MalformedMessageError("the first frames did not arrive in time")
            await write_frame(context, frame(status=to_status(late)))
        except (SocketEnded, StreamReplaced):
            # The caller notices that late, if its packets are dropped; and of two
            # streams the one that began first may have taken over from the other.
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it goes on over another")
        except grpc.aio.InternalError:
            raise  # it is over, and gRPC says so
        except Exception as error:
            _logger.exception("An incoming stream failed.")
            await write_frame(context, frame(status=to_status(error)))
        finally:
            self._running.discard(task)

    def _decoder(
        self, admit: Admit | None = None, announced: Announced | None = None
    ) -> Decoder:
        return Decoder(
            max_frame_bytes=self._max_frame_bytes,
            take=self._buffers.take,
            admit=admit,
            announced=announced,
        )

    def _check_caller(self, context: Any, task: TaskName | None = None) -> None:
        if self._checks_certificates:
            check_caller(self._names(context), task)

    def _names(self, context: Any) -> Iterable[bytes]:
        """Returns the alternative names of the caller's certificate."""
        found: Iterable[bytes] = context.auth_context().get(
            "x509_subject_alternative_name", ()
        )
        return found

    def _may_call(self, names: Iterable[bytes] | None) -> Callable[[str], None]:
        """Returns what refuses methods that the caller may not call."""

        def check(method: str) -> None:
            if method != HELLO_METHOD:
                check_role(self._roles, method, names)

        return check

    async def _answer_all(self, context: Any) -> None:
        self._check_caller(context)
        names = tuple(self._names(context)) if self._checks_certificates else None
        check, intake = self._may_call(names), CallAdmission(self._room, self._decoder)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await first_frames(context, intake.decoder)
            await self._callers.serve(context, intake, first, check, names, self._doors)
        finally:
            intake.close()

    def _make_answers(self) -> Answers:
        return Answers(
            self._handler,
            self._hello,
            self._counters,
            self._max_frame_bytes,
            self._room,
        )
