"""Asynchronous parameter-server training: runs the workers' loops independently.

Between-graph replication: the step is traced and planned once, for worker 0, and the
same program serves the other workers under their own names. Each worker's server runs
its own loop over its part of the data; workers never wait for each other.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, final

from jgraph.client.cluster import Cluster
from jgraph.client.runs.follower import RunFollower, submit_run
from jgraph.client.runs.gates import open_gate, staleness_of
from jgraph.client.runs.loops import LoopHandle
from jgraph.cluster.loop_messages import LoopReport, LoopRequest
from jgraph.errors import ClusterError
from jgraph.plan.program.accumulate import gated, shards_of
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.train.data.data import Dataset
from jgraph.train.state.placement import plan_on
from jgraph.train.state.remote_state import RemoteState
from jgraph.train.state.runner import Chunk, Order, Position, Staleness
from jgraph.train.step.train_step import TrainStep
from jgraph.train.strategies.messages import about_run, dealt_data
from jgraph.train.strategies.options import AsyncPS
from jgraph.train.strategies.prepared import Prepared
from jgraph.train.strategies.remote_runs import RemoteRuns
from jgraph.train.strategies.workers import (
    chunk_of,
    end_loops,
    halted_chunk,
    rest,
)

__all__ = ["AsyncPS", "AsyncRunner"]


@final
class AsyncRunner:
    """Runs a step's program once per worker, in the workers' own loops."""

    def __init__(self, step: TrainStep, cluster: Cluster, strategy: AsyncPS) -> None:
        self._step = step
        self._cluster = cluster
        self._strategy = strategy
        self.state = RemoteState(step, cluster, strategy.durability)
        self._runs = RemoteRuns(self.state, self._plan)
        self._workers = self._runs.workers
        self._loops: LoopHandle | None = None
        self._in_flight = 0  # steps that may be applied though the loops stand still

    def prepare(self, dataset: Dataset, batch_size: int) -> None:
        """See ``Runner.prepare``."""
        self._runs.prepare(dataset, batch_size)

    def _plan(self, batch: Any) -> Prepared:
        graph = self._step.graph(batch)
        planned = plan_on(self._cluster, graph, self._workers.tasks[0])
        program = gated(planned.program, self._step.container)
        return Prepared(
            graph,
            replace(planned, program=program),
            self._step.reported(graph),
            shards_of(program),
            self._step.finite_check(graph),
        )

    def run(self, order: Order) -> Generator[Chunk, None, None]:
        """See ``Runner.run``."""
        prepared = self._runs.begin(order)
        if order.detached:
            yield from self._runs.followed(self._submit(prepared, order), prepared)
            return
        admit = partial(self._admit, prepared, order)
        with self._runs.under_way(admit) as (rejoin, drain_holds):
            loops = self._begin(prepared, order)
            loops.take_leave(drain_holds)
            self._workers.stop_with(order, loops.stop)
            try:
                for report in loops:
                    if order.stop.is_set():
                        loops.stop()
                    if report.state in {"lost", "left"}:
                        rejoin.lost(report.replica, report.task)
                    yield from self._chunks(report, loops, prepared.names)
                self.state.is_training = False
                yield from rest(loops)
            except GeneratorExit:
                end_loops(loops)
                raise
            finally:
                with self.state.lock, suppress(ClusterError):  # gone, the run with it
                    self._loops = None
                    self.state.position = loops.close()

    def _begin(self, prepared: Prepared, order: Order) -> LoopHandle:
        """Sets the loops of all workers going."""
        with self.state.lock:
            self._open_gate(prepared)
            requests = self._requests(prepared, order)
            data = dealt_data(self.state, order)
            self._loops = self.state.session.run_loops(requests, data)
            return self._loops

    def _submit(self, prepared: Prepared, order: Order) -> RunFollower:
        """Makes the master begin a run that it looks after."""
        with self.state.lock:
            gate = self._open_gate(prepared)
            about = about_run(self.state, order, prepared, gate)
            requests = self._requests(prepared, order)
            data = dealt_data(self.state, order)
            return submit_run(self._cluster, requests, about, data, order.stop)

    def _open_gate(self, prepared: Prepared) -> pb.OpenGate:
        gate, stale = self._step.container, self._strategy.max_staleness
        return open_gate(self._cluster, gate, prepared.shards, max_staleness=stale)

    def _chunks(
        self, report: LoopReport, loops: LoopHandle, names: Sequence[str]
    ) -> Iterator[Chunk]:
        self._runs.has_replaced |= report.state in {"lost", "left"}
        if report.state == "halted":
            self._in_flight = report.in_flight
            yield halted_chunk(loops)
            self._in_flight = 0
        else:
            self._workers.note(report)
            if len(report.steps):
                yield chunk_of(report, names, report.replica)

    def _requests(self, prepared: Prepared, order: Order) -> list[LoopRequest]:
        limit_s = self._strategy.step_timeout_s
        return self._workers.requests(prepared, order, step_timeout_s=limit_s)

    def _admit(self, prepared: Prepared, order: Order, replica: int) -> None:
        """Lets the worker of a replica take part again, from where the data is."""
        self._runs.admit(prepared, order, replica)
        with self.state.lock:
            if self._loops is not None:
                self._loops.add(self._requests(prepared, order)[replica])

    def position(self) -> Position:
        """See ``Runner.position``."""
        with self.state.lock:
            if self._loops is None:
                return self._runs.position()
            position = self._loops.position()
            return {**position, "again": position["again"] + self._in_flight}

    def inherit(self, old: "AsyncRunner") -> None:
        """See ``Runner.inherit``."""
        self._runs.inherit(old.state, old.position())

    def staleness(self) -> Staleness:
        """See ``Runner.staleness``."""
        last = self._runs.last
        if last is None or not last.handles:
            return {}
        gate = self._step.container
        return staleness_of(self._cluster, gate, last.shards, last.workers)

    def plan(self) -> Any:
        """See ``Runner.plan``."""
        return None if self._runs.last is None else self._runs.last.plan
