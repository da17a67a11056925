"""Synchronous gate of one ps; see ``aggregation`` for the whole.

The arbiter is told of contributions in sets: it can decide nothing before this ps has
as many as the last update took, so those that come earlier wait for them, or a while.
Before the first update they wait for all that were let in.

Of many replicas, what came in one turn of the event loop is one event, so that each
costs a look into a table and not a call. It is taken as if each had come alone.

Where contributions are summed together with other tasks, see ``group_member``, none is
told before the sum is here. So what is decided has been summed everywhere.

With a ``ReadLine`` only some of those who may read do so at a time; the others wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, TypeAlias, final

from jgraph.coordination.sync.aggregation import Step
from jgraph.coordination.sync.read_line import STUCK_S, ReadLine
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
class TurnEnded:
    """All that came in one turn: contributions, each for its slot, and then asks."""

    contributed: tuple[Step, ...]
    slots: tuple[int, ...]
    asked: tuple[Step, ...]


@final
@dataclass(frozen=True, slots=True)
class StepEnded:
    """A step is over here, or was given up; of one that is kept it says nothing new."""

    step: Step


@final
@dataclass(frozen=True, slots=True)
class Decided:
    """The arbiter chose what these steps contributed; they are of this version."""

    steps: Sequence[Step]


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
class ReadSent:
    """All that a step reads here has left."""

    step: Step


@final
@dataclass(frozen=True, slots=True)
class TurnDue:
    """Who waits for others to have read has waited long enough; see ``TurnLater``."""


@final
@dataclass(frozen=True, slots=True)
class Summed:
    """What all contributed is summed here; see ``Sum``."""


Event: TypeAlias = (
    StepAsked
    | ContributionCame
    | TurnEnded
    | StepEnded
    | Decided
    | Voided
    | UpdateApplied
    | Closed
    | TellDue
    | ReadSent
    | TurnDue
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
    """Keep the contribution that came just now."""


@final
@dataclass(frozen=True, slots=True)
class KeepOf:
    """Of what came in the turn keep what these steps contributed, and no other."""

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

    steps: Sequence[Step]


@final
@dataclass(frozen=True, slots=True)
class TurnLater:
    """Come back with ``TurnDue`` after a while: steps wait for others to have read."""

    after_s: float


@final
@dataclass(frozen=True, slots=True)
class Sum:
    """Sum what all contributed to a version; come back with ``Summed``."""

    version: int


Instruction: TypeAlias = (
    LetIn | Refuse | Keep | KeepOf | Drop | Tell | TellLater | TurnLater | Choose | Sum
)

_REPLICA: Final = itemgetter(0)
# Most answers are one of these two: an update has three events of each replica.
_NOTHING: Final[Sequence[Instruction]] = ()
_KEEP: Final[Sequence[Instruction]] = (Keep(),)


@final
class SyncGate:
    """State machine of the gate of one ps.

    Args:
      version: updates applied so far.
      together: how many contributions are summed before any is told; 0: each is told.
      line: of those who read in turn; None: all read as soon as they may.

    Example:
      >>> gate = SyncGate(version=3)
      >>> gate.handle(StepAsked(("w0", 1)))
      [LetIn(steps=(('w0', 1),))]
      >>> gate.handle(ContributionCame(("w0", 1), slot=8))
      [Keep(), Tell(steps=(('w0', 1),), version=3, slots=(8,))]
      >>> list(gate.handle(StepAsked(("w0", 2))))  # until version 4
      []
    """

    def __init__(
        self, version: int, together: int = 0, line: ReadLine | None = None
    ) -> None:
        self.version = version
        self._together = together
        self._line = line
        self._is_awaited = False  # that somebody has read
        self._deciding = False
        self._closed: JGError | None = None
        # Steps of which nothing came yet, and at which version each reads: one that
        # reads at a later one than that of now waits for it.
        self._reads: dict[Step, int] = {}
        self._contributed = set[str]()  # who did, to this version
        # Of this version: what is kept and told, and what is untold, with its slots.
        self._steps_told: list[Step] = []
        self._untold: list[Step] = []
        self._slots: list[int] = []
        self._enough: int | None = None  # before the first decision
        self._inside = 0  # until then: how many steps read that did not contribute
        self._tell_at = together  # so many untold are enough, once it is known
        self._tell_s = TELL_S

    def handle(self, event: Event) -> Sequence[Instruction]:
        """Takes an event; returns what to do now."""
        if self._line is not None:
            return self._handle_in_turn(self._line, event)
        return self._handle(event)

    def _handle_in_turn(self, line: ReadLine, event: Event) -> Sequence[Instruction]:
        """Does what ``_handle`` does, and lets those in whose turn it is then."""
        match event:
            case ReadSent(step):
                return self._let_in(line.leave(step))
            case TurnDue():
                self._is_awaited = False
                return self._let_in(line.go_past())
            case ContributionCame(step) | StepEnded(step):
                over: tuple[Step, ...] = (step,)
            case TurnEnded(steps):
                over = steps
            case _:
                over = ()
        said = self._handle(event)
        turns = [one for step in over for one in line.leave(step)]
        return [*said, *self._let_in(tuple(turns))]

    def _handle(self, event: Event) -> Sequence[Instruction]:
        # What comes of each replica at every update is first.
        if isinstance(event, ContributionCame):
            return self._take(event.step, event.slot)
        if isinstance(event, StepAsked):
            return self._ask(event.step)
        if isinstance(event, TurnEnded):
            return self._take_turn(event)
        if isinstance(event, StepEnded):
            version = self._reads.pop(event.step, None)
            if version is not None and version <= self.version:
                self._inside -= 1
            return _NOTHING
        return self._move_on(event)

    def _move_on(
        self,
        event: Decided
        | Voided
        | UpdateApplied
        | TellDue
        | ReadSent
        | TurnDue
        | Summed
        | Closed,
    ) -> Sequence[Instruction]:
        match event:
            case Decided(steps):
                return self._choose(steps)
            case Voided(step):
                return [Drop(step), *self._void(step)]
            case UpdateApplied():
                self._deciding = False
                self.version += 1
                self._contributed.clear()
                here, new = self._reads, self.version
                return self._take_turns([s for s, at in here.items() if at == new])
            case TellDue() | Summed():
                untold = self._flush()
                if untold:  # the others are slow: who are late may wait as long again
                    self._tell_s = min(2 * self._tell_s, _MOST_S)
                return untold
            case Closed(error):
                return self._close(error)
            case ReadSent() | TurnDue():
                return _NOTHING  # there is no line

    def _ask(self, step: Step) -> Sequence[Instruction]:
        if self._closed is not None:
            return [Refuse(step, self._closed)]
        version = self.version
        if self._deciding or step[0] in self._contributed:
            self._reads[step] = version + 1
            return _NOTHING
        return self._open((step,))

    def _ask_all(self, steps: Sequence[Step]) -> Sequence[Instruction]:
        """Takes what ``_ask`` does, of many."""
        if self._closed is not None:
            return [Refuse(step, self._closed) for step in steps]
        contributed, reads, following = self._contributed, self._reads, self.version + 1
        for step in steps:
            reads[step] = following
        if self._deciding or contributed.issuperset(map(_REPLICA, steps)):
            return _NOTHING
        return self._open([step for step in steps if step[0] not in contributed])

    def _open(self, steps: Sequence[Step]) -> Sequence[Instruction]:
        """Lets steps read at the version of now."""
        self._inside += len(steps)
        self._reads.update(dict.fromkeys(steps, self.version))
        return self._take_turns(steps)

    def _take_turns(self, steps: Sequence[Step]) -> Sequence[Instruction]:
        """Lets steps in that may read: now, or when it is their turn."""
        if self._line is not None:
            steps = self._line.join(steps, self.version)
        return self._let_in(tuple(steps))

    def _let_in(self, steps: tuple[Step, ...]) -> Sequence[Instruction]:
        said: Sequence[Instruction] = [LetIn(steps)] if steps else _NOTHING
        waits = self._line is not None and not self._line.is_empty
        if not waits or self._is_awaited:
            return said
        self._is_awaited = True
        return [*said, TurnLater(STUCK_S)]

    def _leave_line(self) -> Sequence[Step]:
        """Returns who waits for a turn, and lets nobody wait any more."""
        return () if self._line is None else self._line.clear()

    def _void(self, step: Step) -> Sequence[Instruction]:
        """Lets a replica contribute again."""
        replica = step[0]
        self._contributed.discard(replica)
        if step in self._steps_told:
            self._steps_told.remove(step)
        self._aim()
        if self._deciding:
            return _NOTHING
        return self._open([one for one in self._waiting if one[0] == replica])

    @property
    def _waiting(self) -> list[Step]:
        return [step for step, at in self._reads.items() if at > self.version]

    def _take(self, step: Step, slot: int) -> Sequence[Instruction]:
        version = self._reads.pop(step, None)
        if version != self.version or self._deciding or self._closed is not None:
            return self._take_late(step, slot, version)
        self._contributed.add(step[0])
        self._untold.append(step)
        self._slots.append(slot)
        untold = len(self._slots)
        if 1 < untold < self._tell_at:
            return _KEEP
        return [Keep(), *self._say(untold)]

    def _take_turn(self, turn: TurnEnded) -> Sequence[Instruction]:
        """Takes many at once; who may read does before it is told who contributed."""
        steps, reads = turn.contributed, self._reads
        takes = not (self._deciding or self._together) and self._closed is None
        read_at = [reads.pop(step, None) for step in steps]
        if not takes or read_at.count(self.version) < len(steps):
            before = zip(steps, read_at, strict=True)
            reads.update((step, at) for step, at in before if at is not None)
            return self._take_each(turn)
        self._contributed.update(map(_REPLICA, steps))
        self._untold += steps
        self._slots += turn.slots
        said = self._say(len(self._slots), len(steps))
        return [KeepOf(steps), *self._ask_all(turn.asked), *said]

    def _take_each(self, turn: TurnEnded) -> Sequence[Instruction]:
        usable, said = list[Step](), list[Instruction]()
        for step, slot in zip(turn.contributed, turn.slots, strict=True):
            for one in self._take(step, slot):
                if isinstance(one, Keep):
                    usable.append(step)
                else:
                    said.append(one)
        return [KeepOf(tuple(usable)), *self._ask_all(turn.asked), *said]

    def _take_late(
        self, step: Step, slot: int, version: int | None
    ) -> Sequence[Instruction]:
        """Takes a contribution of which nothing is kept."""
        if version is None:
            return _NOTHING  # of an earlier life of this gate
        if version > self.version:
            self._reads[step] = version  # it still waits
            return _NOTHING
        if version == self.version:
            self._contributed.add(step[0])
        if self._closed is not None:
            return _NOTHING  # nobody decides any more
        return [Tell((step,), version, (slot,))]

    def _say(self, untold: int, new: int = 1) -> Sequence[Instruction]:
        """Returns what to say of so many that are untold, the last of them new."""
        if self._together:
            return [Sum(self.version)] if untold == self._tell_at else _NOTHING
        is_enough = untold >= self._tell_at
        if self._enough is None:
            self._inside -= new
            is_enough = not self._inside
        if is_enough:
            return self._flush()
        return _NOTHING if untold > new else [TellLater(self._tell_s)]

    def _choose(self, steps: Sequence[Step]) -> Sequence[Instruction]:
        untold = self._flush()
        self._deciding = True
        # What they would read now is not the newest any more.
        self._reads.update(dict.fromkeys(self._leave_line(), self.version + 1))
        self._enough = len(steps)
        self._tell_s = TELL_S
        self._steps_told.clear()
        self._aim()
        return [*untold, Choose(steps)]

    def _close(self, error: JGError) -> Sequence[Instruction]:
        self._closed = error
        self._untold, self._slots = [], []
        waiting = [*self._waiting, *self._leave_line()]
        for step in waiting:
            del self._reads[step]
        return [Refuse(step, error) for step in waiting]

    def _flush(self) -> Sequence[Instruction]:
        """Tells all that was not told yet."""
        if not self._untold:
            return _NOTHING
        tell = Tell(tuple(self._untold), self.version, tuple(self._slots))
        self._steps_told += self._untold
        self._untold, self._slots = [], []
        self._aim()
        return [tell]

    def _aim(self) -> None:
        self._tell_at = (self._together or self._enough or 0) - len(self._steps_told)
