"""Bounded staleness: admits a step's read only if no gradient gets too old.

The staleness of a gradient is the number of updates by others that were applied to a
ps between its read there and its own update. It is bounded where it begins. A gradient
is *outstanding* from the moment its step is let in until every ps is done with it. At
most as many others are applied in between as were outstanding when it was let in, or
are let in while it is outstanding. A step is let in only if that number stays within
the bound for it and for all that are outstanding, whatever the order in which messages
arrive later.

Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server", NIPS 2013, bounds clocks of workers; here it is updates of the model.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias, final

from jgraph.coordination.sync.aggregation import Step
from jgraph.graph.ir import TaskName


@final
@dataclass(frozen=True, slots=True)
class StepAsked:
    """A step wants to read."""

    step: Step


@final
@dataclass(frozen=True, slots=True)
class StepEnded:
    """A ps is done with a step: applied it, gave it up, or never saw it."""

    shard: TaskName
    step: Step


Event: TypeAlias = StepAsked | StepEnded


@final
@dataclass(frozen=True, slots=True)
class LetIn:
    """Let the step read, on every ps."""

    step: Step


@final
class Admission:
    """State machine of one run's bound, at one ps for all.

    Args:
      shards: every ps that steps read from or update.
      bound: greatest staleness; 0 makes steps take turns.

    Example:
      >>> ps = TaskName("/job:ps/task:0")
      >>> admission = Admission([ps], bound=0)
      >>> admission.handle(StepAsked(("w0", 1)))
      [LetIn(step=('w0', 1))]
      >>> admission.handle(StepAsked(("w1", 1)))
      []
      >>> admission.handle(StepEnded(ps, ("w0", 1)))
      [LetIn(step=('w1', 1))]
    """

    def __init__(self, shards: Iterable[TaskName], *, bound: int) -> None:
        self._shards = frozenset(shards)
        self._bound = bound
        self._waiting: dict[Step, None] = {}
        self._outstanding: dict[Step, set[TaskName]] = {}
        # Updates by others that may come between its read and its own update.
        self._may_pass: Counter[Step] = Counter()

    def handle(self, event: Event) -> list[LetIn]:
        """Takes an event; returns whom to let in now."""
        match event:
            case StepAsked(step):
                self._waiting[step] = None
            case StepEnded(shard, step):
                self._end(step, shard)
        return self._open()

    def _end(self, step: Step, shard: TaskName) -> None:
        self._waiting.pop(step, None)
        busy = self._outstanding.get(step)
        if busy is None:
            return
        busy.discard(shard)
        if not busy:
            del self._outstanding[step]
            del self._may_pass[step]

    def _open(self) -> list[LetIn]:
        admitted = []
        # In the order of asking: nobody waits for ever.
        while self._waiting and self._fits():
            step = next(iter(self._waiting))
            del self._waiting[step]
            for other in self._outstanding:
                self._may_pass[other] += 1
            self._may_pass[step] = len(self._outstanding)
            self._outstanding[step] = set(self._shards)
            admitted.append(LetIn(step))
        return admitted

    def _fits(self) -> bool:
        worst = max(self._may_pass.values(), default=-1) + 1
        return max(worst, len(self._outstanding)) <= self._bound
