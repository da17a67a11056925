"""Watchdog of frozen task processes: the shell of ``coordination.liveness.freezes``.

Imports no JAX, like ``processes``.
"""

import logging
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, final

from jgraph.clock import Clock
from jgraph.cluster.events import EventLog
from jgraph.coordination.liveness.freezes import FROZEN_S, LOOK_EVERY_S, Freezes, Looked
from jgraph.counts import is_duration
from jgraph.errors import ConfigError
from jgraph.graph.device import TaskName


class Freezable(Protocol):
    """What may be frozen; see ``TaskProcess``."""

    task: TaskName

    def is_frozen(self) -> bool:
        """Whether the kernel has stopped it, and nobody looks into it meanwhile."""

    def kill(self) -> None:
        """Kills it."""


@final
class FreezeWatch:
    """A thread looks at processes time and again, and kills those that stay frozen.

    Args:
      processes: are started again when they die; there may come others.
      events: takes what it does.
      clock: measures how long they are frozen.
      limit_s: see ``FROZEN_S``.
    """

    def __init__(
        self,
        processes: Sequence[Freezable],
        events: EventLog,
        clock: Clock,
        limit_s: float = FROZEN_S,
    ) -> None:
        self._processes = processes
        self._events = events
        self._clock = clock
        self._freezes = Freezes(limit_s)
        self._end = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="jgraph-frozen", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Looks no more."""
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(LOOK_EVERY_S):
            for process in list(self._processes):
                task = process.task
                looked = Looked(task, process.is_frozen(), self._clock.now())
                for kill in self._freezes.handle(looked):
                    why = f"{task} is frozen for {kill.frozen_s:.0f} s; it is killed"
                    self._events.note("frozen", why, level=logging.WARNING)
                    with suppress(subprocess.TimeoutExpired):  # looked at again
                        process.kill()


def check_frozen_s(frozen_s: object) -> None:
    """Refuses what is no length of time.

    Raises:
      ConfigError: shows what was given.
    """
    if not is_duration(frozen_s):
        raise ConfigError(
            f"frozen_s is {frozen_s!r:.60}; give for how many seconds a process may be "
            "stopped before it is killed and started again, for example 10"
        )
