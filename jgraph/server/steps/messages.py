"""Outgoing messages of steps: what one frame brings about leaves in few frames.

A frame costs its sender and its receiver more than the few bytes that most have. Where
a step ends the next one begins: what is said of both to one peer leaves as one frame of
values, with the order and the report that came up beside them. Where tasks have cores
enough to work at the same time, values wait for neither.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias, final

import numpy as np

from jgraph.errors import JGError
from jgraph.failpoints import failpoint, is_any_armed
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.status import to_status
from jgraph.rpc.transport import Transport
from jgraph.runtime.rendezvous import StepKey

ALONE_BYTES: Final = 256 << 10
"""Values of so many bytes leave at once: the way takes them longer than the turn."""
TOGETHER_BYTES: Final = 1 << 20
"""More than this is not in one frame."""

Tensors: TypeAlias = Sequence["np.ndarray[Any, Any]"]
Message: TypeAlias = "tuple[pb.Values | pb.StartStep | pb.StepDone, Tensors]"


@final
class StepMessages:
    """Posts values, orders to begin steps, and reports of parts that are over.

    They leave with ``flush``: when the frame that brought them about has been handled;
    of what no frame brought about, at the end of the turn.
    To one peer they leave in that order, but that orders and reports may leave with
    values that came up before them.

    Args:
      transport: to the other tasks.
      is_crowded: whether tasks take cores from each other.

    Attributes:
      drives: whether this task drives a step.
    """

    def __init__(
        self, transport: Transport, is_crowded: Callable[[], bool] = lambda: True
    ) -> None:
        self.drives: Callable[[StepKey], bool] = lambda step: False
        self._transport = transport
        self._is_crowded = is_crowded
        self._waiting: defaultdict[TaskName, list[Message]] = defaultdict(list)
        self._is_gathering = False

    def gather(self) -> None:
        """Has what comes up wait for ``flush``, which the caller promises to call."""
        self._is_gathering = True

    def values(self, dst: TaskName, header: pb.Values, tensors: Tensors) -> None:
        """Posts values of a step; they must not change afterwards."""
        if sum([tensor.nbytes for tensor in tensors]) >= ALONE_BYTES:
            self.post()
            self._post(dst, header, tensors)
        elif self._is_crowded():
            self._add(dst, (header, tensors))
        else:
            said = self._waiting.pop(dst, [])
            self._post_together(dst, [*said, (header, tensors)])

    def order(self, dst: TaskName, order: pb.StartStep) -> None:
        """Posts the order to begin a step."""
        self._add(dst, (order, ()))

    def report(self, dst: TaskName, done: pb.StepDone, tensors: Tensors) -> None:
        """Posts how this task's part of a step ended."""
        self._add(dst, (done, tensors))

    def abort(self, dst: TaskName, order: pb.AbortStep) -> None:
        """Posts the order to end a step, at once and after all that waits."""
        self.post()
        self._transport.post(dst, frame(abort_step=order))

    def withdraw(self, step: StepKey) -> None:
        """Drops the values of a step that have not left yet."""
        for said in self._waiting.values():
            said[:] = [one for one in said if not _is_values_of(one, step)]
        self._transport.withdraw(*step)

    def flush(self) -> None:
        """Posts all that waits, and ends what ``gather`` began."""
        self._is_gathering = False
        self.post()

    def post(self) -> None:
        """Posts all that waits."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, defaultdict(list)
        for dst, said in waiting.items():
            self._post_together(dst, said)

    def _post_together(self, dst: TaskName, said: list[Message]) -> None:
        for message, tensors in together(said) if len(said) > 1 else said:
            self._post(dst, message, tensors)

    def _add(self, dst: TaskName, message: Message) -> None:
        if not (self._waiting or self._is_gathering):
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting[dst].append(message)

    def _post(
        self,
        dst: TaskName,
        message: pb.Values | pb.StartStep | pb.StepDone,
        tensors: Tensors,
    ) -> None:
        if isinstance(message, pb.Values):
            self._post_values(dst, message, tensors)
        elif isinstance(message, pb.StartStep):
            self._transport.post(dst, frame(start_step=message))
        else:
            self._transport.post(dst, frame(step_done=message, tensors=tensors))
            self._on_report()

    def _post_values(self, dst: TaskName, header: pb.Values, tensors: Tensors) -> None:
        try:
            self._transport.post(dst, frame(values=header, tensors=tensors))
        except JGError as error:
            if header.more:
                for one, own in apart(header, tensors):
                    self._post_values(dst, one, own)
                return
            # Nobody else would tell who waits for them.
            reason = to_status(error)
            order = pb.AbortStep(
                handle=header.handle, step_id=header.step_id, reason=reason
            )
            self._transport.post(dst, frame(abort_step=order))
            return
        if is_any_armed():
            self._pass_failpoints([header, *header.more])

    def _pass_failpoints(self, said: Sequence[pb.Values]) -> None:
        if any(one.HasField("done") for one in said):
            self._on_report()
        if any(self.drives((one.handle, one.step_id)) for one in said):
            failpoint("push.sent")

    def _on_report(self) -> None:
        failpoint("step.told")


def together(said: Sequence[Message]) -> list[Message]:
    """Returns what is said to one peer: values in one frame, orders and reports in it.

    Values stay in their order, and so do orders, and reports. A report with tensors
    leaves alone.

    Example:
      >>> gradients = pb.Values(handle="h", step_id=1, key="g")
      >>> following = pb.StartStep(handle="h", step_id=2)
      >>> [(message, _)] = together([(gradients, ()), (following, ())])
      >>> message.step_id, message.start.step_id
      (1, 2)
    """
    values: list[tuple[pb.Values, Tensors]] = []
    others: list[tuple[pb.StartStep | pb.StepDone, Tensors]] = []
    for message, tensors in said:
        if isinstance(message, pb.Values):
            values.append((message, tensors))
        else:
            others.append((message, tensors))
    to_start = to_report = 0  # values that have none yet
    alone: list[Message] = []
    for message, tensors in others:
        if isinstance(message, pb.StartStep) and to_start < len(values):
            values[to_start][0].start.CopyFrom(message)
            to_start += 1
        elif (
            isinstance(message, pb.StepDone) and not tensors and to_report < len(values)
        ):
            values[to_report][0].done.CopyFrom(message)
            to_report += 1
        else:
            alone.append((message, tensors))
    return [*(values if len(values) < 2 else _joined(values)), *alone]


def apart(header: pb.Values, tensors: Tensors) -> Iterator[tuple[pb.Values, Tensors]]:
    """Yields the values of a frame, each with its own tensors."""
    if not header.more:
        yield header, tensors
        return
    more = list(header.more)
    header.ClearField("more")
    at = 0
    for one in (header, *more):
        yield one, tensors[at : at + one.count]
        at += one.count


def _joined(
    values: Sequence[tuple[pb.Values, Tensors]],
) -> list[tuple[pb.Values, Tensors]]:
    """Returns values in as few frames as their size allows."""
    frames: list[tuple[pb.Values, list[np.ndarray[Any, Any]]]] = []
    nbytes = 0
    for message, tensors in values:
        own = sum([tensor.nbytes for tensor in tensors])
        nbytes += own
        if not frames or nbytes > TOGETHER_BYTES:
            frames.append((message, list(tensors)))
            nbytes = own
            continue
        head, together = frames[-1]
        if not head.more:
            head.count = len(together)
        message.count = len(tensors)
        head.more.append(message)
        together += tensors
    return list(frames)


def _is_values_of(one: Message, step: StepKey) -> bool:
    message = one[0]
    return isinstance(message, pb.Values) and step == (message.handle, message.step_id)
