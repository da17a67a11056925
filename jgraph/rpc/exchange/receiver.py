"""Receiving side of pairs of tasks: frames that arrive over Exchange streams."""

import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, final

from jgraph.errors import JGError, MalformedMessageError
from jgraph.graph.device import DeviceSpec, TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.dial import ended_stream, is_refused
from jgraph.rpc.exchange.inbound import Inbound, InboundStream
from jgraph.rpc.frames import body_of, check_protocol, frame
from jgraph.rpc.resumable.accepting import AcceptingEnd
from jgraph.rpc.resumable.admission_control import Admission
from jgraph.rpc.serving import HELLO_METHOD
from jgraph.rpc.shared_memory.shared_memory import ReceiveMemory
from jgraph.rpc.sockets.offer import Doors
from jgraph.rpc.statistics import Counters
from jgraph.rpc.transport import Address, Frame, Handler

_HELLO_S: Final = 1.0
_logger = logging.getLogger(__name__)


@final
class Receiver:
    """Takes the frames of other tasks, each once and in order.

    Args:
      handler: takes frames.
      hello: who we are.
      counters: where received frames are counted.
      shares_memory: take tensors in shared memory from senders that offer it.
      doors: where senders may connect beside their streams.
      presence: tells whether a sender is gone whose connection broke.
    """

    def __init__(
        self,
        handler: Handler,
        hello: pb.Hello,
        counters: Counters,
        *,
        shares_memory: bool,
        doors: Doors,
        presence: "Presence",
    ) -> None:
        self._handler = handler
        self._hello = hello
        self._counters = counters
        self._shares_memory = shares_memory
        self._doors = doors
        self._presence = presence
        self._without_memory: set[TaskName] = set()
        self._senders: dict[TaskName, _Sender] = {}
        self._closing = False
        self.inbound = Inbound()

    def stop(self) -> None:
        """Waits for nobody, and reports nobody, any more."""
        self._closing = True
        for sender in self._senders.values():
            sender.end.stop()

    def receive(
        self,
        context: Any,
        intake: Admission,
        first: list[Frame],
        check_caller: Callable[[TaskName], None],
    ) -> Coroutine[None, None, None]:
        """Returns what reads a stream to its end; see ``AcceptingEnd.serve``.

        Raises:
          JGError: what is wrong with it.
        """
        hello: pb.Hello = body_of(first[0])
        check_protocol(self._hello, hello, hello.task[:80] or "the client")
        task = task_of(hello)
        check_caller(task)
        sender, before = self._begin(task, hello), 0
        decoder = intake.decoder
        decoder.shared = self._memory_of(task, hello)

        def moved(nbytes: int) -> None:
            nonlocal before
            shared, before = decoder.shared_bytes - before, decoder.shared_bytes
            self._counters.received(task, nbytes=nbytes, shared=shared)

        is_near = decoder.shared is not None
        return sender.end.serve(context, intake, first, moved, is_near=is_near)

    def _begin(self, task: TaskName, hello: pb.Hello) -> "_Sender":
        """Returns the link that a stream of a task goes on with, or a new one."""
        if hello.resumes:
            stream = self.inbound.resume(task, hello.incarnation)
            sender = self._senders[task]
            sender.stream = stream
            return sender
        stream, replaced = self.inbound.connect(task, hello.incarnation, hello.line)
        if task in self._senders:
            self._senders[task].end.stop()
        if replaced:
            self._report_lost(task, "connected anew")
        sender = self._senders[task] = self._sender(stream)
        return sender

    def _sender(self, stream: InboundStream) -> "_Sender":
        sender = _Sender(stream)
        sender.end = AcceptingEnd(
            self._hello,
            self._doors,
            partial(self._take, sender),
            partial(self._give_up, sender),
            received=stream.received,
            is_gone=partial(self._presence.is_gone, stream.task, stream.incarnation),
        )
        return sender

    def _take(self, sender: "_Sender", arrived: Frame) -> None:
        """Gives the handler what is new."""
        stream = sender.stream
        if self.inbound.accept(stream, arrived.header.sequence):
            arrived.header.ClearField("sequence")
            self._counters.received(stream.task, frames=1)
            self._handler.frame_received(stream.task, arrived)

    def _give_up(self, sender: "_Sender") -> None:
        """Reports a sender whose link is over, unless it has another."""
        task = sender.stream.task
        if self._senders.get(task) is sender:
            del self._senders[task]
        if self.inbound.disconnect(sender.stream):
            self._report_lost(task, "ended its connection")

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

    def _report_lost(self, task: TaskName, why: str) -> None:
        if not self._closing:
            self._handler.peer_lost(task, ended_stream(task, why))


@final
@dataclass(eq=False, slots=True)
class _Sender:
    """A link of a task, and its stream that may send now."""

    stream: InboundStream
    end: AcceptingEnd = field(init=False)


class Asker(Protocol):
    """Asks tasks."""

    async def ask(
        self, dst: Address, method: str, request: Frame, *, timeout_s: float
    ) -> Frame:
        """Returns the reply of a task; see ``Transport.ask``."""


@final
class Presence:
    """Whether tasks are still where they were.

    Args:
      asker: asks them.
      address_of: gives the address of a task, if it is known.
    """

    def __init__(
        self, asker: Asker, address_of: Callable[[TaskName], Address | None]
    ) -> None:
        self._asker = asker
        self._address_of = address_of

    async def is_gone(self, task: TaskName, incarnation: int) -> bool:
        """Whether nothing can come any more from an incarnation of a task."""
        address = self._address_of(task)
        if address is None or await is_refused(address):
            return True
        request = frame(call=pb.Call(method=HELLO_METHOD))
        try:
            reply = await self._asker.ask(
                address, HELLO_METHOD, request, timeout_s=_HELLO_S
            )
        except JGError:
            return False  # perhaps the network is broken, and not the task
        theirs: pb.Hello = body_of(reply)
        return theirs.task != task or theirs.incarnation != incarnation


def task_of(hello: pb.Hello) -> TaskName:
    """Returns the canonical task that sent a Hello.

    Raises:
      MalformedMessageError: no task did.
    """
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
