"""Halts of asynchronous training: loops pause together, so that a run can be saved.

Each worker tells after some steps how many of its batches are applied. Once a multiple
of ``every`` is passed, all are asked to halt: they begin no more steps, and say what is
applied and how many steps are still under way. These are not waited for: a worker goes
on computing while the run is saved, and only what is under way, two steps per worker at
most and one more with ``prefetch``, may be in the state without being in the position
of the data, or on some ps and not on others. Then all go on.

In synchronous training nothing is under way between two updates, and the arbiter halts
by itself; see ``aggregation``.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias, final

from jgraph.coordination.step.replica_loop import UNACKNOWLEDGED

_QUICK_S: Final = 3.0
_PATIENCE_S: Final = 10.0
_TOLD: Final = 8
"""So often, between two saves, a run is known to be where it is."""


@final
@dataclass(frozen=True, slots=True)
class LoopBegan:
    """A loop that trains begins, and has at most so many steps under way."""

    loop: str
    at_most: int = UNACKNOWLEDGED


@final
@dataclass(frozen=True, slots=True)
class Told:
    """``done`` batches of a loop are applied, since it began."""

    loop: str
    done: int


@final
@dataclass(frozen=True, slots=True)
class LoopHalted:
    """A loop begins no more steps, as order ``number`` says; ``in_flight`` it has."""

    loop: str
    number: int
    in_flight: int


@final
@dataclass(frozen=True, slots=True)
class LoopOver:
    """A loop has ended, or its worker was lost."""

    loop: str


@final
@dataclass(frozen=True, slots=True)
class Saved:
    """What is to be saved while loops halt by order ``number`` is kept, or that failed.

    If no ``GoOn`` follows, the loops did not stand still all the time.
    """

    number: int


Event: TypeAlias = LoopBegan | Told | LoopHalted | LoopOver | Saved


@final
@dataclass(frozen=True, slots=True)
class Halt:
    """Ask these loops to halt."""

    number: int
    loops: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class Save:
    """Save the run; ``in_flight`` batches may be trained on twice if it is restored."""

    number: int
    loops: tuple[str, ...]
    in_flight: int


@final
@dataclass(frozen=True, slots=True)
class GoOn:
    """Let these loops go on."""

    number: int
    loops: tuple[str, ...]


Instruction: TypeAlias = Halt | Save | GoOn


@final
class Cuts:
    """State machine of the saves of one run.

    Args:
      every: save at the first moment after each multiple of so many updates.
      also: likewise after each multiple of these.
      first: updates before the run.
      end: updates at which it ends; there it is saved when all loops have ended.

    Example:
      >>> cuts = Cuts(every=10, first=0, end=100)
      >>> cuts.handle(LoopBegan("a")), cuts.handle(Told("a", 9))
      ([], [])
      >>> cuts.handle(Told("a", 11))
      [Halt(number=1, loops=('a',))]
      >>> cuts.handle(LoopHalted("a", 1, in_flight=2))
      [Save(number=1, loops=('a',), in_flight=2)]
      >>> cuts.handle(Saved(1))
      [GoOn(number=1, loops=('a',))]
    """

    def __init__(
        self, *, every: int, first: int, end: int, also: Iterable[int] = ()
    ) -> None:
        self._multiples = (every, *also)
        self._first = self._last = self._due_at = first
        self._end = end
        self._done: dict[str, int] = {}
        self._running: dict[str, int] = {}
        self._number = 0
        self._asked: tuple[str, ...] = ()
        self._halted: dict[str, int] = {}
        self._saving = False

    def handle(self, event: Event) -> list[Instruction]:
        """Takes an event; returns what to do now."""
        match event:
            case LoopBegan(loop, at_most):
                self._running[loop] = at_most
                return self._go_on()  # it does not stand still: the next try is soon
            case Told(loop, done):
                self._done[loop] = max(done, self._done.get(loop, 0))
                return self._halt_if_due()
            case LoopHalted(loop, number, in_flight):
                if number != self._number or loop not in self._asked:
                    return [GoOn(number, (loop,))]  # it was asked too late
                self._halted[loop] = in_flight
            case LoopOver(loop):
                at_most = self._running.pop(loop, 0)
                if loop in self._asked:
                    self._halted.setdefault(loop, at_most)
            case Saved(number):  # else they went on, and halt anew
                return self._go_on() if number == self._number else []
        return self._save_if_halted()

    def _halt_if_due(self) -> list[Instruction]:
        now = self._first + sum(self._done.values())
        passed = any(now // n > self._last // n for n in self._multiples)
        if not passed or self._asked or now >= self._end or not self._running:
            return []
        self._due_at = now
        self._number += 1
        self._asked = tuple(self._running)
        return [Halt(self._number, self._asked)]

    def _save_if_halted(self) -> list[Instruction]:
        halted = tuple(loop for loop in self._asked if loop in self._running)
        if self._saving or not halted or not self._halted.keys() >= set(halted):
            return [] if halted else self._go_on()
        self._saving, self._last = True, self._due_at
        # What a lost worker had under way counts, said or not: it may be applied.
        return [Save(self._number, halted, sum(self._halted.values()))]

    def _go_on(self) -> list[Instruction]:
        asked = tuple(loop for loop in self._asked if loop in self._running)
        self._asked, self._halted, self._saving = (), {}, False
        return [GoOn(self._number, asked)] if asked else []


def tell_every(every: int, workers: int) -> int:
    """Returns after how many steps each worker says how many are applied.

    So few that a run is known to have passed a multiple within an eighth of it.

    Example:
      >>> tell_every(100, 2), tell_every(1, 2)
      (6, 1)
    """
    return max(1, every // (_TOLD * workers))


def patience_s(last_s: float | None) -> float:
    """Returns how long a save that is due waits for the one before.

    If saves are quick, each multiple is saved; if not, training does not wait for the
    disk, and those that pass meanwhile are left out.

    Args:
      last_s: how long the newest took that is over; None: there is none.

    Example:
      >>> patience_s(None), patience_s(0.2), patience_s(60.0)
      (10.0, 10.0, 0.0)
    """
    return 0.0 if last_s is not None and last_s > _QUICK_S else _PATIENCE_S
