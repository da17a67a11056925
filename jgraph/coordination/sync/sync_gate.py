"""Synchronous gate of one ps; see ``aggregation`` for the whole.

The arbiter is told of contributions in sets: it can decide nothing before this ps has
as many as the last update took, so those that come earlier wait for them, or a while.
Before the first update they wait for all that were let in.

Where contributions are summed together with other tasks, see ``group_member``, none is
told before the sum is here. So what is decided has been summed everywhere.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias, final

from jgraph.coordination.sync.aggregation import Step
from jgraph.errors import JGError

TELL_S: Final = 0.02
"""How long the first contribution of an update waits to be told with others."""
_MOST_S: Final = 1.0


@final
@dataclass(frozen=True, slots=True)
class StepAsked:
    """A replica's step wants to read here."""

    step: Step


@final
@dataclass(frozen=True, slots=True)
class ContributionCame:
    """A step's contribution for a data slot is here."""

    step: Step
    slot: int


@final
@dataclass(frozen=True, slots=True)
class StepEnded:
    """A step is over here, or was given up."""

    step: Step


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
    StepAsked
    | ContributionCame
    | StepEnded
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
    """Keep what the step contributed."""

    step: Step


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
      >>> gate.handle(StepAsked(("w0", 1)))
      [LetIn(steps=(('w0', 1),))]
      >>> gate.handle(ContributionCame(("w0", 1), slot=8))
      [Keep(step=('w0', 1)), Tell(steps=(('w0', 1),), version=3, slots=(8,))]
      >>> gate.handle(StepAsked(("w0", 2)))  # until version 4
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
        # Three of each replica at every update come first.
        if isinstance(event, ContributionCame):
            return self._take(event.step, event.slot)
        if isinstance(event, StepEnded):
            if self._inside.pop(event.step, None) is None:
                self._waiting.pop(event.step, None)
            return []
        if isinstance(event, StepAsked):
            return self._ask(event.step)
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
                return [Drop(step), *self._open()]
            case UpdateApplied():
                self._deciding = False
                self.version += 1
                return self._open()
            case TellDue() | Summed():
                untold = self._flush()
                if untold:  # the others are slow: who are late may wait as long again
                    self._tell_s = min(2 * self._tell_s, _MOST_S)
                return untold
            case Closed(error):
                return self._close(error)

    def _ask(self, step: Step) -> list[Instruction]:
        if self._closed is not None:
            return [Refuse(step, self._closed)]
        if self._deciding or not self._may_read(step):
            self._waiting[step] = None
            return []
        return self._let_in((step,))

    def _open(self) -> list[Instruction]:
        if self._deciding:
            return []
        ready = tuple(filter(self._may_read, self._waiting))
        if len(ready) == len(self._waiting):
            self._waiting.clear()
        for step in ready if self._waiting else ():
            del self._waiting[step]
        return self._let_in(ready)

    def _may_read(self, step: Step) -> bool:
        return self._contributed.get(step[0], -1) < self.version

    def _let_in(self, steps: tuple[Step, ...]) -> list[Instruction]:
        if not steps:
            return []
        self._inside.update(dict.fromkeys(steps, self.version))
        return [LetIn(steps)]

    def _take(self, step: Step, slot: int) -> list[Instruction]:
        version = self._inside.pop(step, None)
        if version is None:
            return []  # of an earlier life of this gate
        self._contributed[step[0]] = version
        if self._closed is not None:
            return []  # nobody decides any more
        if version < self.version or self._deciding:
            return [Tell((step,), version, (slot,))]
        self._steps_taken.add(step)
        self._untold[step] = slot
        if self._together:
            all_there = len(self._steps_taken) == self._together
            return [Keep(step), *([Sum(version)] if all_there else [])]
        if self._is_enough():
            return [Keep(step), *self._flush()]
        if len(self._untold) > 1:
            return [Keep(step)]
        return [Keep(step), TellLater(self._tell_s)]

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
