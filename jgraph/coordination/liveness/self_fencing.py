"""Self-fencing: after a pause, a process checks that its task was not restarted.

A process that was stopped, or whose machine slept, cannot know whether its task was
given up meanwhile and started again elsewhere. So before it says or writes anything it
asks who is at the address of its task: whoever answers there has the place.
"""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

LOOK_EVERY_S: Final = 1.0
"""How often a process notes that it is awake."""
DOUBT_S: Final = 5.0
"""Nobody is given up, and started again elsewhere, within so little time."""
PATIENCE_S: Final = 5.0
_AGAIN_S: Final = 0.2


@final
@dataclass(frozen=True, slots=True)
class Awake:
    """The process runs; it says so time and again."""


@final
@dataclass(frozen=True, slots=True)
class FoundSelf:
    """This process answers at the address of its task."""


@final
@dataclass(frozen=True, slots=True)
class FoundOther:
    """Another process of the task does."""


@final
@dataclass(frozen=True, slots=True)
class FoundNobody:
    """None of the task's does."""


Event: TypeAlias = Awake | FoundSelf | FoundOther | FoundNobody


@final
@dataclass(frozen=True, slots=True)
class Ask:
    """Ask who is there now; what was asked before is of no use."""


@final
@dataclass(frozen=True, slots=True)
class AskAgain:
    """Ask once more."""

    after_s: float


@final
@dataclass(frozen=True, slots=True)
class GoOn:
    """Do what came meanwhile."""


@final
@dataclass(frozen=True, slots=True)
class Leave:
    """Another process has the place: do nothing more, and end."""

    away_s: float


Instruction: TypeAlias = Ask | AskAgain | GoOn | Leave


@final
class SelfFence:
    """State machine of one process.

    Args:
      now: when it begins, in seconds of a clock that goes on while the process is
        stopped.

    Attributes:
      state: ``"doubt"``: nothing may be said or written until it is known.

    Example:
      >>> fence = SelfFence(now=0.0)
      >>> fence.handle(Awake(), now=1.0), fence.is_sure(now=2.0)
      ([], True)
      >>> fence.is_sure(now=61.0), fence.handle(Awake(), now=61.0)
      (False, [Ask()])
      >>> fence.handle(FoundOther(), now=61.1)
      [Leave(away_s=60.0)]
    """

    def __init__(self, now: float) -> None:
        self.state: Literal["sure", "doubt", "left"] = "sure"
        self._awake_at = now
        self._doubted_at = now
        self._away_s = 0.0

    def is_sure(self, now: float) -> bool:
        """Whether it has the place at ``now``, also if nothing happened since then."""
        return self.state == "sure" and now - self._awake_at < DOUBT_S

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Takes an event; returns what to do now."""
        away_s, self._awake_at = now - self._awake_at, now
        if self.state == "left":
            return []
        if away_s >= DOUBT_S:  # also after an answer: it may be of before
            self.state, self._doubted_at, self._away_s = "doubt", now, away_s
            return [Ask()]
        if self.state == "sure":
            return []
        match event:
            case FoundSelf():
                return self._go_on()
            case FoundOther():
                self.state = "left"
                return [Leave(self._away_s)]
            case FoundNobody() if now - self._doubted_at < PATIENCE_S:
                return [AskAgain(_AGAIN_S)]
            case FoundNobody():  # who knows another process refuses this one
                return self._go_on()
            case Awake():
                return []

    def _go_on(self) -> list[Instruction]:
        self.state = "sure"
        return [GoOn()]
