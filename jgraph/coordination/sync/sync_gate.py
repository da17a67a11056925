"""Synchronous gate of one ps; see ``aggregation`` for the whole.

The arbiter is told of contributions in sets: it can decide nothing before this ps has
as many as the last update took, so those that come earlier wait for them, or a while.
Before the first update they wait for all that were let in.

What replicas say comes in sets, of all that was said at one moment: an update of
thousands is then a few operations on each set.

Where contributions are summed together with other tasks, see ``group_member``, none is
told before the sum is here. So what is decided has been summed everywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, final

from jgraph.coordination.sync.aggregation import Step
from jgraph.errors import JGError

TELL_S: Final = 0.02
"""How long the first contribution of an update waits to be told with others."""
_MOST_S: Final = 1.0


@final
@dataclass(frozen=True, slots=True)
class StepsAsked:
    """Steps of replicas want to read here."""

    steps: Sequence[Step]


@final
@dataclass(frozen=True, slots=True)
class ContributionsCame:
    """Contributions are here: for which data slot, by the step that it is of."""

    slots: Mapping[Step, int]


@final
@dataclass(frozen=True, slots=True)
class StepsEnded:
    """Steps are over here, or were given up; of no matter if they contributed."""

    steps: Sequence[Step]


@final
@dataclass(frozen=True, slots=True)
class Decided:
    """The arbiter chose what these steps contributed; they are of this version."""

    steps: tuple[Step, ...]


@final
@dataclass(frozen=True, slots=True)
class Voided:
    """What a step contributed is not of one version on all ps."""

    step: Step


@final
@dataclass(frozen=True, slots=True)
class UpdateApplied:
    """The update that was decided is applied here."""


@final
@dataclass(frozen=True, slots=True)
class Closed:
    """There are no more updates, for this reason."""

    error: JGError


@final
@dataclass(frozen=True, slots=True)
class TellDue:
    """What waits to be told has waited long enough; see ``TellLater``."""


@final
@dataclass(frozen=True, slots=True)
class Summed:
    """What all contributed is summed here; see ``Sum``."""


Event: TypeAlias = (
    StepsAsked
    | ContributionsCame
    | StepsEnded
    | Decided
    | Voided
    | UpdateApplied
    | Closed
    | TellDue
    | Summed
)


@final
@dataclass(frozen=True, slots=True)
class LetIn:
    """Let these steps read now."""

    steps: tuple[Step, ...]


@final
@dataclass(frozen=True, slots=True)
class Refuse:
    """End the step with this error."""

    step: Step
    error: JGError


@final
@dataclass(frozen=True, slots=True)
class Keep:
    """Keep what these steps contributed."""

    steps: tuple[Step, ...]


@final
@dataclass(frozen=True, slots=True)
class Drop:
    """Forget what the step contributed."""

    step: Step


@final
@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the arbiter that steps, let in at ``version``, contributed for slots."""

    steps: tuple[Step, ...]
    version: int
    slots: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class TellLater:
    """Come back with ``TellDue`` after a while: contributions wait to be told."""

    after_s: float


@final
@dataclass(frozen=True, slots=True)
class Choose:
    """Take the mean of what these steps contributed, and forget all others."""

    steps: tuple[Step, ...]


@final
@dataclass(frozen=True, slots=True)
class Sum:
    """Sum what all contributed to a version; come back with ``Summed``."""

    version: int


Instruction: TypeAlias = LetIn | Refuse | Keep | Drop | Tell | TellLater | Choose | Sum


@final
class SyncGate:
    """State machine of the gate of one ps.

    Args:
      version: updates applied so far.
      together: how many contributions are summed before any is told; 0: each is told.

    Example:
      >>> gate = SyncGate(version=3)
      >>> gate.handle(StepsAsked([("w0", 1)]))
      [LetIn(steps=(('w0', 1),))]
      >>> gate.handle(ContributionsCame({("w0", 1): 8}))
      [Keep(steps=(('w0', 1),)), Tell(steps=(('w0', 1),), version=3, slots=(8,))]
      >>> gate.handle(StepsAsked([("w0", 2)]))  # until version 4
      []
    """

    def __init__(self, version: int, together: int = 0) -> None:
        self.version = version
        self._together = together
        self._deciding = False
        self._closed: JGError | None = None
        self._waiting: dict[Step, None] = {}
        self._inside: dict[Step, int] = {}  # at which version; nothing came yet
        self._contributed: dict[str, int] = {}
        # Of this version: what is kept, and what of it is untold.
        self._steps_taken: set[Step] = set()
        self._untold: dict[Step, int] = {}  # with their slots
        self._enough: int | None = None  # before the first decision
        self._tell_s = TELL_S

    def handle(self, event: Event) -> list[Instruction]:
        """Takes an event; returns what to do now."""
        match event:
            case ContributionsCame(slots):
                return self._take(slots)
            case StepsAsked(steps):
                return self._ask(steps)
            case StepsEnded(steps):
                for step in steps:
                    if self._inside.pop(step, None) is None:
                        self._waiting.pop(step, None)
                return []
            case _:
                return self._move_on(event)

    def _move_on(
        self, event: Decided | Voided | UpdateApplied | TellDue | Summed | Closed
    ) -> list[Instruction]:
        match event:
            case Decided(steps):
                return self._choose(steps)
            case Voided(step):
                self._contributed.pop(step[0], None)
                self._steps_taken.discard(step)
                return [Drop(step), *self._let_in(self._ready())]
            case UpdateApplied():
                return self._open()
            case TellDue() | Summed():
                untold = self._flush()
                if untold:  # the others are slow: who are late may wait as long again
                    self._tell_s = min(2 * self._tell_s, _MOST_S)
                return untold
            case Closed(error):
                return self._close(error)

    def _ask(self, steps: Sequence[Step]) -> list[Instruction]:
        if self._closed is not None:
            return [Refuse(step, self._closed) for step in steps]
        for step in steps:  # most often one, or a few
            self._waiting[step] = None
        return self._let_in(self._ready(steps))

    def _open(self) -> list[Instruction]:
        self._deciding = False
        self.version += 1
        # Nobody has contributed to this one.
        waiting, self._waiting = self._waiting, {}
        return self._let_in(tuple(waiting))

    def _ready(self, among: Sequence[Step] | None = None) -> tuple[Step, ...]:
        """Takes out those of waiting steps that may read."""
        if self._deciding:
            return ()
        version, contributed = self.version, self._contributed
        steps = self._waiting if among is None else among
        ready = tuple([s for s in steps if contributed.get(s[0], -1) < version])
        for step in ready:
            del self._waiting[step]
        return ready

    def _let_in(self, steps: tuple[Step, ...]) -> list[Instruction]:
        if not steps:
            return []
        self._inside.update(dict.fromkeys(steps, self.version))
        return [LetIn(steps)]

    def _take(self, slots: Mapping[Step, int]) -> list[Instruction]:
        inside = self._inside
        versions = [inside.pop(step, None) for step in slots]
        if versions.count(self.version) == len(versions):
            return self._take_of(self.version, slots)  # most often
        said: list[Instruction] = []
        # What is kept comes first. What is of no version is of an earlier life.
        there = {version for version in versions if version is not None}
        for version in sorted(there, reverse=True):
            both = zip(slots.items(), versions, strict=True)
            said += self._take_of(version, {s: n for (s, n), v in both if v == version})
        return said

    def _take_of(self, version: int, slots: Mapping[Step, int]) -> list[Instruction]:
        """Takes contributions of steps that were let in at one version."""
        for replica, _ in slots:
            self._contributed[replica] = version
        if self._closed is not None:
            return []  # nobody decides any more
        steps = tuple(slots)
        if version < self.version or self._deciding:
            return [Tell(steps, version, tuple(slots.values()))]
        is_first = not self._untold
        self._steps_taken.update(steps)
        self._untold.update(slots)
        if self._together:
            all_there = len(self._steps_taken) == self._together
            return [Keep(steps), *([Sum(version)] if all_there else [])]
        if self._is_enough():
            return [Keep(steps), *self._flush()]
        if is_first:
            return [Keep(steps), TellLater(self._tell_s)]
        return [Keep(steps)]

    def _is_enough(self) -> bool:
        if self._enough is None:
            return not self._inside
        return len(self._steps_taken) >= self._enough

    def _choose(self, steps: tuple[Step, ...]) -> list[Instruction]:
        untold = self._flush()
        self._deciding = True
        self._enough = len(steps)
        self._tell_s = TELL_S
        self._steps_taken.clear()
        return [*untold, Choose(steps)]

    def _close(self, error: JGError) -> list[Instruction]:
        self._closed = error
        self._untold.clear()
        waiting, self._waiting = self._waiting, {}
        return [Refuse(step, error) for step in waiting]

    def _flush(self) -> list[Instruction]:
        """Tells all that was not told yet."""
        untold, self._untold = self._untold, {}
        if not untold:
            return []
        return [Tell(tuple(untold), self.version, tuple(untold.values()))]
