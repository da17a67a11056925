"""Spark jobs of a cluster: one of one task for each server, in a thread each.

Not one job with a barrier: Spark ends all tasks of a barrier when it loses one of them,
and with the last master and standby a run is lost. So what an executor takes with it is
what was on it, and Spark starts that anew where there is room.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, final

from jgraph.client.spark.by_value import by_value
from jgraph.client.spark.failures import reason_of
from jgraph.clock import Clock
from jgraph.graph.device import TaskName
from jgraph.launch.spark import keeper

_END_S: Final = 10.0


@final
class SparkJobs:
    """Jobs that go on until they are ended.

    Args:
      context: the SparkContext.
      group: what Spark calls them together.
      orders: of each task, for ``keeper.serve``.
      profiles: what a task asks of Spark, where that is not a slot.
      on_failure: is told why a job has ended that nobody has wanted anew, in its
        thread.
      clock: for how long to wait for ends.
    """

    def __init__(
        self,
        context: Any,
        group: str,
        orders: Mapping[TaskName, str],
        profiles: Mapping[TaskName, Any],
        on_failure: Callable[[TaskName, str], None],
        clock: Clock,
    ) -> None:
        from pyspark import InheritableThread

        self._context = context
        self._group = group
        self._orders = orders
        self._profiles = profiles
        self._on_failure = on_failure
        self._clock = clock
        self._over = threading.Event()
        self._wanted = {task: threading.Event() for task in orders}
        self._threads = [
            InheritableThread(target=self._run, args=(task,), name=f"jgraph-{task}")
            for task in orders
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def want(self, task: TaskName) -> None:
        """Begins the job of a task anew, once it has ended or if it has not begun."""
        self._wanted[task].set()

    def end(self) -> None:
        """Begins none any more, and waits until all have ended; by force then."""
        self._over.set()
        for wanted in self._wanted.values():
            wanted.set()
        if not self._joined():
            self.cancel()
            self._joined()

    def _joined(self) -> bool:
        """Waits for the ends of all; returns whether they came."""
        deadline = self._clock.now() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock.now()))
        return not any(thread.is_alive() for thread in self._threads)

    def cancel(self) -> None:
        """Begins none any more, and ends those that wait for a slot, or run."""
        from py4j.protocol import Py4JError

        self._over.set()
        for wanted in self._wanted.values():
            wanted.set()
        with suppress(Py4JError, OSError, AttributeError):  # Spark was stopped
            self._context.cancelJobGroup(self._group)

    def _run(self, task: TaskName) -> None:
        wanted = self._wanted[task]
        while True:
            wanted.wait()
            if self._over.is_set():
                return
            wanted.clear()
            why = self._once(task)
            if not self._over.is_set() and not wanted.is_set():
                self._on_failure(task, why)

    def _once(self, task: TaskName) -> str:
        """Runs a job to its end, and returns why it ended."""
        try:
            context = self._context
            context.setJobGroup(self._group, f"jgraph server {task}")
            with by_value(keeper):
                jobs = context.parallelize([self._orders[task]], 1).mapPartitions(
                    keeper.serve
                )
                jobs._jrdd  # noqa: B018, SLF001  # pickles it
            if (profile := self._profiles.get(task)) is not None:
                jobs = jobs.withResources(profile)
            jobs.collect()
        except Exception as error:  # noqa: BLE001  # whatever ended it, it is over
            return reason_of(error)
        return "its Spark task has ended"
