"""Rescale of a run: its variables move to more parameter servers, or to fewer.

    steady --Wanted--> preparing: Prepare, and copy rows, while training goes on
    preparing --Prepared--> fencing: Fence, so that all loops end in order
    fencing --Rested--> moving: Move, copies beside what is there
    moving --Moved--> switching: Switch, which is journalled: the point of no return
    switching --Switched--> retiring: GoOn, and Retire what was left behind meanwhile
    retiring --Retired--> steady

Whatever goes wrong before the switch leaves the run as it was: what was copied is
dropped, and loops of the arrangement of before begin again. An arrangement is the
number of its ps, always the first ones of the cluster.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, final

from jgraph.errors import JGError

AGAIN_S: Final = 5.0
"""Until a rescale that could not be is tried again; then twice as long each time."""
MOST_AGAIN_S: Final = 300.0
LEAST_BYTES: Final = 4 << 20
"""So many bytes are copied under the fence in a few milliseconds."""
MOST_ROUNDS: Final = 6


@final
@dataclass(frozen=True, slots=True)
class Wanted:
    """The run is to have so many ps."""

    ps: int


@final
@dataclass(frozen=True, slots=True)
class Prepared:
    """All tasks have the programs for so many ps, and most rows are copied."""


@final
@dataclass(frozen=True, slots=True)
class NotPrepared:
    """A task could not be given them, or rows could not be copied."""

    error: JGError


@final
@dataclass(frozen=True, slots=True)
class Rested:
    """No loop runs, and no step changes anything."""


@final
@dataclass(frozen=True, slots=True)
class Moved:
    """Whoever is to have a variable has it, and so has who had it."""


@final
@dataclass(frozen=True, slots=True)
class NotMoved:
    """A variable could not be copied."""

    error: JGError


@final
@dataclass(frozen=True, slots=True)
class Switched:
    """Each ps was told of the switch, and it is journalled."""


@final
@dataclass(frozen=True, slots=True)
class Retired:
    """What was left behind is dropped."""


@final
@dataclass(frozen=True, slots=True)
class StateLost:
    """A ps is gone, and what it held: the run goes back."""


@final
@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing happened."""


Event: TypeAlias = (
    Wanted
    | Prepared
    | NotPrepared
    | Rested
    | Moved
    | NotMoved
    | Switched
    | Retired
    | StateLost
    | TimePassed
)


@final
@dataclass(frozen=True, slots=True)
class Prepare:
    """Give all tasks the programs for so many ps."""

    ps: int


@final
@dataclass(frozen=True, slots=True)
class Fence:
    """Let all loops end in order."""


@final
@dataclass(frozen=True, slots=True)
class Move:
    """Copy what lies elsewhere with so many ps."""

    ps: int


@final
@dataclass(frozen=True, slots=True)
class Switch:
    """Journal that the run has so many ps."""

    ps: int


@final
@dataclass(frozen=True, slots=True)
class Retire:
    """Drop what the variables left behind; let ps go that are not needed."""


@final
@dataclass(frozen=True, slots=True)
class Drop:
    """Drop the programs, and the copies, for so many ps, and say why."""

    ps: int
    why: str


@final
@dataclass(frozen=True, slots=True)
class GoOn:
    """Begin loops again."""


@final
@dataclass(frozen=True, slots=True)
class Tell:
    """Say why the run stays as it is for now."""

    error: JGError


Instruction: TypeAlias = Prepare | Fence | Move | Switch | Retire | Drop | GoOn | Tell


def wanted_ps(
    now: int, least: int, most: int, stays: Mapping[int, bool]
) -> tuple[int, bool]:
    """Returns how many ps a run is to have, and whether the cluster wants it so.

    Args:
      now: how many it has.
      least: how many it may have.
      most: likewise.
      stays: of each ps of the cluster, by index, whether it was not told to leave.

    Example:
      >>> wanted_ps(2, 1, 4, {0: True, 1: True, 2: True})
      (3, True)
      >>> wanted_ps(2, 1, 4, {0: True, 1: False}), wanted_ps(2, 2, 4, {0: True})
      ((1, True), (2, True))
    """
    if any(index not in stays for index in range(now)):
        return now, True  # one is lost, and what it holds is to come back first
    count = next(n for n in itertools.count() if not stays.get(n, False))
    bounded = min(max(count, least), most)
    return bounded, bounded == min(count, most)


def goes_on(remainders: Sequence[int]) -> bool:
    """Whether another round of copying makes what is left for the fence much smaller.

    Args:
      remainders: bytes that had changed by the end of each round so far.

    Example:
      >>> goes_on([100 << 20]), goes_on([100 << 20, 90 << 20]), goes_on([1 << 20])
      (True, False, False)
    """
    is_small = remainders[-1] <= LEAST_BYTES or len(remainders) >= MOST_ROUNDS
    if is_small or len(remainders) == 1:
        return not is_small
    return remainders[-1] < remainders[-2] / 2


def reason(error: JGError) -> str:
    """Returns why a rescale cannot be, without what becomes of the run."""
    return str(error.details.get("why", error.message)).rstrip(".")


@final
class Rescale:
    """State machine of the number of ps of one run.

    Args:
      ps: how many it has.

    Attributes:
      ps: the same; after a switch the new number.

    Example:
      >>> rescale = Rescale(1)
      >>> rescale.handle(Wanted(2), 0.0)
      [Prepare(ps=2)]
      >>> rescale.handle(Prepared(), 1.0)
      [Fence()]
      >>> rescale.handle(Rested(), 1.1)
      [Move(ps=2)]
      >>> rescale.handle(Moved(), 1.2)
      [Switch(ps=2)]
      >>> rescale.handle(Switched(), 1.2), rescale.ps
      ([GoOn(), Retire()], 2)
      >>> rescale.handle(Retired(), 1.3), rescale.is_steady
      ([], True)
    """

    def __init__(self, ps: int) -> None:
        self.ps = ps
        self._wanted = ps
        self._state = "steady"  # preparing | fencing | moving | switching | retiring
        self._to = ps
        self._again_s, self._wait_s = 0.0, AGAIN_S

    @property
    def is_due(self) -> bool:
        """Whether a rescale waits for the end of all loops."""
        return self._state == "fencing"

    @property
    def is_steady(self) -> bool:
        """Whether the run has as many ps as it is to have, and nothing is under way."""
        return self._state == "steady" and self._wanted == self.ps

    @property
    def wanted(self) -> int:
        """How many it is to have."""
        return self._wanted

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Takes an event at time ``now`` (seconds); returns what to do."""
        match event:
            case Wanted(ps):
                return self._want(ps, now)
            case Prepared() if self._state == "preparing":
                self._state = "fencing"
                return [Fence()]
            case NotPrepared(error) if self._state == "preparing":
                return [*self._give_up(now, reason(error)), Tell(error)]
            case Rested() if self._state == "fencing":
                return self._rested(now)
            case NotMoved(error) if self._state == "moving":
                return [*self._give_up(now, reason(error)), Tell(error), GoOn()]
            case Moved() if self._state == "moving":
                return self._moved()
            case Switched() if self._state == "switching":
                self._state, self._wait_s = "retiring", AGAIN_S
                return [GoOn(), Retire()]
            case StateLost() if self._state in {"preparing", "fencing"}:
                return self._give_up(now, "a ps was lost, with what it held")
            case TimePassed() | Retired():
                return self._pass(event, now)
        return []

    def _want(self, ps: int, now: float) -> list[Instruction]:
        """Takes how many ps there are to be; what is prepared for others is dropped."""
        if ps == self._wanted:
            return self._begin(now)
        self._wanted, self._wait_s = ps, AGAIN_S
        self._again_s = now
        if self._state == "preparing":
            self._state = "steady"
            return [self._drop_unwanted(), *self._begin(now)]
        return self._begin(now)

    def _pass(self, event: TimePassed | Retired, now: float) -> list[Instruction]:
        if isinstance(event, Retired) and self._state == "retiring":
            self._state = "steady"
        return self._begin(now)

    def _begin(self, now: float) -> list[Instruction]:
        due = self._wanted != self.ps and now >= self._again_s
        if self._state != "steady" or not due:
            return []
        self._state, self._to = "preparing", self._wanted
        return [Prepare(self._to)]

    def _rested(self, now: float) -> list[Instruction]:
        if self._wanted != self._to:  # that has changed meanwhile
            self._state = "steady"
            return [self._drop_unwanted(), GoOn(), *self._begin(now)]
        self._state = "moving"
        return [Move(self._to)]

    def _moved(self) -> list[Instruction]:
        """All is copied: switches, unless it is not wanted any more."""
        if self._wanted == self.ps:
            self._state = "steady"
            return [self._drop_unwanted(), GoOn()]
        self._state, self.ps = "switching", self._to
        return [Switch(self._to)]

    def _drop_unwanted(self) -> Drop:
        return Drop(self._to, f"there are to be {self._wanted} ps now")

    def _give_up(self, now: float, why: str) -> list[Instruction]:
        self._state = "steady"
        self._again_s = now + self._wait_s
        self._wait_s = min(2 * self._wait_s, MOST_AGAIN_S)
        return [Drop(self._to, why)]
