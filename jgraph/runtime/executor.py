"""One step of one partition: a node runs as soon as what it takes is there.

The executor is driven from one thread (a server's event loop). It holds no clock, no
socket and no thread: work that may take long is given to ``ExecutorHost.submit``, which
runs it elsewhere and reports back on the same thread.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeAlias, TypeVar, final

import numpy as np

from jgraph.coordination.timeline.node_times import (
    END,
    START,
    NodeOrder,
    complete_times,
)
from jgraph.errors import MalformedMessageError
from jgraph.graph.ir import TaskName
from jgraph.plan.program.nodes import (
    ConstNode,
    ContributeNode,
    FeedNode,
    FetchNode,
    JoinNode,
    Node,
    RecvNode,
    SendNode,
    UnpackNode,
    ValueType,
)
from jgraph.plan.program.row_values import padded, unpacked
from jgraph.runtime.cost import Cost
from jgraph.runtime.flight import Stamps, blank_stamps
from jgraph.runtime.gate import Gate, aggregator, key_of
from jgraph.runtime.loaded import LoadedPartition
from jgraph.runtime.node_work import work_of
from jgraph.runtime.rendezvous import Rendezvous, StepKey
from jgraph.runtime.store.change_log import Recording
from jgraph.runtime.store.store import VariableStore

_NO_ORDER: Final = NodeOrder((), frozenset())


@final
@dataclass(slots=True)
class StepTimes:
    """When the stages of a step were over on one task, by the shell's clock.

    Attributes:
      started: the partition began.
      received: the last value of another task came; 0 if none was due.
      computed: the last node that computes was done.
      end: the partition was done.
      stamps: when each node ran, as a flight recorder keeps it; None: not noted.
      order: of the nodes.
    """

    started: float = 0.0
    received: float = 0.0
    computed: float = 0.0
    end: float = 0.0
    stamps: "Stamps | None" = None
    order: NodeOrder = _NO_ORDER

    @property
    def nodes(self) -> np.ndarray[Any, Any]:
        """When each node ran, as in ``PartTimes``."""
        stamps = blank_stamps(0) if self.stamps is None else self.stamps
        times = np.array(stamps).reshape(-1, 3)
        complete_times(times, self.order)
        return times[:-1]

    def parts(self) -> dict[str, float]:
        """Returns the seconds spent on each stage: pull, compute, push."""
        ready = max(self.received, self.started)
        done = max(self.computed, ready)
        return {
            "pull": ready - self.started,
            "compute": done - ready,
            "push": self.end - done,
        }


_SHORT_BYTES: Final = 64 << 10
"""Sending less takes no time that one would look at."""

T = TypeVar("T")
Keep: TypeAlias = Callable[[str, Sequence[Any]], None]
Outcome: TypeAlias = "list[np.ndarray[Any, Any]] | BaseException"
"""The fetches of a step (empty on tasks that are not the driver), or why it failed."""


class ExecutorHost(Protocol):
    """What the executor asks of its surroundings."""

    def now(self) -> float:
        """Returns monotonic time in seconds."""

    def submit(
        self,
        work: Callable[[], T],
        done: Callable[[T | BaseException], None],
        cost: Cost,
    ) -> None:
        """Runs ``work``, then calls ``done`` on the executor's thread.

        Work whose cost is known to be small may run at once, before this returns. Then
        ``cost`` has when it ran.
        """

    def send(
        self,
        dst: TaskName,
        step: StepKey,
        key: str,
        values: Sequence[np.ndarray[Any, Any]],
    ) -> None:
        """Sends values to another task; must not block."""

    def join(
        self,
        parts: Sequence[np.ndarray[Any, Any]],
        done: Callable[[np.ndarray[Any, Any] | BaseException], None],
        cost: Cost,
    ) -> None:
        """Puts arrays one after the other, and calls ``done`` with them, or an error.

        On the executor's thread, after this returns or before.
        """

    def withdraw(self, step: StepKey) -> None:
        """Drops what was sent for a step and has not left yet."""

    def later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Calls ``callback`` after that time, on the executor's thread."""


@final
@dataclass(frozen=True, slots=True)
class StepPlace:
    """What the steps of a task share.

    Attributes:
      store: variables of the task.
      rendezvous: where values from other tasks arrive.
      host: runs work, sends values.
    """

    store: VariableStore
    rendezvous: Rendezvous
    host: ExecutorHost


@final
class WorkUnderWay:
    """Nodes that were given to a thread, or compute here, and have not ended."""

    def __init__(self) -> None:
        self.nodes: set[int] = set()
        self._when_settled: list[Callable[[], None]] = []

    def end(self, node: int) -> None:
        """Learns that a node's work is over."""
        self.nodes.discard(node)
        if self._when_settled and not self.nodes:
            callbacks, self._when_settled = self._when_settled, []
            for callback in callbacks:
                callback()

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` once nothing is under way; at once if nothing is."""
        if self.nodes:
            self._when_settled.append(callback)
        else:
            callback()


@final
class StepValues:
    """Values of one step, and how many of them each node still waits for.

    Attributes:
      remaining: nodes that are not complete.
    """

    def __init__(self, loaded: LoadedPartition) -> None:
        self._loaded = loaded
        self._needs = list(loaded.needs)
        self._uses: dict[int, int] = {}
        self._values: dict[int, Any] = {}
        self.remaining = len(loaded.needs)

    def __getitem__(self, value: int) -> Any:
        """Returns a value that a node now takes."""
        return self._values[value]

    def inputs(self, index: int) -> dict[int, Any]:
        """Returns the values that a node takes."""
        return {value: self._values[value] for value in self._loaded.inputs[index]}

    def first(self) -> list[int]:
        """Returns the nodes that wait for nothing."""
        return [index for index, needs in enumerate(self._needs) if needs == 0]

    def complete(self, index: int, values: Sequence[Any]) -> list[int]:
        """Takes what a node makes; returns the nodes that now wait for nothing."""
        loaded, needs = self._loaded, self._needs
        self._values.update(zip(loaded.outputs[index], values, strict=True))
        ready: list[int] = []
        for node, count in loaded.releases[index]:
            needs[node] -= count
            if needs[node] == 0:
                ready.append(node)
        # Buffers live only until their last consumer has run.
        for value in loaded.taken_alone[index]:
            self._values.pop(value, None)
        for value in loaded.taken_by_more[index]:
            uses = self._uses.get(value, len(loaded.consumers[value])) - 1
            self._uses[value] = uses
            if uses == 0:
                self._values.pop(value, None)
        self.remaining -= 1
        return ready

    def clear(self) -> None:
        """Lets go of all values."""
        self._values.clear()


@final
class StepRun:
    """A step of a partition from its start to its outcome.

    Args:
      loaded: the partition.
      step: program handle and step id.
      feeds: arrays by feed name (driver only).
      place: what the steps of the task share.
      on_done: called once with the fetches or the first error.
      gate: of the partition, if it has one.
      recording: is told of every change of state.
      compute_wait_s: what other tasks send is handed on this much later, as if the
        step computed for that long.
      ahead: it may begin while so many earlier steps of its program are under way.
      noted: keep in ``times.stamps`` when each node ran.
      keep: is given each message of another task, by its key.

    Attributes:
      has_begun: its gate was asked.
      work: what of it is under way; that may outlive the step.
    """

    def __init__(
        self,
        loaded: LoadedPartition,
        step: StepKey,
        feeds: Mapping[str, Any],
        place: StepPlace,
        on_done: Callable[[Outcome], None],
        *,
        gate: Gate | None = None,
        recording: Recording | None = None,
        compute_wait_s: float = 0.0,
        ahead: int = 0,
        noted: bool = False,
        keep: Keep | None = None,
    ) -> None:
        self._keep = keep
        self.ahead = ahead
        self.has_begun = False
        # What waits for the steps before it to be over; None: they are.
        self._held: list[int] | None = [] if ahead else None
        self._gate = gate
        self._recording = recording
        self._compute_wait_s = compute_wait_s
        self._unsent = loaded.sends
        self.step = step
        self._loaded = loaded
        self._feeds = feeds
        self._place = place
        self._on_done = on_done
        self._values = StepValues(loaded)
        self._fetches: list[np.ndarray[Any, Any]] = []
        self._ready: deque[int] = deque()
        self._draining = False
        self.is_over = False
        self.work = WorkUnderWay()
        self.times = StepTimes()
        self._now = place.host.now
        self._stamps = self.times.stamps = None
        if noted:
            self._stamps = blank_stamps(self._values.remaining)
            if gate is not None:
                self._stamps[-3] = self._now()
            self.times.stamps = self._stamps
            self.times.order = loaded.order

    @property
    def nodes(self) -> Sequence[Node]:
        """What it runs."""
        return self._loaded.partition.nodes

    def start(self) -> None:
        """Runs every node that waits for nothing."""
        self.times.started = began = self._now()
        if self._recording is not None:
            self._recording.begins()
        if self._stamps is not None:
            self._stamps[-2] = began
            if self._gate is None:
                self._stamps[-3] = began
        self._ready.extend(self._values.first())
        if not self._loaded.partition.nodes:
            self._finish([])
        self._drain()

    def start_unless_over(self) -> None:
        """Starts; a step that was given up while it waited does not."""
        if not self.is_over:
            self.start()

    @property
    def is_held(self) -> bool:
        """Whether it only reads and sends until it is its turn."""
        return self._held is not None

    def take_turn(self) -> None:
        """Lets it compute, and change variables: the steps before it are over."""
        if self._held is None:
            return
        held, self._held = self._held, None
        if held or self.times.started:  # else it waits at its gate
            self.times.started = self._place.host.now()
            self._ready.extend(held)
            self._drain()

    def abort(self, error: BaseException) -> None:
        """Ends the step with ``error``; work already submitted is not undone."""
        self._finish(error)

    def _drain(self) -> None:
        # A loop, not recursion: completions of cheap nodes come back at once.
        if self._draining:
            return
        self._draining = True
        try:
            while self._ready and not self.is_over:
                index = self._ready.popleft()
                if self._held is not None and self._loaded.in_turn[index]:
                    self._held.append(index)
                else:
                    self._start_node(index)
        except Exception as error:  # noqa: BLE001  # becomes the step's outcome
            self._finish(error)
        finally:
            self._draining = False

    def _start_node(self, index: int) -> None:
        node = self._loaded.partition.nodes[index]
        match node:
            case FeedNode():
                self._complete(index, [self._feeds[node.name]])
            case ConstNode():
                self._complete(index, [node.value])
            case RecvNode():
                self._place.rendezvous.recv(
                    self.step,
                    node.key,
                    lambda arrays: self._received(index, node, arrays),
                )
            case SendNode():
                self._send(index, node)
                self._complete(index, [])
            case FetchNode():
                self._fetches = [np.asarray(self._padded(v)) for v in node.values]
                self._complete(index, [])
            case ContributeNode():
                self._contribute(node)
                self._complete(index, [])
            case JoinNode():
                self._join(index, node)
            case UnpackNode():
                flat = np.asarray(self._values[node.value])
                self._complete(index, unpacked(flat, self._loaded.cuts[index]))
            case _:
                note = self._recording and partial(
                    self._recording.note, self.step, index
                )
                undo = self._recording and self._recording.undo
                inputs = self._values.inputs(index)
                work = work_of(
                    self._loaded,
                    index,
                    inputs,
                    self._place.store,
                    self._gate,
                    note,
                    undo,
                )
                if self._recording is not None:
                    work = self._recording.work(index, work)
                self.work.nodes.add(index)
                self._place.host.submit(
                    work,
                    lambda result: self._worked(index, result),
                    self._loaded.costs[index],
                )

    def _send(self, index: int, node: SendNode) -> None:
        began = None if self._stamps is None else self._now()
        values = [np.asarray(self._values[v]) for v in node.values]
        self._place.host.send(node.dst, self.step, node.key, values)
        if self._stamps is not None and began is not None:
            is_short = sum([value.nbytes for value in values]) < _SHORT_BYTES
            self._stamps[3 * index + START] = began
            self._stamps[3 * index + END] = began if is_short else self._now()
        self._unsent -= 1
        if not self._unsent and self._gate is not None:
            self._gate.sent(self.step, node.dst)

    def _join(self, index: int, node: JoinNode) -> None:
        parts = [np.asarray(self._values[v]) for v in node.values]
        self.work.nodes.add(index)
        self._place.host.join(
            parts,
            lambda whole: self._worked(
                index, whole if isinstance(whole, BaseException) else [whole]
            ),
            self._loaded.costs[index],
        )

    def _padded(self, value: int) -> Any:
        return padded(self._values[value], self._loaded.partition.values[value])

    def _contribute(self, node: ContributeNode) -> None:
        variables = self._loaded.partition.variables
        values = {
            key_of(variables[v]): np.asarray(self._values[value])
            for v, value in zip(node.variables, node.values, strict=True)
        }
        aggregator(self._gate).contribute(
            self.step, int(self._values[node.slot]), values
        )

    def _received(self, index: int, node: RecvNode, values: Sequence[Any]) -> None:
        self.times.received = received = self._now()
        if self._stamps is not None:
            self._stamps[3 * index + START] = self._stamps[3 * index + END] = received
        try:
            if [(v.shape, v.dtype) for v in values] != self._loaded.types[index]:
                check_received(node, values, self._loaded.partition.values)
        except MalformedMessageError as error:
            self._finish(error)
            return
        if self._keep is not None:
            self._keep(node.key, values)

        def hand_on() -> None:
            self._complete(index, values)
            self._drain()

        def hand_on_later() -> None:
            if self._stamps is not None:
                self._stamps[3 * index + END] = self._now()
            hand_on()

        if self._compute_wait_s:
            self._place.host.later(self._compute_wait_s, hand_on_later)
        else:
            hand_on()

    def _worked(self, index: int, result: list[Any] | BaseException) -> None:
        self.work.end(index)
        if isinstance(result, BaseException):
            self._finish(result)
            return
        self.times.computed = self._now()
        if self._stamps is not None:
            cost = self._loaded.costs[index]
            self._stamps[3 * index + START] = cost.began_s
            self._stamps[3 * index + END] = cost.ended_s
        self._complete(index, result)
        self._drain()

    def _complete(self, index: int, values: Sequence[Any]) -> None:
        if self.is_over:
            return
        self._ready.extend(self._values.complete(index, values))
        if self._values.remaining == 0:
            self._finish(self._fetches)

    def _finish(self, outcome: Outcome) -> None:
        if self.is_over:
            return
        self.is_over = True
        self.times.end = self._now()
        if self._stamps is not None:
            self._stamps[-1] = self.times.end
        self._values.clear()
        self._ready.clear()
        self._place.rendezvous.finish(self.step)
        self._on_done(outcome)


def check_received(
    node: RecvNode, values: Sequence[Any], types: Sequence[ValueType]
) -> None:
    """Refuses values that are not those of a message, before anything uses them.

    Args:
      node: takes the message.
      values: what came.
      types: of all values of the partition.

    Raises:
      MalformedMessageError: names the sender, the message, and the first value that is
        not what it should be.
    """
    if len(values) != len(node.outs):
        raise MalformedMessageError(
            f"{node.src} sent {len(values)} values in message '{node.key}', which has "
            f"{len(node.outs)}; its program is another one",
            task=node.src,
        )
    for index, (value, out) in enumerate(zip(values, node.outs, strict=True)):
        type_ = types[out]
        if value.dtype != type_.np_dtype or not _fits(value.shape, type_):
            found = ValueType(tuple(value.shape), value.dtype.name)
            raise MalformedMessageError(
                f"{node.src} sent {found} as value {index} of message '{node.key}', "
                f"which is {type_}; its program is another one",
                task=node.src,
            )


def _fits(shape: tuple[int, ...], type_: ValueType) -> bool:
    if shape == type_.shape:
        return True
    if len(shape) != len(type_.shape):
        return False
    if type_.ragged:
        return shape[0] <= type_.shape[0] and shape[1:] == type_.shape[1:]
    return bool(type_.symbols) and all(
        text or size == wanted
        for size, wanted, text in zip(shape, type_.shape, type_.symbols, strict=True)
    )
