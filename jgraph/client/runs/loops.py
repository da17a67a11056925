"""Handle of a run's replica loops at the client: sends requests, yields reports."""

import logging
import queue
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, final

from jgraph.client.connection import Connection, unique
from jgraph.client.runs.failover import (
    RunLedger,
    ask_position,
    drop_programs,
    final_reports_of,
    lost_master,
    open_data,
    poll_until_reached,
    take_over,
    tell_lost,
)
from jgraph.client.runs.following import ReportStreams
from jgraph.client.runs.halts import LoopHalts
from jgraph.client.runs.holds import DrainHolds
from jgraph.client.runs.loop_items import Ended, Item, Loop, TaskDraining
from jgraph.client.wait_for_tasks import ready_tasks
from jgraph.clock import SystemClock
from jgraph.cluster import event_loop
from jgraph.cluster.deadlines import CONTROL_S
from jgraph.cluster.drain import told_to_end
from jgraph.cluster.loop_messages import (
    DealtData,
    LoopReport,
    LoopRequest,
    lost_report,
    order_in_run,
    plain,
    report_of,
    silent_report,
)
from jgraph.coordination.run.loop_outcome import LoopOutcome, is_link_loss, judge
from jgraph.errors import ClusterError, JGError, TaskLeavingError
from jgraph.graph.device import is_ps
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame

_LOG = logging.getLogger("jgraph.loops")
_POLL_S: Final = 0.2


@final
class LoopHandle:
    """Loops under way: iterate for their reports until all have ended.

    Iterating raises the first error of any loop, after asking the others to stop; that
    of a batch that cannot be trained on only when they have ended. Where data is dealt
    out, the loss of a worker is no error while another one goes on, or takes part again
    in time. Where ``DealtData.updates`` is set, neither is the loss of the master:
    another server becomes it, and deals out what is not known to be done.
    In synchronous training all loops end then; the last report says where.
    """

    def __init__(
        self,
        cluster: Connection,
        requests: Sequence[LoopRequest],
        data: DealtData | None = None,
    ) -> None:
        self._cluster = cluster
        self._drain_holds: DrainHolds | None = None
        self.leaving: list[TaskName] = []  # ps, held until all loops have ended
        self._clock = SystemClock()
        self._began = self._clock.now()
        self.term = 1
        self._run = self._name = unique("loop")
        self._data = data
        self._arbiter = next((r for r in requests if r.sync is not None), None)
        self._plan = ""
        sync = None if self._arbiter is None else self._arbiter.sync
        self._halts = LoopHalts(cluster, data)
        self._ledger: RunLedger | None = None
        if data is not None:
            self._plan = plain(data.plan)
            open_data(cluster, self._name, data)
            if data.updates is not None:
                self._ledger = RunLedger(data, data.updates, self.position())
        elif sync is not None:
            self._plan = plain(sync.plan)
            self._run, self.term = sync.run or self._name, sync.term
        self._following = ReportStreams(cluster, self._judged, requests, self._came)
        self._stopped = threading.Event()
        self._loops: set[Loop] = set()
        self._began_with = self._following.beside(ready_tasks(cluster))
        self._again = Counter[int]()  # how often a replica began anew
        self._lost: JGError | None = None  # how the last one ended, if it was lost
        self._unwell: JGError | None = None  # a batch that cannot be trained on
        for request in requests:
            self._start(request, began_s=0.0)

    def take_leave(self, drain_holds: DrainHolds) -> None:
        """Goes on without held tasks that are told to end, or ends if one is a ps."""
        self._drain_holds = drain_holds
        drain_holds.listen(lambda task: self._following.put(TaskDraining(task)))

    def __iter__(self) -> Iterator[LoopReport]:
        try:
            while self._loops or self._is_one_back():
                running = {one.request.task for one in self._loops}
                yield from self._taken(self._following.report(running))
            if self._unwell is not None:
                raise self._unwell
        finally:
            if self._loops:
                self.stop()

    def _taken(self, item: Item) -> Iterator[LoopReport]:
        match item:
            case Ended(verdict=LoopOutcome.UNWELL):
                # The others end in order, and tell what they have applied.
                self._unwell = self._unwell or item.error
                self._loops.discard(item.loop)
                self.stop()
                yield from self._halts.over(item.loop)
            case Ended(verdict=LoopOutcome.ARBITER_LOST):
                yield from self._await_arbiter(item.loop, item.error)
            case Ended():
                yield from self._over(item)
            case TaskDraining(task):
                yield from self._part_with(task)
            case JGError():
                raise item
            case LoopRequest():
                self._begin(item)
            case (loop, report):
                yield from self._halts.take(loop, self._noted(loop, report))

    def go_on(self) -> bool:
        """Lets loops go on that stand still; returns whether they did until now."""
        return self._halts.go_on()

    def add(self, request: LoopRequest) -> None:
        """Sets a loop going in place of one that was lost; from any thread.

        Nothing happens if the others end, or were asked to stop, before it begins.
        """
        self._following.put(request)

    def _begin(self, request: LoopRequest) -> None:
        if not self._stopped.is_set():
            self._again[request.replica] += 1
            self._start(request, self._clock.now() - self._began)

    def _start(self, request: LoopRequest, began_s: float) -> None:
        times = self._again[request.replica]
        name = f"{self._name}-{request.replica}" + (f"-{times}" if times else "")
        one = Loop(request, name, began_s, request.first_step)
        self._loops.add(one)
        self._halts.began(one)
        self._following.begin(one, self._order(one))

    def _came(self, one: Loop, report: LoopReport) -> LoopReport:
        """Dates a report as it comes."""
        return one.dated(report, self._clock.now() - self._began)

    def _noted(self, one: Loop, report: LoopReport) -> LoopReport:
        """Takes note of a report; returns it with times since the run began."""
        one.note(report)
        if self._ledger is not None:
            self._ledger.add(report.done)
        if report.state != "running":
            self._loops.discard(one)
            self._lost = report.error
        if report.state == "left":
            self._lost = told_to_end(report.task)
            self.pause()  # others go on without it
        return replace(report, seconds=report.seconds + one.began_s)

    def _is_one_back(self) -> bool:
        """Waits for a worker that takes part again, if the last one was lost.

        Raises:
          JGError: none came back in time.
        """
        lost, data = self._lost, self._data
        if lost is None or self._arbiter is not None or self._stopped.is_set():
            return False
        deadline = self._clock.now() + (0.0 if data is None else data.wait_s)
        if data is not None and data.wait_s:
            told = "no worker is left; the run waits up to %g s for one"
            _LOG.warning(told, data.wait_s)
        while data is not None and self._clock.now() < deadline:
            try:
                self._cluster.check_startable()
                item = self._following.next(_POLL_S)
            except queue.Empty:
                if self._stopped.is_set() or data.stop.is_set():
                    return False
                continue
            except ClusterError:  # nobody starts it again
                break
            if isinstance(item, LoopRequest):
                self._begin(item)
                return bool(self._loops)
            if isinstance(item, TaskDraining):
                list(self._taken(item))  # no loop is there that could tell something
        raise lost

    # ------------------------------------------------------------ data

    def position(self) -> dict[str, Any]:
        """Returns where in the data the run is, as plain data for a checkpoint."""
        return ask_position(self._cluster, "DataPosition", self._name, self._ledger)

    def close(self) -> dict[str, Any]:
        """Ends the dealing of the data and returns the last position."""
        return ask_position(self._cluster, "CloseDataRun", self._name, self._ledger)

    # ------------------------------------------------------------ another master

    def _part_with(self, task: TaskName) -> Iterator[LoopReport]:
        """Takes what the run has on a task that is told to end."""
        if is_ps(task):
            self.leaving.append(task)
            self.stop()
            return
        if task == self._cluster.master and (self._ledger or self._arbiter):
            yield from self._fail_over(told_to_end(task))
        if self._drain_holds is not None:
            self._drain_holds.let_go([task])

    def _fail_over(self, error: JGError) -> Iterator[LoopReport]:
        """Goes on with another master, from what is known to be done.

        Raises:
          JGError: there is none.
        """
        old = self._cluster.master
        take_over(self._cluster, error)
        self.term += 1
        if self._drain_holds is not None:
            self._drain_holds.hold([self._cluster.master])
        yield from self._come_so_far(error)
        loops, self._loops = list(self._loops), set()
        self._halts.all_over()
        orders = [one.stop_order(self._run, self.term, account=True) for one in loops]
        leaves = isinstance(error, TaskLeavingError)  # it still answers
        accounts = final_reports_of(self._cluster, orders, None if leaves else old)
        goes_on, left = list[Loop](), list[Loop]()
        for one, account in zip(loops, accounts, strict=True):
            report = one.accounted(account)
            if report is None:
                continue
            (left if report.state == "left" else goes_on).append(one)
            if self._ledger is not None and report.state != "left":
                state = "stopped" if self._stopped.is_set() else "running"
                report = replace(report, state=state)
            elif one.request is self._arbiter and report.state == "failed":
                raise lost_master(error, old)
            yield self._noted(one, report)
        lost = [one for one in loops if one not in (*goes_on, *left)]
        # Nothing that is still under way there changes anything from here on.
        drop_programs(self._cluster, [one.request.handle for one in lost])
        if any(one.request is self._arbiter for one in lost):
            raise lost_master(error, old)  # with the ps that it was
        if self._ledger is not None and not self._stopped.is_set():
            self._name = unique("loop")
            open_data(self._cluster, self._name, self._ledger.left())
            for one in goes_on:
                self._begin(replace(one.request, first_step=one.next_step))
        for one in lost:
            _LOG.warning("%s was lost; the other workers go on", one.request.task)
            yield self._noted(one, lost_report(one.request, lost_master(error, old)))

    def _come_so_far(self, error: JGError) -> Iterator[LoopReport]:
        """Yields what had come before the calls of the old master ended."""
        # Those of a master that leaves would not end.
        wait_s = 0.0 if isinstance(error, TaskLeavingError) else CONTROL_S
        for item in self._following.cut(wait_s):
            if isinstance(item, LoopRequest | TaskDraining):
                self._following.put(item)
            else:
                yield from self._taken(item)

    # ------------------------------------------------------------ orders and reports

    def stop(self) -> None:
        """Asks all loops to end after their steps in flight; returns at once."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        for one in list(self._loops):  # another thread may begin one
            order = one.stop_order(self._run, self.term)
            with suppress(JGError):
                self._cluster.call("Master.StopLoop", frame(stop_loop=order))

    def pause(self) -> None:
        """Asks the arbiter in synchronous training to end, and returns at once."""
        if self._arbiter is not None:
            order = self._to_arbiter(self._arbiter)
            order.run, order.term, order.pause = self._run, self.term, True
            with suppress(JGError):
                self._cluster.call("Master.StopLoop", frame(stop_loop=order))

    def _order(self, one: Loop) -> pb.RunLoop:
        return order_in_run(
            *(one.request, one.name),
            run=self._run,
            term=self.term,
            name="" if self._arbiter is None and self._data is None else self._name,
            plan=self._plan,
            arbiter=self._arbiter,
        )

    def _judged(self, one: Loop, error: JGError, master: TaskName, term: int) -> Item:
        """Returns what the end of a loop's reports means."""
        request = one.request
        decides = request is self._arbiter
        verdict = judge(error, request.task, master, decides=decides)
        if verdict is LoopOutcome.WORKER_LOST and self._can_do_without:
            self._tell_lost(request, error)
            return one, lost_report(request, error)
        if verdict in {LoopOutcome.FAILED, LoopOutcome.WORKER_LOST}:
            return error
        return Ended(one, error, master, term, verdict)

    def _over(self, end: Ended) -> Iterator[LoopReport]:
        """Goes on without whoever is lost.

        Raises:
          JGError: that cannot be done.
        """
        one, error = end.loop, end.error
        named = TaskName(str(error.details.get("task", end.master)))
        if end.verdict is LoopOutcome.LINK_LOST and self._can_do_without:
            ready = event_loop.run(ready_tasks(self._cluster))
            if is_link_loss(named, self._began_with.result(), ready):
                drop_programs(self._cluster, [one.request.handle])
                self._tell_lost(one.request, error)
                lost = lost_report(one.request, error)
                yield from self._halts.take(one, self._noted(one, lost))
                return
        if named != end.master:
            raise error
        if self._ledger is None and self._arbiter is None:
            raise lost_master(error, end.master)
        if end.term == self.term:  # of each loop; the first one counts
            yield from self._fail_over(error)

    def _await_arbiter(self, one: Loop, error: JGError) -> Iterator[LoopReport]:
        """Waits for the link to the arbiter, and takes from there how far that came.

        Raises:
          JGError: ``error``, as it is not the link alone that is lost.
        """
        began = self._began_with.result()
        for _ in poll_until_reached(self._cluster, one.request.task, began, error):
            if self._stopped.is_set():
                raise error
            yield silent_report(one.request)
            with suppress(queue.Empty):
                yield from self._taken(self._following.next(_POLL_S))
        order = one.stop_order(self._run, self.term, account=True)
        (account,) = final_reports_of(self._cluster, [order])
        if isinstance(account, JGError) or body_of(account).state == "failed":
            raise error
        yield self._noted(one, report_of(one.request, account))

    @property
    def _can_do_without(self) -> bool:
        """Whether a worker's loss is no error while another one goes on."""
        return self._arbiter is not None or self._data is not None

    def _tell_lost(self, request: LoopRequest, error: JGError) -> None:
        _LOG.warning("%s was lost; the other workers go on: %s", request.task, error)
        if self._arbiter is not None:
            order = self._to_arbiter(self._arbiter)
            order.lost = request.task
            self._following.beside(tell_lost(self._cluster, order))

    def _to_arbiter(self, arbiter: LoopRequest) -> pb.StopLoop:
        return pb.StopLoop(loop=f"{self._name}-{arbiter.replica}", task=arbiter.task)
