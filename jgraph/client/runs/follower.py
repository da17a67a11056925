"""Follower of a run at its master: submits it, and yields its reports to the end."""

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeAlias, TypeVar, final

from jgraph.client.connection import Connection
from jgraph.client.runs.failover import ask_with_failover, lost_master, take_over
from jgraph.client.runs.holds import DrainHolds
from jgraph.client.runs.questions import Question, question_in
from jgraph.client.runs.runs import (
    RunInfo,
    position_of,
    reports_of,
    runs_of,
    stop_run,
    succeed_run,
)
from jgraph.client.runs.seen_reports import ReportDeduplicator
from jgraph.cluster import event_loop
from jgraph.cluster.loop_messages import (
    JOINS,
    LoopReport,
    first_handle,
    report_in,
)
from jgraph.cluster.polling import Polling
from jgraph.coordination.liveness.master_lease import END_S
from jgraph.coordination.run.succession import standbys_of
from jgraph.errors import (
    ClusterUnreachableError,
    FencedError,
    JGError,
    TaskLeavingError,
    TaskLostError,
)
from jgraph.graph.device import is_ps
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of
from jgraph.rpc.transport import Frame

_LOG = logging.getLogger("jgraph.loops")
_RECOVER_LOG = logging.getLogger("jgraph.recover")
_POLL_S: Final = 0.2
"""Between two looks: that a run has another master shows only by asking for it."""
_SUCCEED_S: Final = 1.0
"""After so long without another master the client names the one that it misses."""

Item: TypeAlias = LoopReport | Question
T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
class Owner:
    """What the client that a run ends with does for it.

    Attributes:
      give_data: gives a task the data that only the client has.
      holds: on the tasks that are read when the run is over.
      move_to: looks for the variables on so many ps from now on.
      look_at: looks for the parts of owners with who has them; the how many-th time.
    """

    give_data: Callable[[TaskName], None]
    holds: DrainHolds
    move_to: Callable[[int], None] = lambda ps: None
    look_at: Callable[[int, Mapping[TaskName, TaskName]], None] = lambda n, homes: None


@final
class Inbox(Generic[T]):
    """What came of a run and was not taken; from any thread.

    Urgent items come first, but only one of them overtakes another item: else nobody
    would hear how far a run is that is saved again and again.

    Example:
      >>> inbox = Inbox[int]()
      >>> for n, urgent in (1, False), (2, False), (3, True):
      ...     inbox.put(n, urgent=urgent)
      >>> taken = iter(inbox)
      >>> first = next(taken)
      >>> inbox.put(4, urgent=True)
      >>> first, [next(taken) for _ in range(3)]
      (3, [1, 2, 4])
    """

    def __init__(self) -> None:
        self._items: deque[tuple[T, bool]] = deque()
        self._overtaken = 0  # so many of the first items, each once
        self._news = threading.Condition()
        self._error: BaseException | None = None
        self._is_over = False

    def put(self, item: T, *, urgent: bool = False) -> None:
        """Adds an item."""
        with self._news:
            place = self._overtaken if urgent else len(self._items)
            self._items.insert(place, (item, urgent))
            self._news.notify()

    def end(self, error: BaseException | None) -> None:
        """Nothing more comes."""
        with self._news:
            self._error, self._is_over = error, True
            self._news.notify()

    def __iter__(self) -> Iterator[T]:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._items or self._is_over)
                if not self._items:
                    break
                item, urgent = self._items.popleft()
                before = max(0, self._overtaken - 1)
                self._overtaken = len(self._items) if urgent else before
            yield item
        if self._error is not None:
            raise self._error


@final
class RunFollower:
    """Reports of a run, from one master to the next, and what the master asks.

    Args:
      cluster: the client.
      info: which run; at its newest master.
      stop: set from another thread: asks the run to stop. Set when the run is over.
      owner: answers for the client that began the run; None: another one did, or none
        is needed.

    Attributes:
      info: the same; of the master that it has now.
      is_stopped: whether it was asked to stop before it was over.
    """

    def __init__(
        self,
        cluster: Connection,
        info: RunInfo,
        stop: threading.Event,
        owner: Owner | None = None,
    ) -> None:
        self.info = info
        self.is_stopped = False
        self._cluster = cluster
        self._stop = stop
        self._owner = owner
        self._is_over = threading.Event()
        self._position: dict[str, Any] | None = None
        self._tasks: dict[int, TaskName] = {}
        self._joiners: dict[int, str] = {}
        self._lost_replicas = set[int]()
        self._question_numbers = set[int]()
        self._waits = threading.Event()  # set: what was waited for is there
        self._inbox = Inbox[Item]()
        self._items = iter(self._inbox)
        self._thread = threading.Thread(
            target=self._follow, name="jgraph-follow", daemon=True
        )
        self._thread.start()
        threading.Thread(
            target=self._stop_when_asked, name="jgraph-stop-run", daemon=True
        ).start()

    def __iter__(self) -> Iterator[Item]:
        """Yields the reports, and the questions, that have not been yielded.

        A question that is not answered when the next item is asked for is declined.

        Raises:
          JGError: the run failed, or is lost.
        """
        for item in self._items:
            try:
                yield item
            finally:  # also if who iterates has failed
                if isinstance(item, Question):
                    self._over(item)

    def stop(self) -> None:
        """Asks the run to end after the steps in flight; returns at once."""
        self._stop.set()

    def close(self) -> None:
        """Follows the run no longer; it goes on."""
        if not self._is_over.is_set():
            self.is_stopped = self._stop.is_set()
        self._is_over.set()
        self._waits.set()
        self._stop.set()

    def position(self) -> dict[str, Any]:
        """Returns where in its data the run is, or was when its master last said so.

        Raises:
          JGError: no master ever did.
        """
        try:
            self._position = position_of(self._cluster, self.info)
        except JGError:
            if self._position is None:
                raise
        return self._position

    # ------------------------------------------------------------ questions

    def _over(self, question: Question) -> None:
        """Answers what nobody has answered: nothing is done."""
        if question.kind == "rest" and self._owner is not None:
            self._owner.holds.let_go(question.tasks)
        error = None
        if question.kind in {"newest", "state", "part"}:
            why = "the client of the run has ended it"
            error = TaskLostError(why, run=question.run)
        question.answer(error=error)

    def _take(self, question: Question) -> None:
        """Takes a question: answers it, or lets who follows the run do so."""
        if question.number in self._question_numbers or self._owner is None:
            return
        self._question_numbers.add(question.number)
        owner = self._owner
        match question.kind:
            case "data":
                self._beside(lambda: self._give_data(owner, question))
            case "rescaled":
                self._look_elsewhere(owner, question)
            case "moved":
                owner.look_at(*question.homes)
                question.answer()
            case "waits":
                ps = any(map(is_ps, question.tasks))  # the end of it is told, too
                level = logging.INFO if ps else logging.WARNING
                _RECOVER_LOG.log(level, "%s", question.what)
                self._waits.set()
                self._waits = waits = threading.Event()
                self._beside(lambda: self._look_for_starters(question, waits))
            case "state" | "part":
                self._renew_addresses()
                if question.ps:  # a master before may have been lost over a switch
                    owner.move_to(question.ps)
                self._inbox.put(question)
            case _:  # loops that stand still wait for no report
                self._inbox.put(question, urgent=question.kind == "halted")

    def _beside(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="jgraph-answer", daemon=True).start()

    def _give_data(self, owner: Owner, question: Question) -> None:
        error: JGError | None = None
        try:
            for task in question.tasks:
                owner.give_data(task)
        except JGError as caught:
            error = caught
        question.answer(error=error)

    def _look_elsewhere(self, owner: Owner, question: Question) -> None:
        """Looks for the variables where they are now."""
        error: JGError | None = None
        try:
            self._cluster.refresh()
            owner.move_to(question.ps)
            owner.holds.hold_ps(question.ps)
        except JGError as caught:
            error = caught
        question.answer(error=error)

    def _renew_addresses(self) -> None:
        """Learns where tasks are: one that was lost may have joined again elsewhere."""
        with suppress(JGError):  # what needs that address will say so
            self._cluster.refresh()

    def _look_for_starters(self, question: Question, waits: threading.Event) -> None:
        """Answers if nobody starts a task that the run waits for."""
        while True:
            try:
                self._cluster.check_startable()
            except JGError as error:
                question.answer(error=error)
                return
            if waits.wait(_POLL_S):
                return

    # ------------------------------------------------------------ reports

    def _report_of(self, message: Frame) -> LoopReport:
        body: pb.LoopReport = body_of(message)
        if body.task:
            again = body.replica in self._tasks and body.state == "running"
            self._tasks[body.replica] = TaskName(body.task)
            # Each process that joins has one of its own.
            program = first_handle(body.handle)
            if JOINS in program and self._joiners.get(body.replica) != program:
                self._joiners[body.replica] = program
                _RECOVER_LOG.warning("%s joined and takes part in the run", body.task)
            elif again and body.replica in self._lost_replicas:
                text = "%s answers again and takes part in the run"
                _RECOVER_LOG.warning(text, body.task)
            elif again:
                _LOG.info("%s goes on with another loop", body.task)
            self._lost_replicas.discard(body.replica)
        report = report_in(self._tasks, message)
        if report.state in {"lost", "left"}:
            self._lost_replicas.add(report.replica)
        if report.state == "lost":
            _LOG.warning("%s was lost; the other workers go on", report.task)
        if report.restored is not None:
            level = logging.INFO if report.restored.is_drain else logging.WARNING
            _RECOVER_LOG.log(level, "%s", report.restored)
            self._renew_addresses()
        return report

    def _follow(self) -> None:
        error: BaseException | None = None
        try:
            self._follow_masters()
        except BaseException as caught:  # noqa: BLE001  # who iterates raises it
            error = caught
        self.close()
        self._inbox.end(error)

    def _follow_masters(self) -> None:
        """Takes what the loops tell, at one master after the other."""
        deduplicators: defaultdict[int, ReportDeduplicator] = defaultdict(
            ReportDeduplicator
        )
        owner = self._owner is not None
        while True:
            try:
                if self._stop.is_set():  # a master before may not have heard it
                    stop_run(self._cluster, self.info)
                address = self._cluster.find(self.info.master)
                for reply in reports_of(self._cluster, self.info, owner=owner):
                    body = body_of(reply)
                    if body.HasField("question"):
                        name = self.info.name
                        self._take(question_in(self._cluster, address, name, body))
                    elif (new := deduplicators[body.replica].unseen(reply)) is not None:
                        self._pass_on(new)
            except (ClusterUnreachableError, TaskLostError, FencedError) as error:
                if not self._is_of_master(error):
                    raise
                self._move_to(self._next(error))
            else:
                return

    def _move_to(self, info: RunInfo) -> None:
        old, self.info = self.info.master, info
        if self._owner is not None:
            if old not in self._owner.holds.needed:
                self._owner.holds.let_go([old])
            self._owner.holds.hold_needed()

    def _pass_on(self, message: Frame) -> None:
        self._waits.set()
        report = self._report_of(message)
        if report.restored is not None and self._owner is not None:
            self._owner.holds.hold_needed()
        self._inbox.put(report)

    def _is_of_master(self, error: JGError) -> bool:
        """Whether it is the master that is lost, replaced or told to end."""
        master = self.info.master
        if isinstance(error, TaskLeavingError):
            return error.details.get("task") == master
        address = self._cluster.find(master)
        return isinstance(error, FencedError) or error.details.get("address") == address

    def _next(self, error: JGError) -> RunInfo:
        """Waits until the run has another master, which the client has from then on.

        Args:
          error: how the one before was.

        Raises:
          JGError: there is none.
        """
        if isinstance(error, TaskLeavingError | FencedError):
            newest = None
            with suppress(JGError):  # then it is gone already
                newest = self._newest()
            if newest is not None and newest.term > self.info.term:
                self._cluster.move_to(newest.master)
                return newest
            if newest is not None and newest.state == "failed":
                raise error
        if self._cluster.master == self.info.master:
            take_over(self._cluster, error)
        is_gone = not isinstance(error, TaskLeavingError | FencedError)
        names_it = is_gone and self._owner is not None
        return wait_for_new_master(self._cluster, self.info, error, names_it=names_it)

    def _newest(self) -> RunInfo | None:
        """Returns how the run stands at its newest master; None: nobody knows it."""
        name = self.info.name
        return next((run for run in runs_of(self._cluster) if run.name == name), None)

    def _stop_when_asked(self) -> None:
        self._stop.wait()  # it is also set when the run is over
        if self._is_over.is_set():
            return
        try:
            stop_run(self._cluster, self.info)
        except JGError as error:
            _LOG.warning("run '%s' could not be stopped: %s", self.info.name, error)


def wait_for_new_master(
    cluster: Connection, old: RunInfo, error: JGError, *, names_it: bool = False
) -> RunInfo:
    """Waits until a run has another master, which the client has from then on.

    Args:
      cluster: the client; it has another master already.
      old: the run at the master that was lost.
      error: why that is thought to be lost.
      names_it: tell the standby that it is to take over: the run ends with this client.

    Raises:
      JGError: there is none.
    """
    # The standby waits for a silent master, too.
    polling, succession = Polling(_POLL_S, 2 * END_S), Polling(0.0, _SUCCEED_S)
    while standbys_of(cluster.tasks(), old.master):
        runs = list[RunInfo]()
        # The task that the client asks meanwhile may be lost, too: it asks again.
        with suppress(ClusterUnreachableError, TaskLostError):
            runs = ask_with_failover(cluster, lambda: runs_of(cluster))
        for run in runs:
            if run.name == old.name and run.term > old.term:
                cluster.move_to(run.master)
                return run
            # One of a term before is of a master that was replaced, and still says so.
            if run.name != old.name or run.term != old.term:
                continue
            if run.state == "failed":
                raise error
            if run.state != "running":  # it ended while this client was away
                cluster.move_to(run.master)
                return run
        if names_it and not event_loop.run(succession.again()):
            succeed_run(cluster, old)
            names_it = False
        if not event_loop.run(polling.again()):
            break
    raise lost_master(error, old.master)
