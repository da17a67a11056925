"""Restarts of task processes: the shell of ``coordination.liveness.restarts``.

Imports no JAX, like ``processes``.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, final

from jgraph.clock import Clock
from jgraph.cluster.events import LAUNCHER, EventLog
from jgraph.cluster.spec import ClusterSpec
from jgraph.coordination.liveness.restarts import (
    LeaveEnded,
    Restarts,
    StartAgain,
    TaskEnded,
)
from jgraph.counts import is_count
from jgraph.errors import ConfigError, StartError, TaskMissingError
from jgraph.graph.device import TaskName

_LOG = logging.getLogger("jgraph.restarts")
_CLOSE_S = 10.0
_LAST_WORDS = 3
"""So many lines of the log of a process that died are told."""
_USUAL = " INFO "


class Process(Protocol):
    """What is started again; see ``TaskProcess``."""

    task: TaskName

    def wait_dead(self) -> int:
        """Waits for the end, however long it takes; returns the exit code."""

    def how_it_ended(self) -> str:
        """Returns why it ended, as a part of a sentence; it has."""

    def start(self, spec: ClusterSpec) -> None:
        """Starts it as a task of ``spec``."""

    def wait_started(self) -> None:
        """Waits until it listens."""

    def join(self, spec: ClusterSpec) -> None:
        """Waits until it knows the others."""

    def kill(self) -> None:
        """Kills it."""

    def tail(self) -> str:
        """Returns the end of its log."""


@final
class Restarter:
    """A thread per process waits for its end, and starts it again.

    Args:
      processes: all are running.
      spec: where they listen, and will listen again.
      limit: how often a task is started again within a minute.
      start_s: a process that takes longer to start is killed.
      clock: dates the ends.
      on_start: called after a process was started again, in a thread of its own.

    Attributes:
      events: what it did.
      final_deaths: tasks that are not started again, and why.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        spec: ClusterSpec,
        limit: int,
        *,
        start_s: float,
        clock: Clock,
        on_start: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._start_s = start_s
        self._clock = clock
        self._on_start = on_start
        self._restarts = Restarts(limit)
        self._lock = threading.Condition()
        self._starting: set[Process] = set()
        self._forgotten: set[Process] = set()
        self._closed = False
        self.final_deaths: dict[TaskName, str] = {}
        self.events = EventLog(LAUNCHER)
        self._threads: list[threading.Thread] = []
        for process in processes:
            self.watch(process)

    def watch(self, process: Process) -> None:
        """Starts a process again when it dies; it runs."""
        self.final_deaths.pop(process.task, None)
        thread = threading.Thread(
            target=self._watch,
            args=(process,),
            name=f"jgraph-{process.task}",
            daemon=True,
        )
        self._threads.append(thread)
        thread.start()

    def forget(self, process: Process) -> None:
        """Does not start a process any more, however it ends."""
        with self._lock:
            self._forgotten.add(process)
            self.final_deaths.pop(process.task, None)
            if process in self._starting:
                process.kill()
                self._lock.wait_for(lambda: process not in self._starting, _CLOSE_S)

    def close(self) -> None:
        """Starts nothing any more; what is starting is killed."""
        with self._lock:
            self._closed = True
            for process in self._starting:
                process.kill()
            self._lock.wait_for(lambda: not self._starting, _CLOSE_S)

    def join(self) -> None:
        """Waits for the threads, once the processes have ended."""
        for thread in self._threads:
            thread.join(_CLOSE_S)

    def _watch(self, process: Process) -> None:
        while self._start(process, process.wait_dead()):
            try:
                wait_started(process, self._spec, self._start_s)
            except StartError:
                continue  # it is dead, which the next round tells
            finally:
                with self._lock:
                    self._starting.discard(process)
                    self._lock.notify_all()
            # Runs that used it warn when they go on, which is the end of this.
            back = f"{process.task} serves again, without what it held"
            self.events.note("restarted", back)
            self._on_start()

    def _start(self, process: Process, code: int) -> bool:
        """Starts a process that ended, or says why not."""
        with self._lock:
            ended = TaskEnded(process.task, code, self._clock.now())
            ends = self._closed or process in self._forgotten
            for instruction in [] if ends else self._restarts.handle(ended):
                match instruction:
                    case StartAgain(task):
                        died = (
                            f"{task} died ({process.how_it_ended()}); starting it again"
                        )
                        self.events.note("died", died, level=logging.WARNING)
                        if said := last_words(process.tail()):
                            _LOG.warning("the log of %s ended with:\n%s", task, said)
                        try:
                            process.start(self._spec)
                        except OSError as error:
                            self._leave(process, f"{task} cannot be started: {error}")
                            return False
                        self._starting.add(process)
                        return True
                    case LeaveEnded(task, deaths, window_s):
                        why = f"{task} died {deaths} times in {window_s:g} s, at last "
                        self._leave(process, f"{why}by {process.how_it_ended()}")
        return False

    def _leave(self, process: Process, why: str) -> None:
        text = f"{why}, and is not started again"
        self.events.note("abandoned", text)
        tail = process.tail()
        with_log = f"{text}. The end of its log:\n{tail}" if tail else text
        _LOG.error("%s", with_log)
        self.final_deaths[process.task] = with_log


def last_words(tail: str) -> str:
    r"""Returns the last lines of a log, if the last one may say why a process died.

    Example:
      >>> last_words("... INFO jgraph.events: [joined] it listens")
      ''
      >>> last_words("... INFO jgraph.events: [joined] it listens\nno memory is left")
      '... INFO jgraph.events: [joined] it listens\nno memory is left'
    """
    lines = tail.splitlines()[-_LAST_WORDS:]
    return "" if not lines or _USUAL in lines[-1] else "\n".join(lines)


def wait_started(process: Process, spec: ClusterSpec, limit_s: float) -> None:
    """Waits until a process serves a task of ``spec``; kills one that takes longer.

    Raises:
      StartError: it ended instead.
    """
    timer = threading.Timer(limit_s, process.kill)
    timer.start()
    try:
        process.wait_started()
        process.join(spec)
    finally:
        timer.cancel()


def check_none_gone(ends: Mapping[TaskName, str], remedy: str) -> None:
    """Refuses to go on without tasks that nothing starts again.

    Args:
      ends: of tasks that have ended for good, how.
      remedy: what the user does then.

    Raises:
      TaskMissingError: there are such tasks.
    """
    if ends:
        raise TaskMissingError(
            f"{'; '.join(ends.values())}\nNothing starts it again; {remedy}",
            missing=list(ends),
        )


def check_restarts(restarts: object) -> None:
    """Refuses what is no number of restarts.

    Raises:
      ConfigError: shows what was given.
    """
    if not is_count(restarts, 0):
        raise ConfigError(
            f"restarts is {restarts!r:.60}; give how often a task that died is started "
            "again within a minute: 0 for never, or for example 2"
        )
