"""Learned cost of node work: decides if it runs inline or in a thread."""

import os
from dataclasses import dataclass
from math import nan
from typing import Final, final

_LONG_S: Final = 0.02
_SHRINKS: Final = 0.98
_ALWAYS_AT_ONCE_S: Final = 150e-6
_NEVER_AT_ONCE_S: Final = 500e-6
FEW_CORES: Final = 4
_ALWAYS_WITH_FEW_CORES_S: Final = 500e-6
_NEVER_WITH_FEW_CORES_S: Final = 1e-3


def available_cores() -> int:
    """Returns how many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@final
@dataclass(slots=True)
class Cost:
    """How long a piece of work takes, learnt from running it.

    Attributes:
      seconds: a recent time; None until it has run.
      kind: what it counts as in a task's ``busy`` seconds.
      began_s: the run that was told of last began, by the host's clock; NaN: unknown.
      ended_s: it ended.
    """

    seconds: float | None = None
    kind: str = "other"
    began_s: float = nan
    ended_s: float = nan

    def learn(self, seconds: float) -> None:
        """Takes the time of a run; most runs count, not single ones.

        A slow run among fast ones is the machine's doing, not the work's: it counts a
        quarter more than before, and a fast one takes that back. What took long by any
        measure counts at once.
        """
        if self.seconds is None or seconds > _LONG_S:
            self.seconds = seconds
        else:
            least, most = self.seconds / 1.25, self.seconds * 1.25
            self.seconds = min(max(seconds, least), most)

    def learn_in_thread(self, seconds: float, used: float) -> None:
        """Takes the time of a run in a thread, which also waited for other threads.

        Short work that was once taken for long would stay so on a busy machine: its
        time shrinks by and by towards what it used, until it is tried without.

        Args:
          seconds: from its beginning to its end.
          used: of them on a core, by this thread.
        """
        if self.seconds is None or seconds > _LONG_S:
            self.seconds = seconds
        else:
            self.seconds = max(used, min(seconds, self.seconds * _SHRINKS))


def always_at_once_s(cores: int) -> float:
    """Returns below which time work that it is known of never goes to a thread.

    Example:
      >>> always_at_once_s(cores=2) > always_at_once_s(cores=64)
      True
    """
    return _ALWAYS_WITH_FEW_CORES_S if cores <= FEW_CORES else _ALWAYS_AT_ONCE_S


def runs_at_once(work: Cost, hand_over: Cost, cores: int = FEW_CORES + 1) -> bool:
    """Whether to run work here rather than in a thread.

    Args:
      work: the work; it goes to a thread while it is not known.
      hand_over: handing some to a thread and its result back. It is slow on a busy
        machine, where threads wait for a core.
      cores: of this process. With few, no other is idle, and a thread only costs:
        about 100 microseconds of CPU.

    Example:
      >>> runs_at_once(Cost(100e-6), hand_over=Cost(80e-6))
      True
      >>> runs_at_once(Cost(300e-6), hand_over=Cost(80e-6))
      False
      >>> runs_at_once(Cost(300e-6), hand_over=Cost(2e-3))
      True
      >>> runs_at_once(Cost(300e-6), hand_over=Cost(80e-6), cores=2)
      True
    """
    if work.seconds is None:
        return False
    few = cores <= FEW_CORES
    never = _NEVER_WITH_FEW_CORES_S if few else _NEVER_AT_ONCE_S
    limit = max(hand_over.seconds or 0.0, always_at_once_s(cores))
    return work.seconds < min(limit, never)
