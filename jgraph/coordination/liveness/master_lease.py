"""Master lease of a loop: it starts no step while its master does not answer.

It does not train unsupervised: after ``lease_s`` without an answer it begins no step,
and goes on as soon as there is one. What a master answers, it answers to the loop that
it knows: a pause loses nothing.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias, final

from jgraph.errors import JGError

LEASE_S: Final = 5.0
END_S: Final = 60.0
_AGAIN_S: Final = 0.5
_RENEWALS: Final = 4


@final
@dataclass(frozen=True, slots=True)
class Answered:
    """The master answered."""


@final
@dataclass(frozen=True, slots=True)
class Unanswered:
    """A question did not reach the master, or its answer did not come."""

    error: JGError


@final
@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing happened."""


Event: TypeAlias = Answered | Unanswered | TimePassed


@final
@dataclass(frozen=True, slots=True)
class Ask:
    """Ask, if only to hear whether the master is there."""


@final
@dataclass(frozen=True, slots=True)
class AskAgain:
    """Ask the same once more: that a silent master answers again shows only so."""

    after_s: float


@final
@dataclass(frozen=True, slots=True)
class Pause:
    """Begin no step."""


@final
@dataclass(frozen=True, slots=True)
class GoOn:
    """Begin steps again."""


@final
@dataclass(frozen=True, slots=True)
class GiveUp:
    """End with this error."""

    error: JGError


Instruction: TypeAlias = Ask | AskAgain | Pause | GoOn | GiveUp


@final
class LeaseTracker:
    """State machine of one loop.

    Args:
      now: when it begins, in seconds of a clock that only goes forward.
      lease_s: how long an answer allows to go on.
      end_s: after so long without one, the loop ends.

    Example:
      >>> supervision = LeaseTracker(now=0.0)
      >>> supervision.handle(TimePassed(), now=5.0)
      [Pause(), Ask()]
      >>> supervision.handle(Answered(), now=6.0)
      [GoOn()]
    """

    def __init__(
        self, now: float, lease_s: float = LEASE_S, end_s: float = END_S
    ) -> None:
        self._heard_at = now
        self._lease_s = lease_s
        self._end_s = end_s
        self._paused = False
        self.look_every_s = lease_s / _RENEWALS
        """How often time passes."""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Takes an event; returns what to do now."""
        silent_s = now - self._heard_at
        match event:
            case Answered():
                self._heard_at = now
                paused, self._paused = self._paused, False
                return [GoOn()] if paused else []
            case Unanswered(error) if silent_s >= self._end_s:
                return [GiveUp(error)]
            case Unanswered():
                return [*self._pause(silent_s), AskAgain(_AGAIN_S)]
            case TimePassed():
                asks = silent_s >= self.look_every_s
                return [*self._pause(silent_s), *([Ask()] if asks else [])]

    def _pause(self, silent_s: float) -> list[Instruction]:
        if self._paused or silent_s < self._lease_s:
            return []
        self._paused = True
        return [Pause()]
