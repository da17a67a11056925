"""Restart policy: decides which tasks to start again, and stops after a crash loop.

The shell waits for the ends of the tasks' processes, each is an event. Processes that
die while they start count like all others, so that a port which another process holds
for a moment ends nothing.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final, TypeAlias, final

from jgraph.graph.device import TaskName

WINDOW_S: Final = 60.0
"""Deaths of a task further apart have nothing to do with each other."""
REPLACED: Final = 75
"""Exit code of a process that ended because another has its place."""
OVERDUE: Final = 76
"""Exit code of a process in which a computation did not end after its step."""


@final
@dataclass(frozen=True, slots=True)
class TaskEnded:
    """The process of a task ended at ``now``; ``code`` 0: it was asked to.

    ``REPLACED``: another one is there.
    """

    task: TaskName
    code: int
    now: float


@final
@dataclass(frozen=True, slots=True)
class StartAgain:
    """Start the task, at the address that it had."""

    task: TaskName


@final
@dataclass(frozen=True, slots=True)
class LeaveEnded:
    """Do not start the task again: it died ``deaths`` times in ``window_s``."""

    task: TaskName
    deaths: int
    window_s: float


Instruction: TypeAlias = StartAgain | LeaveEnded


@final
class Restarts:
    """State machine of one launcher.

    Args:
      limit: how often a task is started again within ``WINDOW_S``.

    Example:
      >>> restarts, ps = Restarts(limit=1), TaskName("/job:ps/task:0")
      >>> restarts.handle(TaskEnded(ps, code=-9, now=10.0))
      [StartAgain(task='/job:ps/task:0')]
      >>> restarts.handle(TaskEnded(ps, code=-9, now=20.0))
      [LeaveEnded(task='/job:ps/task:0', deaths=2, window_s=60.0)]
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._deaths: dict[TaskName, deque[float]] = {}

    def handle(self, event: TaskEnded) -> list[Instruction]:
        """Takes an event; returns what to do now."""
        if event.code in {0, REPLACED}:
            return []
        deaths = self._deaths.setdefault(event.task, deque())
        deaths.append(event.now)
        while event.now - deaths[0] > WINDOW_S:
            deaths.popleft()
        if len(deaths) <= self._limit:
            return [StartAgain(event.task)]
        return [LeaveEnded(event.task, len(deaths), WINDOW_S)]
