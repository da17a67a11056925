"""Watchdog that ends a process whose computation goes on long after its step.

Nothing can interrupt what XLA computes: a loop whose condition stays true holds the
lock of its variables, and a core, for ever. Where somebody starts a task again that
failed, its process ends, as one that is frozen is killed.
"""

import asyncio
import logging
import os
import sys
import threading
from typing import Final, final

from jgraph.coordination.liveness.restarts import OVERDUE
from jgraph.runtime.task import TaskRuntime
from jgraph.server.steps.task_host import TaskHost

_LOG = logging.getLogger("jgraph.overdue")
_LOOK_EVERY_S: Final = 1.0
_SILENT_LOOKS: Final = 30
"""By then every other task has given up one whose event loop computes."""


@final
class OverdueWatch:
    """A thread that looks for such computations, and ends the process.

    Args:
      runtime: of the task.
      shell: of the task.
      limit_s: how long they may go on after their step.
    """

    def __init__(self, runtime: TaskRuntime, shell: TaskHost, limit_s: float) -> None:
        self._runtime = runtime
        self._shell = shell
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._ticked = threading.Event()
        self._silent = 0
        self._end = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="jgraph-overdue", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Looks no more."""
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        self._loop.call_soon_threadsafe(self._ticked.set)
        while not self._end.wait(_LOOK_EVERY_S):
            if why := self.overdue():
                _LOG.error("%s; the process of %s ends", why, self._runtime.task)
                leave(OVERDUE)

    def overdue(self) -> str:
        """Returns what goes on for too long, as a sentence; empty if nothing does."""
        self._silent = self._silent + 1 if self._is_silent() else 0
        if self._silent >= _SILENT_LOOKS:
            what = ", ".join(self._runtime.computing()) or "a computation"
            return f"{what} blocks the event loop for over {_SILENT_LOOKS} s"
        computations = self._runtime.overdue_computations()
        # Who interrupts a step says nothing of how long it would take.
        late_s = [one.seconds for one in computations if one.is_late]
        if max(late_s, default=0.0) < self._limit_s:
            return ""
        first = computations[0]  # later ones may wait for what it holds
        return f"{first.what} still runs {first.seconds:.0f} s after its step was over"

    def _is_silent(self) -> bool:
        """Whether the event loop computes and has not turned since the last look."""
        if not self._ticked.is_set():
            return self._shell.computes_at_once
        self._ticked.clear()
        self._loop.call_soon_threadsafe(self._ticked.set)
        return False


def leave(code: int) -> None:
    """Ends this process at once, whatever its threads do; keeps what was logged."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
