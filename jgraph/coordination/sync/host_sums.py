"""Sums on each host in synchronous training: which contributions a sum is made of.

A replica does not send an owner on another host its part of what it contributes. It
gives that to a task of its own host, the *collector* of that owner there, which sends
the owner one sum for all replicas of the host. An owner is told which contributions a
sum has, and takes those alone that make up what the arbiter decided, each once.

A collector sums as soon as it has what those replicas gave that gave to the update
before: most often that is what will be decided. If it is not, it sums anew then.

Source: Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training
in Heterogeneous GPU/CPU Clusters", 2020 (BytePS sums on each machine first).
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias, final

from jgraph.coordination.sync.aggregation import Step
from jgraph.graph.ir import TaskName


@final
@dataclass(frozen=True, slots=True)
class ContributionKept:
    """What a step contributed for a slot is kept here until an update is decided.

    Attributes:
      step: which.
      slot: orders the contributions of a sum.
      away: parts of it that are here, of owners elsewhere.
      own: parts of it that are here, of this task.
    """

    step: Step
    slot: int
    away: tuple[TaskName, ...]
    own: tuple[TaskName, ...]


@final
@dataclass(frozen=True, slots=True)
class ContributionDropped:
    """What a step contributed is not kept any more."""

    step: Step


@final
@dataclass(frozen=True, slots=True)
class UpdateDecided:
    """The next update is made of these contributions, in this order."""

    steps: tuple[Step, ...]


@final
@dataclass(frozen=True, slots=True)
class SumCame:
    """A sum of an own part of what these steps contributed to a version is here."""

    part: TaskName
    collector: TaskName
    version: int
    steps: tuple[Step, ...]


@final
@dataclass(frozen=True, slots=True)
class LinkLost:
    """What this task has sent lately to who has a part may be lost."""

    part: TaskName


Event: TypeAlias = (
    ContributionKept | ContributionDropped | UpdateDecided | SumCame | LinkLost
)


@final
@dataclass(frozen=True, slots=True)
class SendSum:
    """Sum a part of what these steps contributed, and send that to who has it."""

    part: TaskName
    version: int
    steps: tuple[Step, ...]


@final
@dataclass(frozen=True, slots=True)
class SendAgain:
    """Send the sum of a part again that was made last."""

    part: TaskName


@final
@dataclass(frozen=True, slots=True)
class Average:
    """All that was decided is here: as it came, and in the sums of these tasks.

    Attributes:
      version: that it makes an update of.
      sums: part and collector of each.
    """

    version: int
    sums: tuple[tuple[TaskName, TaskName], ...]


Instruction: TypeAlias = SendSum | SendAgain | Average


@final
class HostSums:
    """State machine of one task, beside its gate.

    A part is called by the task that owned it first: a task that stands in for another
    one has two.

    Args:
      version: updates applied so far.
      own: parts of this task.

    Example:
      >>> here, there = TaskName("/job:worker/task:0"), TaskName("/job:worker/task:2")
      >>> sums = HostSums(version=7, own=[here])
      >>> for slot in range(2):
      ...     kept = ContributionKept((f"w{slot}", 1), slot, (there,), (here,))
      ...     assert not sums.handle(kept)
      >>> for one in sums.handle(UpdateDecided((("w0", 1), ("w1", 1), ("w2", 1)))):
      ...     print(one.part, one.steps)
      /job:worker/task:2 (('w0', 1), ('w1', 1))
      >>> sums.handle(SumCame(here, there, 7, (("w2", 1),)))[0].sums
      (('/job:worker/task:0', '/job:worker/task:2'),)
    """

    def __init__(self, version: int, own: Iterable[TaskName]) -> None:
        self._version = version
        # Of this version: by part the slots of what is kept of it, and what was sent.
        self._slots: defaultdict[TaskName, dict[Step, int]] = defaultdict(dict)
        self._own: dict[TaskName, set[Step]] = {part: set() for part in own}
        self._sums: dict[TaskName, tuple[Step, ...]] = {}
        self._awaiting: set[TaskName] = set()  # of who may not have averaged yet
        self._givers: dict[TaskName, frozenset[str]] = {}  # to the version before
        self._missing: dict[TaskName, frozenset[Step]] | None = None  # of a decision
        self._arrivals: defaultdict[
            int, dict[tuple[TaskName, TaskName], frozenset[Step]]
        ]
        self._arrivals = defaultdict(dict)

    def handle(self, event: Event) -> list[Instruction]:
        """Takes an event; returns what to do now."""
        match event:
            case ContributionKept():
                return self._keep(event)
            case ContributionDropped(step):
                for own in self._own.values():
                    own.discard(step)
                for slots in self._slots.values():
                    slots.pop(step, None)
                return []
            case UpdateDecided(steps):
                return self._decide(steps)
            case LinkLost(part):
                return [SendAgain(part)] if part in self._awaiting else []
            case SumCame(part, collector, version, steps):
                if version >= self._version - (self._missing is not None):
                    self._arrivals[version][part, collector] = frozenset(steps)
                return self._average()

    def _keep(self, news: ContributionKept) -> list[Instruction]:
        if not self._sums:
            self._awaiting.clear()  # who contributes has read what all have averaged
        for part in news.own:
            self._own[part].add(news.step)
        found: list[Instruction] = []
        for part in news.away:
            slots = self._slots[part]
            slots[news.step] = news.slot
            if self._givers.get(part) == frozenset(handle for handle, _ in slots):
                found += self._send(part, sorted(slots, key=slots.__getitem__))
        return found

    def _send(self, part: TaskName, steps: Iterable[Step]) -> list[Instruction]:
        """Sends a sum, unless just that was sent, or there is nothing to sum."""
        due = tuple(steps)
        if not due or self._sums.get(part) == due:
            return []
        self._sums[part] = due
        self._awaiting.add(part)
        return [SendSum(part, self._version, due)]

    def _decide(self, steps: tuple[Step, ...]) -> list[Instruction]:
        found: list[Instruction] = []
        for part, slots in self._slots.items():
            found += self._send(part, (step for step in steps if step in slots))
            self._givers[part] = frozenset(handle for handle, _ in slots)
        self._missing = {p: frozenset(steps) - own for p, own in self._own.items()}
        self._version += 1
        self._slots.clear()
        self._sums.clear()
        for own in self._own.values():
            own.clear()
        return [*found, *self._average()]

    def _average(self) -> list[Instruction]:
        """Averages once each own part of what was decided is here, and is here once."""
        version, sums = self._version - 1, list[tuple[TaskName, TaskName]]()
        if self._missing is None:
            return []
        for part, missing in self._missing.items():
            found = list[Step]()
            for (its, collector), steps in sorted(self._arrivals[version].items()):
                if its == part and steps and steps <= missing:
                    sums.append((part, collector))
                    found += steps
            if len(found) != len(missing) or missing.difference(found):
                return []
        self._missing = None
        for old in [v for v in self._arrivals if v <= version]:
            del self._arrivals[old]
        return [Average(version, tuple(sums))]
