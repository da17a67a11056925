"""Processes of all tasks of a cluster, each kept by a Spark task of its own."""

import json
import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, final

from jgraph.client.spark.failures import has_ended
from jgraph.client.spark.slots import hold
from jgraph.clock import Clock
from jgraph.cluster.events import Event
from jgraph.cluster.spec import ClusterSpec, task_named
from jgraph.cluster.wait_message import show_wait
from jgraph.errors import StartError
from jgraph.graph.device import TaskName
from jgraph.launch.local.processes import each, environment_of
from jgraph.launch.local.restarts import Restarter
from jgraph.launch.spark.application import Application, driver_python
from jgraph.launch.spark.control import ControlServer
from jgraph.launch.spark.jobs import SparkJobs
from jgraph.launch.spark.task_process import SparkOrder, SparkProcess
from jgraph.launch.spark.versions import check_hellos, problem_of

_LOG = logging.getLogger("jgraph.spark")
_LEAST_S: Final = 1.0


@final
class SparkProcesses:
    """The processes of a cluster on Spark, started together.

    Args:
      application: where.
      tasks: which.
      directory: with the files of the launcher.
      order: what they are begun with.
      environment: variables to set for them.
      python: their Python; empty: the driver's where it is there.
      resources: what a task of a job asks of Spark; a slot if it is not named.
      restarts: how often a task that died is started again within a minute.
      timeout_s: how long to wait until all listen and know each other.
      on_move: is told the cluster when a task is at another address; in any thread.
      clock: dates their ends.

    Raises:
      ConfigError: Spark can never run so many tasks at once.
      StartError: Spark did not start all of them in time, or one ended; none is left.
      VersionError: an executor has no jgraph or JAX, or another one.
    """

    def __init__(
        self,
        application: Application,
        tasks: Sequence[TaskName],
        directory: Path,
        order: SparkOrder,
        environment: Mapping[str, str],
        *,
        python: str,
        resources: Mapping[str, Mapping[str, float]],
        restarts: int,
        timeout_s: float,
        on_move: Callable[[ClusterSpec], None],
        clock: Clock,
    ) -> None:
        jobs = list(dict.fromkeys(map(_job_of, tasks)))
        profiles = application.profiles_of(resources, jobs)
        if not profiles:
            application.check_room(len(tasks))
        hold(application.name, len(tasks))
        self._held = len(tasks)
        self._application = application
        self._on_move = on_move
        self._lock = threading.Lock()
        self._restarter: Restarter | None = None
        self._jobs: SparkJobs | None = None
        self._group = f"jgraph-{secrets.token_hex(6)}"
        self._processes = {
            task: SparkProcess(
                task,
                order,
                environment_of(_job_of(task), environment),
                want=self._want,
                is_over=lambda: has_ended(application.context),
                problem=problem_of,
                on_start=self._arrange,
            )
            for task in tasks
        }
        secret = secrets.token_hex(32)
        self._control = ControlServer(directory, secret, self._processes)
        bound, hosts = application.control_hosts()
        deadline = clock.now() + timeout_s
        remaining_s: Callable[[], float] = lambda: max(_LEAST_S, deadline - clock.now())
        try:
            port = self._listen(bound)
            facts = {
                "hosts": hosts,
                "port": port,
                "ca": order.authority.certificate.decode(),
                "secret": secret,
                "python": python,
                "driver_python": driver_python(),
                "module": "jgraph.launch.spark.child",
                "echo": not application.is_one_process,
            }
            orders = {task: json.dumps({**facts, "task": task}) for task in tasks}
            asked = {t: profiles[j] for t in tasks if (j := _job_of(t)) in profiles}
            self._jobs = SparkJobs(
                *(application.context, self._group, orders, asked),
                self._job_ended,
                clock,
            )
            everyone = list(self._processes.values())
            with show_wait(self._waiting):  # small tasks would be in the way of large
                for group in (list(asked), [t for t in tasks if t not in asked]):
                    for task in group:
                        self._want(task)
                    self._wait_for_slots(group, clock, deadline, timeout_s)
            check_hellos([one.link for one in everyone])
            nobody = ClusterSpec({})
            for process in everyone:
                process.start(nobody)
            each(everyone, SparkProcess.wait_started, remaining_s())
            self.spec = self._spec()
            join: Callable[[SparkProcess], None] = lambda one: one.join(self.spec)
            each(everyone, join, remaining_s())
            self._restarter = Restarter(
                everyone,
                self.spec,
                restarts,
                start_s=timeout_s,
                clock=clock,
                on_start=lambda: None,
            )
        except BaseException:
            self.end()
            raise

    def __getitem__(self, task: str) -> SparkProcess:
        return self._processes[task_named(task, list(self._processes))]

    def events(self) -> list[Event]:
        """Returns what became of processes that are started again."""
        return [] if self._restarter is None else self._restarter.events.newest()

    def gone(self) -> dict[TaskName, str]:
        """Returns why, by task, for those that ended and are not started again."""
        return {} if self._restarter is None else dict(self._restarter.final_deaths)

    def end(self) -> None:
        """Ends all processes, and gives their slots back to Spark."""
        if self._restarter is not None:
            self._restarter.close()
        for process in self._processes.values():
            process.close()
        if self._jobs is not None:
            if self._restarter is None:  # some may wait for a slot
                self._jobs.cancel()
            self._jobs.end()
        self._control.close()
        if self._restarter is not None:
            self._restarter.join()
        hold(self._application.name, -self._held)
        self._held = 0

    # ------------------------------------------------------------ parts

    def _listen(self, host: str) -> int:
        try:
            return self._control.start(host)
        except OSError as error:
            raise StartError(
                f"cannot listen at {host} for what tasks of Spark tell: "
                f"{error.strerror or error}; set spark.driver.bindAddress to an "
                "address of this host"
            ) from error

    def _want(self, task: TaskName) -> None:
        if self._jobs is not None:
            self._jobs.want(task)

    def _job_ended(self, task: TaskName, why: str) -> None:
        self._processes[task].failed(why)

    def _here(self) -> list[SparkProcess]:
        return [one for one in self._processes.values() if one.link is not None]

    def _waiting(self) -> str:
        slots = self._application.slots()
        has = "" if slots is None else f"; it has {slots} slots in all"
        here = f"{len(self._here())} of {len(self._processes)}"
        return f"Spark has started {here} tasks{has}"

    def _wait_for_slots(
        self, tasks: Sequence[TaskName], clock: Clock, deadline: float, timeout_s: float
    ) -> None:
        processes = [self._processes[task] for task in tasks]
        for process in processes:
            why = process.wait_link(max(0.0, deadline - clock.now()))
            if why:
                raise StartError(f"{process.task}: {why}", task=process.task)
        missing = [one for one in processes if one.link is None]
        if missing:
            names = ", ".join(one.task for one in missing[:8])
            raise StartError(
                f"{self._waiting()} within {timeout_s:g} s, and {names} "
                f"{'is' if len(missing) == 1 else 'are'} missing. Give the application "
                "more executors or cores, end what else it runs, or ask for fewer "
                "tasks",
                missing=[one.task for one in missing],
            )

    def _spec(self) -> ClusterSpec:
        jobs: dict[str, list[str]] = {}
        for task, process in self._processes.items():
            jobs.setdefault(_job_of(task), []).append(process.address)
        return ClusterSpec(jobs)

    def _arrange(self, moved: SparkProcess) -> ClusterSpec:
        """Returns where all are, once a task has started; tells others if it moved."""
        with self._lock:
            spec = self._spec()
            if spec == self.spec:
                return spec
            was, self.spec = self.spec.address(moved.task), spec
            text = "%s is at %s now, no more at %s"
            _LOG.warning(text, moved.task, moved.address, was)
            for process in self._processes.values():
                if process is not moved:
                    process.arrange(spec)
        self._on_move(spec)
        return spec


def _job_of(task: TaskName) -> str:
    return task.removeprefix("/job:").partition("/")[0]
