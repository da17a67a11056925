"""Fencing and resumption: which stream of a task its receiver takes frames of. Pure.

A sender is a task at one incarnation. At most one stream per task is current. Frames
are numbered per (sender incarnation, receiver) without gaps, and each is accepted once.
A stream that breaks may be resumed by its sender until the receiver gives that up, i.e.
reports the sender as lost. The first frame of a stream that does not resume another may
jump ahead, because the loss of earlier frames was reported.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final, final

from jgraph.errors import FencedError, MalformedMessageError, TaskLostError
from jgraph.graph.device import TaskName
from jgraph.rpc.resumable.numbers import ReceivedFrames

_RETIRED_KEPT: Final = 64
"""Incarnations of one task that are remembered as replaced."""


class StreamReplaced(Exception):  # noqa: N818  # its sender may take over again
    """Another stream of the same task took over."""


@final
@dataclass(eq=False, slots=True)
class InboundStream:
    """One stream of frames from a task.

    Attributes:
      received: what arrived from that incarnation of the task.
      line: which of its lines this is; 0: it does not say.
    """

    task: TaskName
    incarnation: int
    received: ReceivedFrames
    line: int = 0
    may_jump: bool = True


@final
@dataclass(slots=True)
class _Sender:
    incarnation: int
    received: ReceivedFrames = field(default_factory=ReceivedFrames)
    stream: InboundStream | None = None
    retired: deque[int] = field(default_factory=lambda: deque(maxlen=_RETIRED_KEPT))


class Inbound:
    """The streams that end at one task.

    Example:
      >>> inbound = Inbound()
      >>> stream, replaced = inbound.connect(TaskName("/job:ps/task:0"), 7)
      >>> [inbound.accept(stream, n) for n in (1, 2, 2, 3)]
      [True, True, False, True]
      >>> again = inbound.resume(TaskName("/job:ps/task:0"), 7)
      >>> again.received.last, inbound.accept(again, 3), inbound.accept(again, 4)
      (3, False, True)
    """

    def __init__(self) -> None:
        self._senders: dict[TaskName, _Sender] = {}
        self.repeats = 0

    def connect(
        self, task: TaskName, incarnation: int, line: int = 0
    ) -> tuple[InboundStream, bool]:
        """Begins a stream; returns it, and whether it replaces one not given up.

        Who begins a line twice has not learned that it was accepted, and sent nothing.

        Raises:
          FencedError: a newer incarnation of the task was here already.
        """
        sender = self._senders.setdefault(task, _Sender(incarnation))
        self._refuse_retired(sender, task, incarnation)
        if incarnation != sender.incarnation:
            sender.retired.append(sender.incarnation)
            sender.incarnation, sender.received = incarnation, ReceivedFrames()
        before, stream = sender.stream, (incarnation, line)
        is_same = before and line and stream == (before.incarnation, before.line)
        replaced = before is not None and not is_same
        sender.stream = InboundStream(task, incarnation, sender.received, line)
        return sender.stream, replaced

    def resume(self, task: TaskName, incarnation: int) -> InboundStream:
        """Goes on with a stream that broke, also if that was not noticed here yet.

        Raises:
          FencedError: a newer incarnation was here.
          TaskLostError: the sender was given up.
        """
        sender = self._senders.setdefault(task, _Sender(incarnation))
        self._refuse_retired(sender, task, incarnation)
        if sender.stream is None or sender.incarnation != incarnation:
            raise TaskLostError(
                f"the connection of {task} cannot be resumed: it was given up, and "
                "the loss reported",
                task=task,
            )
        # A stream that broke before its first frame came may still jump.
        sender.stream = replace(sender.stream)
        return sender.stream

    def _refuse_retired(
        self, sender: _Sender, task: TaskName, incarnation: int
    ) -> None:
        if incarnation in sender.retired:
            raise FencedError(
                f"{task} was started again since; this older process of it is refused",
                task=task,
            )

    def accept(self, stream: InboundStream, sequence: int) -> bool:
        """Returns whether the frame is new; a repeat is False.

        Raises:
          FencedError: a newer incarnation of the task is here.
          StreamReplaced: another stream of the same task took over.
          MalformedMessageError: a frame is missing before this one.
        """
        sender = self._senders[stream.task]
        self._refuse_retired(sender, stream.task, stream.incarnation)
        if sender.stream is not stream:
            raise StreamReplaced
        last = stream.received.last
        if sequence > last + 1 and not stream.may_jump:
            raise MalformedMessageError(
                f"frame {sequence} of {stream.task} came after frame {last}: "
                f"frames are missing"
            )
        if not stream.received.accept(sequence):
            self.repeats += 1
            return False
        stream.may_jump = False
        return True

    def is_current(self, stream: InboundStream) -> bool:
        """Whether no other stream of its task has begun, and it was not given up."""
        return self._senders[stream.task].stream is stream

    def disconnect(self, stream: InboundStream) -> bool:
        """Gives a stream up; returns whether it was the current one of its task."""
        if not self.is_current(stream):
            return False
        self._senders[stream.task].stream = None
        return True
