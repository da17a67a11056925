"""Synchronous parameter-server training: one update averages the workers' gradients.

Every worker computes the gradient of its own batch from the same parameters. The ps
average the first ones to come, the same set for every variable, and apply the mean with
one traced optax update; then all workers go on with the new parameters.

Source: Chen et al., "Revisiting Distributed Synchronous SGD", 2016 (backup workers);
tensorflow/python/training/sync_replicas_optimizer.py.
"""

from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, final

from jgraph.client.cluster import Cluster
from jgraph.client.connection import unique
from jgraph.client.runs.failover import begin_with_failover
from jgraph.client.runs.follower import RunFollower, submit_run
from jgraph.client.runs.gates import open_gate
from jgraph.client.runs.holds import DrainHolds
from jgraph.client.runs.loops import LoopHandle
from jgraph.clock import SystemClock
from jgraph.cluster.loop_messages import LoopReport, LoopRequest, SyncRequest
from jgraph.coordination.data.batch_book import BatchBook
from jgraph.graph.ir import TaskName
from jgraph.plan.program.accumulate import MEAN, averaging, contributing, shards_of
from jgraph.train.data.data import Dataset
from jgraph.train.model.metrics import CONTRIBUTIONS
from jgraph.train.state.placement import plan_on
from jgraph.train.state.remote_state import RemoteState
from jgraph.train.state.runner import Chunk, Order, Position, Staleness
from jgraph.train.step.sync_step import SyncStep
from jgraph.train.step.train_step import TrainStep
from jgraph.train.strategies.messages import about_run
from jgraph.train.strategies.options import SyncPS
from jgraph.train.strategies.prepared import Prepared
from jgraph.train.strategies.rejoin import Rejoin, is_one_back
from jgraph.train.strategies.remote_runs import RemoteRuns
from jgraph.train.strategies.workers import (
    chunk_of,
    end_loops,
    halted_chunk,
    rest,
)

__all__ = ["SyncPS", "SyncRunner"]


@final
class SyncRunner:
    """Runs gradient programs in the workers' loops, and updates on the ps.

    One loop, on a ps, decides what is averaged, for the workers that it begins with.
    When a lost one is back, or another server has become the master, that loop ends
    after an update, and the next one begins where it says.

    Args:
      step: the variables and the step; its variables have tasks.
      cluster: with jobs ``ps`` and ``worker``.
      strategy: how many contributions a step takes.

    Raises:
      ConfigError: the cluster has too few workers for the strategy.
    """

    def __init__(self, step: TrainStep, cluster: Cluster, strategy: SyncPS) -> None:
        self._step = step
        self._cluster = cluster
        self._strategy = strategy
        self.state = RemoteState(step, cluster, strategy.durability, together=True)
        self._runs = RemoteRuns(self.state, self._plan)
        self._workers = self._runs.workers
        self._replicas = len(self._workers.tasks)
        self._wanted = strategy.contributions(self._replicas)
        self._loops: LoopHandle | None = None
        self._present: set[int] = set()
        self._back: set[int] = set()
        """Replicas that will take part from the next loops on."""
        self.compute_wait_s: Mapping[int, float] = {}
        """For benchmarks: emulated computing by replica, see ``StepRun``."""

    def prepare(self, dataset: Dataset, batch_size: int) -> None:
        """See ``Runner.prepare``."""
        self._runs.prepare(dataset, batch_size)

    def run(self, order: Order) -> Generator[Chunk, None, None]:
        """See ``Runner.run``."""
        prepared = self._runs.begin(
            order, lambda: self._book(order, self.state.global_step())
        )
        self._present, self._back = set(range(self._replicas)), set()
        if order.detached:
            yield from self._runs.followed(self._submit(prepared, order), prepared)
            return
        admit = partial(self._admit, prepared, order)
        with self._runs.under_way(admit) as (rejoin, drain_holds):
            try:
                yield from self._follow(prepared, order, rejoin, drain_holds)
            except GeneratorExit:
                if self._loops is not None:
                    end_loops(self._loops)
                raise
            finally:
                self._loops = None

    def _follow(
        self, prepared: Prepared, order: Order, rejoin: Rejoin, drain_holds: DrainHolds
    ) -> Generator[Chunk, None, None]:
        clock, left = SystemClock(), order.steps
        began, sync = 0.0, self._sync(prepared, order)
        dropped: Counter[TaskName] = Counter()
        beside: list[Chunk] = []
        while left and not order.stop.is_set():
            if not self._present:
                workers = self._workers.tasks
                if not is_one_back(
                    self._cluster, workers, self._back, order.stop, order.wait_s
                ):
                    return
            with self.state.lock:
                self._present, self._back = self._present | self._back, set()
                begin = partial(self._begin, prepared, replace(order, steps=left))
                loops, sync = begin_with_failover(self._cluster, sync, begin)
                loops.take_leave(drain_holds)
                self._workers.stop_with(order, loops.stop)
                self._loops = loops
            now, late = clock.now(), Counter[TaskName]()
            began = began or now
            for report in loops:
                self._stop_if_due(order, report, loops)
                if report.state == "halted":
                    self.state.position = report.position
                    yield halted_chunk(loops)
                    continue
                if report.replica < self._replicas:
                    beside += self._of_a_worker(prepared, report, rejoin)
                    continue
                if report.position is not None:
                    self.state.position, late = report.position, Counter(report.dropped)
                if len(report.steps):
                    left -= len(report.steps)
                    seconds = report.seconds + now - began
                    told = replace(report, seconds=seconds, dropped=dropped + late)
                    yield replace(
                        chunk_of(told, prepared.names, replica=0, together=True),
                        of_workers=tuple(beside),
                    )
                    beside.clear()
            yield from rest(loops)
            dropped += late
            sync = replace(sync, term=loops.term)

    def _stop_if_due(self, order: Order, report: LoopReport, loops: LoopHandle) -> None:
        if self._workers.ran_out(report):
            order.stop.set()  # the others would wait for that one
        if order.stop.is_set():
            loops.stop()

    def _of_a_worker(
        self, prepared: Prepared, report: LoopReport, rejoin: Rejoin
    ) -> list[Chunk]:
        self._workers.note(report)
        if report.state in {"lost", "left"}:
            self._runs.has_replaced = True
            self._present.discard(report.replica)
            rejoin.lost(report.replica, report.task)
        return [chunk_of(report, (), report.replica)] if len(report.steps) else []

    def _admit(self, prepared: Prepared, order: Order, replica: int) -> None:
        """Lets the worker of a replica take part again, from the next update on."""
        self._runs.admit(prepared, order, replica)
        with self.state.lock:
            self._back.add(replica)
            loops = self._loops
        if loops is not None:
            loops.pause()

    def position(self) -> Position:
        """See ``Runner.position``."""
        return self._runs.position()

    def inherit(self, old: "SyncRunner") -> None:
        """See ``Runner.inherit``."""
        self._runs.inherit(old.state, old.position())

    def staleness(self) -> Staleness:
        """See ``Runner.staleness``."""
        return {}  # every gradient is of the newest values

    def plan(self) -> Any:
        """See ``Runner.plan``."""
        return None if self._runs.last is None else self._runs.last.plan

    def _plan(self, batch: Any) -> Prepared:
        sync = SyncStep(self._step, batch, self._wanted, self._replicas)
        gate = self._step.container
        apply_graph = sync.apply_graph()
        # Who counts the updates applies them, and decides what they are made of.
        step = self._step.variables[self._step.names.index("global_step")]
        leader = TaskName(str(step.device))
        applied = plan_on(self._cluster, apply_graph, leader).program
        used = {v.name for p in applied.partitions for v in p.variables}
        graph = sync.gradient_graph({name for name in used if name.startswith(MEAN)})
        planned = plan_on(self._cluster, graph, self._workers.tasks[0])
        planned = replace(planned, program=contributing(planned.program, gate))
        shards = [leader, *(s for s in shards_of(planned.program) if s != leader)]
        names = [*self._step.reported(apply_graph), CONTRIBUTIONS]
        finite = self._step.finite_check(apply_graph)
        on_ps = (averaging(applied, gate, shards),)
        return Prepared(graph, planned, names, shards, finite, on_ps)

    def _sync(self, prepared: Prepared, order: Order) -> SyncRequest:
        """Returns what all loops of a run that decide are told alike."""
        return SyncRequest(
            gate=self._step.container,
            version=self.state.global_step(),
            wanted=self._wanted,
            replicas={},
            shards=prepared.shards,
            plan=order.dataset.plan(order.batch_size, order.seed),
            run=unique("run"),
            halt_every=order.halts,
            halt_s=self.state.halt_s,
        )

    def _book(self, order: Order, version: int) -> BatchBook:
        """Returns the book of a run that begins where the state is."""
        plan = order.dataset.plan(order.batch_size, order.seed)
        return BatchBook(plan, self.state.position, skip=version * self._wanted)

    def _begin(self, prepared: Prepared, order: Order, sync: SyncRequest) -> LoopHandle:
        """Sets the loops of those workers going that are present."""
        requests = self._open_round(prepared, order, sync)
        return self.state.session.run_loops(requests)

    def _submit(self, prepared: Prepared, order: Order) -> RunFollower:
        """Makes the master begin a run that it looks after."""

        def begin(sync: SyncRequest) -> RunFollower:
            requests = self._open_round(prepared, order, sync)
            return submit_run(self._cluster, requests, about, None, order.stop)

        with self.state.lock:
            about = about_run(self.state, order, prepared, gate=None)
            sync = self._sync(prepared, order)
            return begin_with_failover(self._cluster, sync, begin)[0]

    def _open_round(
        self, prepared: Prepared, order: Order, sync: SyncRequest
    ) -> list[LoopRequest]:
        """Opens the gates; returns a request for each loop that is to begin."""
        version, shards = self.state.global_step(), prepared.shards
        open_gate(
            *(self._cluster, sync.gate, shards),
            synchronous=True,
            version=version,
            run=sync.run,
            term=sync.term,
        )
        limit = self._strategy.step_timeout_s
        # The ps see better who is missing, and say so first.
        patience_s = 2 * limit + 5
        requests = self._workers.requests(prepared, order, step_timeout_s=patience_s)
        workers = [
            replace(one, compute_wait_s=self.compute_wait_s.get(one.replica, 0.0))
            for one in requests
            if one.replica in self._present
        ]
        position = self._book(order, version).position()
        sync = replace(
            sync,
            version=version,
            replicas={one.handle: one.task for one in workers},
            position=position,
        )
        arbiter = LoopRequest(
            task=shards[0],
            handle=prepared.handles[-1],
            data="",
            steps=order.steps,
            batch_size=0,
            replica=self._replicas,
            step_timeout_s=limit,
            report_every_s=order.report_every_s,
            sync=sync,
            finite=prepared.finite,
        )
        return [arbiter, *workers]
