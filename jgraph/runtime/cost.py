"""How long work takes, and whether it is worth a thread: learnt by running it."""

from dataclasses import dataclass
from typing import Final, final

_LONG_S: Final = 0.02
ALWAYS_AT_ONCE_S: Final = 150e-6
"""Work known to take less never goes to a thread."""
_NEVER_AT_ONCE_S: Final = 500e-6


@final
@dataclass(slots=True)
class Cost:
    """How long a piece of work takes, learnt from running it.

    Attributes:
      seconds: a recent time; None until it has run.
      kind: what it counts as in a task's ``busy`` seconds.
    """

    seconds: float | None = None
    kind: str = "other"

    def learn(self, seconds: float) -> None:
        """Takes a new measurement: slower counts soon, faster by and by.

        One slow run among fast ones is the machine's doing, not the work's: it counts
        a quarter more than before. What took long by any measure counts at once.
        """
        if self.seconds is None or seconds > _LONG_S:
            self.seconds = seconds
        elif seconds > self.seconds:
            self.seconds = min(seconds, 1.25 * self.seconds)
        else:
            self.seconds += (seconds - self.seconds) / 8


def runs_at_once(work: Cost, hand_over: Cost) -> bool:
    """Whether to run work here rather than in a thread.

    Args:
      work: the work; it goes to a thread while it is not known.
      hand_over: handing some to a thread and its result back. It is slow on a busy
        machine, where threads wait for a core.

    Example:
      >>> runs_at_once(Cost(100e-6), hand_over=Cost(80e-6))
      True
      >>> runs_at_once(Cost(300e-6), hand_over=Cost(80e-6))
      False
      >>> runs_at_once(Cost(300e-6), hand_over=Cost(2e-3))
      True
    """
    if work.seconds is None:
        return False
    limit = max(hand_over.seconds or 0.0, ALWAYS_AT_ONCE_S)
    return work.seconds < min(limit, _NEVER_AT_ONCE_S)
