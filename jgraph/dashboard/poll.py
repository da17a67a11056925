"""Poller of a cluster: asks for its status, runs and events, and follows its runs."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Final, final

from jgraph.client.inspect import ClusterInspector
from jgraph.client.logs import EventTail
from jgraph.client.runs.runs import RunInfo
from jgraph.client.status import ClusterStatus
from jgraph.client.watching import (
    events_fact,
    report_fact,
    runs_fact,
    silent_fact,
    status_fact,
    variables_fact,
)
from jgraph.clock import Clock
from jgraph.coordination.watch.facts import Fact
from jgraph.errors import JGError
from jgraph.graph.device import TaskName

_LOG = logging.getLogger("jgraph.dashboard")
_SLOWEST_S: Final = 10.0
_VARIABLES_EVERY: Final = 5
"""Looks."""


@final
class Poller:
    """Asks a cluster again and again, in threads of its own.

    Args:
      visit: asks it.
      take: gets what it tells.
      clock: in seconds since 1970.
      every_s: between two looks; a cluster that does not answer is asked less often.
    """

    def __init__(
        self,
        visit: ClusterInspector,
        take: Callable[[Fact], None],
        clock: Clock,
        every_s: float = 1.0,
    ) -> None:
        self._visit = visit
        self._take = take
        self._clock = clock
        self._every_s = every_s
        self._looks = 0
        self._events: EventTail | None = None
        self._followed: dict[str, tuple[TaskName, int] | None] = {}
        """Master and term at which a run is followed; None: that was lost."""
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._go_on, name="jgraph-poll", daemon=True
        )
        self.first_answer = threading.Event()
        """Set once the cluster has answered."""

    def start(self) -> None:
        """Begins to ask."""
        self._thread.start()

    def stop(self) -> None:
        """Asks no more; returns when the last look is over."""
        self._stop.set()
        self._thread.join()

    def _go_on(self) -> None:
        wait_s = 0.0
        while not self._stop.wait(wait_s):
            try:
                self.look()
            except JGError as error:
                self._take(silent_fact(error, self._clock.now()))
                wait_s = min(_SLOWEST_S, max(self._every_s, 2 * wait_s))
            else:
                wait_s = self._every_s

    def look(self) -> None:
        """Asks everything once.

        Raises:
          JGError: the cluster does not answer.
        """
        status, runs = self._visit.look()
        self._take(status_fact(status, self._clock.now()))
        self.first_answer.set()
        self._take(runs_fact(runs, self._clock.now()))
        for run in runs:
            self._follow(run, status)
        if self._events is None:
            self._events = self._visit.events()
        self._events.look_at(status)
        if new := self._events.new():
            self._take(events_fact(new, self._clock.now()))
        if self._looks % _VARIABLES_EVERY == 0:
            with suppress(JGError):  # the next time, then
                fact = variables_fact(self._visit.variables(), self._clock.now())
                self._take(fact)
        self._looks += 1

    def _follow(self, run: RunInfo, status: ClusterStatus) -> None:
        """Follows a run at its newest master, from its first report on."""
        at = (run.master, run.term)
        begun_anew = run.name in self._followed
        before = self._followed.get(run.name)
        if before == at or (begun_anew and before is None and run.state != "running"):
            return
        self._followed[run.name] = at
        address = status.cluster.address(run.master)
        threading.Thread(
            target=self._reports,
            args=(run, address, begun_anew),
            name="jgraph-follow",
            daemon=True,
        ).start()

    def _reports(self, run: RunInfo, address: str, begun_anew: bool) -> None:
        if begun_anew:  # its new master tells all of it again
            again = {"kind": "report", "run": run.name, "anew": True}
            self._take({**again, "time": self._clock.now()})
        tasks: dict[int, TaskName] = {}
        try:
            for message in self._visit.reports(run, address):
                fact = report_fact(run, tasks, message, self._clock.now())
                if fact is not None:
                    self._take(fact)
                if self._stop.is_set():
                    return
        except CancelledError:
            return  # the connection was closed here
        except JGError as error:
            # That it failed, or has another master, shows in the list of runs.
            _LOG.info("run '%s' is not followed any more: %s", run.name, error)
            if self._followed[run.name] == (run.master, run.term):
                self._followed[run.name] = None  # again, if it still runs
