"""Scaling of a cluster: more workers and ps, or fewer, while runs on it go on."""

import itertools
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar, final

from jgraph.client.connection import Connection
from jgraph.client.logs import EventTail
from jgraph.client.runs.failover import ask_while_replaced
from jgraph.client.runs.runs import RunInfo, runs_of
from jgraph.cluster.events import Event
from jgraph.cluster.options import check_seconds
from jgraph.cluster.polling import Polling
from jgraph.cluster.spec import MOST_TASKS
from jgraph.errors import (
    ClusterUnreachableError,
    ConfigError,
    DeadlineError,
    RescaleError,
    TaskLostError,
    TaskMissingError,
)
from jgraph.graph.device import TaskName
from jgraph.plan.program.replicas import is_own
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.status import from_status

SNAPSHOT: Final = "snapshot-"
"""How the names of containers begin that are dropped when they have been read."""
SCALE_S: Final = 60.0
"""So long ``scale`` waits."""
_POLL_S: Final = 0.1
_LOOKS: Final = 10
"""So many it takes until tasks are asked why somebody takes no part."""
_STAGES: Final = (
    ". Stages of a pipeline do not move while it runs: save them, and restore them "
    "into a pipeline of other tasks"
)
_CHANGE: Final = re.compile(r"[+-]\d{1,6}")
T = TypeVar("T")
_Waiting: TypeAlias = Callable[[Polling], list[TaskName]]
"""Waits for what was begun; returns the tasks that there are then."""
_NAMES: Final[Mapping[str, str]] = {"worker": "workers", "ps": "parameter servers"}
_ARGUMENTS: Final[Mapping[str, str]] = {"worker": "workers", "ps": "ps"}


@final
@dataclass(frozen=True, slots=True)
class Scaler:
    """Makes a cluster have more tasks, or fewer; see ``Cluster.scale``.

    Attributes:
      cluster: the client.
      start: starts so many more tasks of a job.
      leave: tells a task to end, and to be no task of the cluster any more.
      announce: says that a task will leave, which goes on until it is told to.
      ended: learns which have left.
      turn: held while it is decided who starts, or leaves, and they are told; two of
        one client that count from what there is do so one after the other.
      timeout_s: how long to wait.
      wait: until those that join take part in the runs that take them.
      beginnings: of runs of this client that begin now; set once a master has them.
    """

    cluster: Connection
    start: Callable[[str, int], None]
    leave: Callable[[TaskName], None]
    announce: Callable[[TaskName], None]
    ended: Callable[[Sequence[TaskName]], None]
    turn: threading.Lock = field(default_factory=threading.Lock)
    timeout_s: float = SCALE_S
    wait: bool = True
    beginnings: Sequence[threading.Event] = ()

    def scale(
        self, workers: int | str | None, ps: int | str | None
    ) -> dict[str, list[TaskName]]:
        """Makes the cluster have so many workers and ps; returns those there are then.

        Args:
          workers: how many, or a change: "+1"; None: as they are.
          ps: likewise.
        """
        check_seconds("timeout_s", self.timeout_s)
        if workers is None and ps is None:
            wanted_tasks("worker", workers, 0)  # refuses it
        polling = Polling(_POLL_S, self.timeout_s)
        if not self.turn.acquire(timeout=self.timeout_s):
            raise DeadlineError(
                f"scale waited {self.timeout_s:g} s for another scale of this client, "
                "which starts tasks; nothing was done, call it again"
            )
        try:
            waits = self._begin(workers, ps, polling)
        finally:
            self.turn.release()
        return {job: wait(polling) for job, wait in waits.items()}

    def _ask(self, ask: Callable[[], T], polling: Polling) -> T:
        return ask_while_replaced(self.cluster, ask, polling)

    def _tell(
        self, act: Callable[[TaskName], None], task: TaskName, polling: Polling
    ) -> None:
        """Tells a task to leave, or others of that, once who looks after it is back.

        Args:
          act: does it; may be done twice.
          task: which leaves.
          polling: as long as this goes on.
        """
        while True:
            try:
                self._ask(lambda: act(task), polling)
            except RescaleError as error:
                is_away = error.details.get("task", task) != task
                if not is_away or not polling.wait():
                    raise
            else:
                return

    def _running(self, names: Sequence[str], polling: Polling) -> list[RunInfo]:
        """Returns those of some runs that are not over."""
        runs = self._ask(lambda: runs_of(self.cluster), polling)
        return [run for run in runs if run.name in names and run.state == "running"]

    def _begin(
        self, workers: int | str | None, ps: int | str | None, polling: Polling
    ) -> dict[str, _Waiting]:
        """Starts tasks, and tells others to leave; returns what waits for them.

        What is wanted is a number from here on: a master that is lost meanwhile is
        asked for the same again, or the next one is.
        """
        status = self._ask(self.cluster.status_now, polling)
        lost = set(map(TaskName, status.missing))
        leaves = {TaskName(t.task) for t in status.tasks if t.state != "ready"}
        goers = set(map(TaskName, status.leaving))
        stay = {
            job: [task for task in self.cluster.tasks(job) if task not in goers]
            for job in _NAMES
        }
        wanted = {
            job: wanted_tasks(job, count, len(stay[job]))
            for job, count in (("worker", workers), ("ps", ps))
            if count is not None
        }
        found = self._ask(lambda: runs_of(self.cluster), polling)
        runs = [run for run in found if run.state == "running"]
        for job, count in wanted.items():
            for run in runs:
                _check_bounds(run, job, count, len(stay[job]))
        waits = {}
        for job, count in wanted.items():
            if job == "ps":
                if count > len(stay[job]):  # their indices are those that are needed
                    self._wait_left(job, goers, polling)
                waits[job] = self._scale_ps(count, runs, lost, polling)
            else:
                there = self.cluster.tasks(job)
                leavers = who_leaves(there, count, goers, lost, leaves)
                more = count - len(stay[job])
                waits[job] = self._scale_workers(count, more, leavers, runs, polling)
        return waits

    def _scale_workers(
        self,
        wanted: int,
        more: int,
        leavers: Sequence[TaskName],
        runs: Sequence[RunInfo],
        polling: Polling,
    ) -> _Waiting:
        before = self.cluster.tasks("worker")
        events = EventTail(self.cluster.transport, self.cluster.spec)
        if self.wait and (runs or self.beginnings):
            events.new()  # of what was before
        for task in leavers:
            self._check_holds_nothing(task, [run.container for run in runs], polling)
        if more > 0:
            self.start("worker", more)
        for task in leavers:
            self._tell(self.leave, task, polling)

        def wait(polling: Polling) -> list[TaskName]:
            if not self.wait:
                return [task for task in before if task not in leavers]
            self._wait_members("worker", wanted, leavers, polling)
            self.ended(leavers)
            names = self._with_begun([run.name for run in runs], polling)
            self._wait_taking_part(names, events, polling)
            there = self.cluster.tasks("worker")
            self._check_startable(self._lost(there, polling))
            return there

        return wait

    def _check_holds_nothing(
        self, task: TaskName, runs: Sequence[str], polling: Polling
    ) -> None:
        """Refuses to let a worker go that holds what is nobody's copy.

        Args:
          task: the worker.
          runs: containers of runs, which do without it.
          polling: see ``ask_while_replaced``.
        """
        try:
            left_over = self._left_over(task, polling, runs)
        except (ClusterUnreachableError, TaskLostError):
            return  # it is lost, with what it held
        if names := [name for name in left_over if not is_own(name)]:
            raise _still_holds(task, names, _STAGES)

    def _scale_ps(
        self,
        wanted: int,
        runs: Sequence[RunInfo],
        lost: Collection[TaskName],
        polling: Polling,
    ) -> _Waiting:
        before = self.cluster.tasks("ps")
        leavers = before[wanted:]  # a run has its variables on the first ones
        elastic = [run for run in runs if run.ps_bounds is not None]
        moves = [run.container for run in elastic]
        for task in leavers:
            if task in lost:
                _check_unused(task, before.index(task), elastic)
            elif left_over := self._left_over(task, polling, moves):
                raise _still_holds(task, left_over)
        if wanted > len(before):
            self.start("ps", wanted - len(before))
        for task in reversed(leavers):
            self._tell(self.announce, task, polling)
        known = [run.name for run in runs]

        def wait(polling: Polling) -> list[TaskName]:
            names = self._with_begun(known, polling)
            if leavers:  # who leaves ends when nobody needs it any more
                self._let_leave(wanted, names, polling)
            elif self.wait:
                self._wait_moved(wanted, names, polling)
            if not self.wait:
                return before[:wanted]
            self._wait_members("ps", wanted, leavers, polling)
            self.ended(leavers)
            return self.cluster.tasks("ps")

        return wait

    def _let_leave(self, wanted: int, names: Sequence[str], polling: Polling) -> None:
        """Lets ps leave that are too many, once nothing is on them.

        One that is lost then may be started again, and its next process leaves, too.
        """
        announced, ending = set[tuple[TaskName, str]](), set[tuple[TaskName, str]]()
        held: RescaleError | None = None
        while True:
            self._wait_moved(wanted, names, polling)
            self._ask(self.cluster.refresh, polling)
            there = self.cluster.tasks("ps")[wanted:]
            late = [(task, self.cluster.find(task)) for task in reversed(there)]
            held = None
            for process in late:
                if process in ending:
                    continue
                with suppress(ClusterUnreachableError, TaskLostError):
                    if process not in announced:
                        announced.add(process)
                        self._tell(self.announce, process[0], polling)
                    # A save under way reads a copy there.
                    if left_over := self._left_over(process[0], polling, copies=True):
                        held = _still_holds(process[0], left_over)
                        continue
                    ending.add(process)
                    self._tell(self.leave, process[0], polling)
            if not late or not (self.wait or ending < set(late)):
                return
            if not polling.wait():
                if held is not None:
                    raise held
                return

    def _wait_members(
        self, job: str, wanted: int, leavers: Sequence[TaskName], polling: Polling
    ) -> None:
        """Waits until those that were started are members, and leavers none."""
        while True:
            status = self._ask(self.cluster.status_now, polling)
            tasks = self.cluster.tasks(job)
            late = [task for task in leavers if task in tasks]
            there = [task for task in tasks if task not in status.leaving]
            if len(there) >= wanted and not late:
                return
            if not polling.wait():
                names = _NAMES[job]
                what = f"{', '.join(late)} to leave" if late else f"{names} to join"
                raise DeadlineError(
                    f"scale waited {self.timeout_s:g} s for {what}: there are "
                    f"{len(there)} of {wanted} {names}; what runs goes on with those "
                    "there are, and `jgraph events` tells what became of the others",
                    pending=late,
                )

    def _with_begun(self, names: Sequence[str], polling: Polling) -> Sequence[str]:
        """Returns names of runs, and those of runs that this client was beginning.

        A run that begins may need the tasks that were started for it: it is waited for
        only then.
        """
        if not (self.wait and self.beginnings):
            return names
        while not all(event.is_set() for event in self.beginnings):
            if not polling.wait():
                raise DeadlineError(
                    f"scale waited {self.timeout_s:g} s for the run that fit begins; "
                    "its tasks are told, and it goes on with those that are ready"
                )
        found = self._ask(lambda: runs_of(self.cluster), polling)
        more = [run.name for run in found if run.name not in names]
        return [*names, *more]

    def _wait_left(
        self, job: str, goers: Collection[TaskName], polling: Polling
    ) -> None:
        """Waits until tasks of a job have left that were told to before."""
        while late := [task for task in self.cluster.tasks(job) if task in goers]:
            if not polling.wait():
                raise DeadlineError(
                    f"scale waited {self.timeout_s:g} s for {', '.join(late)} to "
                    "leave, as it was told before; no other was started; scale again",
                    pending=late,
                )
            self._ask(self.cluster.refresh, polling)

    def _wait_taking_part(
        self, names: Sequence[str], events: EventTail, polling: Polling
    ) -> None:
        """Waits until all workers take part in the runs that take them.

        Raises:
          RescaleError: a run does not take one, as its data is not that of others.
          DeadlineError: one was not ready in time.
        """
        for look in itertools.count(1):
            workers = set(self.cluster.tasks("worker"))
            waits = {
                run.name: sorted(workers - set(run.workers))
                for run in self._running(names, polling)
                if run.bounds is not None
            }
            late = {name: tasks for name, tasks in waits.items() if tasks}
            if not late:
                return
            if not look % _LOOKS:
                _check_taken(events.new(), late)
                waiting = sorted(set().union(*late.values()))
                if (lost := self._lost(waiting, polling)) == waiting:
                    self._check_startable(lost)
            if not polling.wait():
                name, tasks = next(iter(late.items()))
                raise DeadlineError(
                    f"scale waited {self.timeout_s:g} s for {', '.join(tasks)} to take "
                    f"part in run '{name}'; they may need longer to load the data and "
                    "to compile, and take part when they are ready",
                    pending=tasks,
                )

    def _lost(self, tasks: Sequence[TaskName], polling: Polling) -> list[TaskName]:
        """Returns those that do not answer."""
        missing = self._ask(self.cluster.status_now, polling).missing
        return [task for task in tasks if task in missing]

    def _check_startable(self, lost: Sequence[TaskName]) -> None:
        """Refuses to count on workers that are lost, and that nobody starts.

        Raises:
          RescaleError: there are such workers.
        """
        if not lost:
            return
        try:
            self.cluster.check_startable()
        except TaskMissingError as error:
            ends = [task for task in lost if task in error.details["missing"]]
            if not ends:
                return  # they are late to answer
            count = len(self.cluster.tasks("worker"))
            raise RescaleError(
                f"{', '.join(ends)} is one of the {count} workers, does not answer, "
                "and nothing starts it again; start it with cluster.restart("
                f"'{ends[0]}'), or let it leave the cluster: scale to fewer workers, "
                "which takes those first that are lost. What runs goes on without",
                task=ends[0],
            ) from error

    def _wait_moved(self, wanted: int, names: Sequence[str], polling: Polling) -> None:
        """Waits until the variables of all runs lie on so many ps.

        A leaver that dies before that is needed again, and its next process is told to
        leave as well.
        """
        number, most = self.cluster.arrangement, 0
        while True:
            late = [
                run
                for run in self._running(names, polling)
                if run.ps_bounds is not None and run.ps != wanted
            ]
            if not late:
                return
            most = max(most, self._staying_ps(wanted, most, polling))
            if not polling.wait():
                why = f": {late[0].rescale}" if late[0].rescale else ""
                raise RescaleError(
                    f"scale waited {self.timeout_s:g} s for the variables of run "
                    f"'{late[0].name}' to lie on {wanted} parameter servers, and it "
                    f"goes on with {late[0].ps}{why}; it moves them as soon as it can",
                    run=late[0].name,
                )
            if any(run.ps > wanted for run in late):
                self._ask(self.cluster.refresh, polling)
            if self.cluster.arrangement != number:
                number = self.cluster.arrangement
                for task in self.cluster.tasks("ps")[wanted:]:
                    self._tell(self.announce, task, polling)

    def _staying_ps(self, wanted: int, most: int, polling: Polling) -> int:
        """Returns how many ps stay.

        Args:
          wanted: how many there are to be.
          most: of how many that was known so far.
          polling: see ``ask_while_replaced``.

        Raises:
          RescaleError: somebody has let some of those that are wanted go since.
        """
        leaving = set(self._ask(self.cluster.status_now, polling).leaving)
        there = self.cluster.tasks("ps")
        stay = len([task for task in there if task not in leaving])
        if stay < wanted <= max(most, len(there)):
            raise RescaleError(
                f"scale was asked for {wanted} parameter servers, and for {stay} "
                "since, or some have left; what runs has so many as soon as it can"
            )
        return stay

    def _left_over(
        self,
        task: TaskName,
        polling: Polling,
        moves: Sequence[str] = (),
        *,
        copies: bool = False,
    ) -> list[str]:
        """Returns the names of what a task holds.

        Args:
          task: a ps, or a worker.
          polling: see ``ask_while_replaced``.
          moves: containers that are left out, and copies of them: they move.
          copies: also copies that are about to be dropped.

        Raises:
          TaskLostError: it does not answer.
        """
        query = frame(variable_query=pb.VariableQuery())
        call = self.cluster.call
        reply = self._ask(lambda: call("Master.Variables", query), polling)
        table = body_of(reply)
        for error in map(from_status, table.missing):
            if error.details.get("task") == task:
                raise error
        return [
            row.name
            for row in table.variables
            if row.task == task
            and not any(f"{row.container}-".startswith(f"{one}-") for one in moves)
            and (copies or not row.container.startswith(SNAPSHOT))
        ]


def _check_taken(news: Sequence[Event], late: Mapping[str, Sequence[TaskName]]) -> None:
    """Refuses to wait for workers whose data is not that of others.

    Args:
      news: of the cluster.
      late: those that are waited for, by run.

    Raises:
      RescaleError: why one takes no part.
    """
    waiting = {task for tasks in late.values() for task in tasks}
    for event in news:
        if event.kind == "refused" and event.subject in waiting:
            raise RescaleError(
                f"{event.text}; what runs goes on without it, and it takes part once "
                "it has the same data"
            )


def _still_holds(task: TaskName, names: Sequence[str], hint: str = "") -> RescaleError:
    count = f"{len(names)} variable{'s' if len(names) > 1 else ''}"
    return RescaleError(
        f"{task} leaves the cluster and holds {count} that no run moves, '{names[0]}' "
        "first; read what is needed of them, drop them with cluster.reset() or "
        f"Trainer.close(), and scale again{hint}",
        task=task,
    )


def _check_unused(task: TaskName, index: int, runs: Sequence[RunInfo]) -> None:
    """Refuses to let a lost ps go that a run has variables on."""
    for run in runs:
        if run.ps > index:
            raise RescaleError(
                f"{task} leaves the cluster and does not answer, and run '{run.name}' "
                "has variables there; start it again, wait until the run goes on, and "
                "scale then",
                task=task,
                run=run.name,
            )


def who_leaves(
    tasks: Sequence[TaskName],
    wanted: int,
    goers: Collection[TaskName],
    lost: Collection[TaskName],
    leaves: Collection[TaskName],
) -> list[TaskName]:
    """Returns the tasks of a job that are too many, in the order that they are told.

    First those that were told to leave, as they do in any case, then those that are
    lost, then those that end, then the others; of each the ones with the highest
    indices.

    Args:
      tasks: of the job, by index.
      wanted: how many stay.
      goers: those that were told to leave for good.
      lost: do not answer.
      leaves: take no new work any more.

    Example:
      >>> workers = [TaskName(f"/job:worker/task:{index}") for index in range(4)]
      >>> who_leaves(workers, 2, goers=[], lost=workers[1:2], leaves=[])
      ['/job:worker/task:1', '/job:worker/task:3']
      >>> who_leaves(workers, 3, goers=workers[:1], lost=workers[1:2], leaves=[])
      ['/job:worker/task:0']
    """
    falling = list(reversed(tasks))
    ranked = sorted(
        falling,
        key=lambda task: (task not in goers, task not in lost, task not in leaves),
    )
    return ranked[: max(0, len(tasks) - wanted)]


def wanted_tasks(job: str, count: object, now: int) -> int:
    """Returns how many tasks of a job are asked for.

    Args:
      job: "worker" or "ps".
      count: of these, or a change as text.
      now: how many there are that were not told to leave: so many are wanted already.

    Raises:
      ConfigError: it is neither, or leaves none.
      RescaleError: so many no cluster has.

    Example:
      >>> wanted_tasks("worker", "+2", 3), wanted_tasks("ps", "-1", 3)
      (5, 2)
      >>> wanted_tasks("worker", 6, 3)
      6
    """
    argument, names = _ARGUMENTS[job], _NAMES[job]
    if isinstance(count, str) and _CHANGE.fullmatch(count):
        wanted = now + int(count)
    elif isinstance(count, int) and not isinstance(count, bool):
        wanted = count
    else:
        raise ConfigError(
            f"scale({argument}={count!r:.40}): give how many {names} there are to be, "
            f'or how many more or fewer as text: {argument}=6, {argument}="+1", '
            f'{argument}="-2"'
        )
    if wanted < 1:
        raise ConfigError(
            f"scale({argument}={count!r:.40}) would leave {max(wanted, 0)} of {now} "
            f"{names}; a cluster keeps 1 at least, cluster.shutdown() ends it"
        )
    if wanted > MOST_TASKS:
        raise RescaleError(
            f"scale({argument}=…) asks for more than {MOST_TASKS:,} {names}, and "
            f"no cluster has so many; there are {now}"
        )
    return wanted


def _check_bounds(run: RunInfo, job: str, wanted: int, now: int) -> None:
    bounds = run.ps_bounds if job == "ps" else run.bounds
    names, argument = _NAMES[job], _ARGUMENTS[job]
    if bounds is None:
        if job == "ps" and wanted < now:
            raise RescaleError(
                f"scale(ps={wanted}): run '{run.name}' keeps its variables where they "
                "are; give its strategy elastic=jg.Elastic(ps=(least, most)), or wait "
                "for its end",
                run=run.name,
            )
        return
    least, most = bounds
    if wanted < least or (most is not None and wanted > most):
        text = f"{least} or more" if most is None else f"{least} to {most}"
        raise RescaleError(
            f"scale({argument}={wanted}): run '{run.name}' may have {text} {names}, as "
            f"jg.Elastic({argument}=…) says; it goes on as before",
            run=run.name,
        )
