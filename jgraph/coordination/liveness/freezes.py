"""Frozen processes: decides which tasks to kill after being frozen for too long.

A frozen process (SIGSTOP) holds its port and its connections, so nobody can have its
place: it is killed, and then it is started again like any other that died. Only what
the kernel says counts: a process that is slow on a busy machine is not frozen.
"""

from dataclasses import dataclass
from typing import Final, final

from jgraph.graph.device import TaskName

FROZEN_S: Final = 10.0
"""Who is frozen for less than this is waited for."""
LOOK_EVERY_S: Final = 1.0
_GAP_S: Final = 3 * LOOK_EVERY_S


@final
@dataclass(frozen=True, slots=True)
class Looked:
    """The process of a task was looked at, at ``now``."""

    task: TaskName
    is_frozen: bool
    now: float


@final
@dataclass(frozen=True, slots=True)
class Kill:
    """Kill the process of the task."""

    task: TaskName
    frozen_s: float


@final
class Freezes:
    """State machine of one launcher.

    Args:
      limit_s: see ``FROZEN_S``.

    Example:
      >>> freezes, ps = Freezes(limit_s=2.0), TaskName("/job:ps/task:0")
      >>> [freezes.handle(Looked(ps, True, now)) for now in (0.0, 1.0, 2.0)]
      [[], [], [Kill(task='/job:ps/task:0', frozen_s=2.0)]]
    """

    def __init__(self, limit_s: float = FROZEN_S) -> None:
        self._limit_s = limit_s
        # By task that is frozen: since when, and when it was looked at last.
        self._frozen: dict[TaskName, tuple[float, float]] = {}

    def handle(self, event: Looked) -> list[Kill]:
        """Takes an event; returns what to do now."""
        since, last = self._frozen.pop(event.task, (event.now, event.now))
        if not event.is_frozen:
            return []
        if event.now - last > _GAP_S:  # who looks was frozen itself: perhaps all were
            since = event.now
        frozen_s = event.now - since
        if frozen_s >= self._limit_s:
            return [Kill(event.task, frozen_s)]
        self._frozen[event.task] = since, event.now
        return []
