"""Asynchronous parameter-server training: runs the workers' loops independently.

Between-graph replication: the step is traced and planned once, for worker 0, and the
same program serves the other workers under their own names. Each worker's server runs
its own loop over its part of the data; workers never wait for each other.
"""

from collections.abc import Generator
from dataclasses import replace
from functools import partial
from typing import Any, final

from jgraph.client.cluster import Cluster
from jgraph.client.runs.gates import open_gate, staleness_of
from jgraph.client.runs.submission import MakeLoops
from jgraph.cluster.loop_messages import LoopRequest
from jgraph.plan.program.accumulate import gated, shards_of
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.train.data.data import Dataset
from jgraph.train.run.members import RunMembers
from jgraph.train.run.rounds import Rounds
from jgraph.train.state.placement import plan_on
from jgraph.train.state.remote_state import RemoteState
from jgraph.train.state.runner import Chunk, Order, Position, Staleness
from jgraph.train.step.train_step import TrainStep
from jgraph.train.strategies.elastic import elastic_order
from jgraph.train.strategies.messages import dealt_data
from jgraph.train.strategies.options import AsyncPS
from jgraph.train.strategies.prepared import Prepared
from jgraph.train.strategies.remote_runs import RemoteRuns

__all__ = ["AsyncPS", "AsyncRunner"]


@final
class AsyncRunner:
    """Runs a step's program once per worker, in the workers' own loops.

    Attributes:
      runs: what it has done on the cluster, and does.
    """

    def __init__(self, step: TrainStep, cluster: Cluster, strategy: AsyncPS) -> None:
        self._step = step
        self._cluster = cluster
        self._strategy = strategy
        self.state = RemoteState(step, cluster, strategy.durability)
        elastic = strategy.elastic, elastic_order(strategy.elastic)
        self.runs = RemoteRuns(self.state, self._plan, *elastic)
        self._workers = self.runs.workers

    def prepare(self, dataset: Dataset, batch_size: int) -> None:
        """See ``Runner.prepare``."""
        self.runs.prepare(dataset, batch_size)

    def _plan(self, batch: Any, step: TrainStep) -> Prepared:
        graph, ps = step.graph(batch), step.arrangement.ps
        plan = plan_on(self._cluster, graph, self._workers.tasks[0], ps=ps)
        program = gated(plan.program, step.container)
        return Prepared(
            graph,
            replace(plan, program=program),
            step.reported(graph),
            shards_of(program),
            step.finite_check(graph),
        )

    def run(self, order: Order) -> Generator[Chunk, None, None]:
        """See ``Runner.run``."""
        deal = partial(dealt_data, self.state)
        yield from self.runs.run(order, self._loops_of, deal)

    def _loops_of(self, prepared: Prepared, order: Order) -> MakeLoops:
        """Returns what opens the gate and makes the loops of a run."""

        def make(run: str) -> tuple[list[LoopRequest], pb.OpenGate]:
            requests = self._workers.requests(
                prepared,
                order,
                step_timeout_s=self._strategy.step_timeout_s,
                prefetch=self._strategy.prefetch,
            )
            gate, stale = self._step.container, self._strategy.max_staleness
            shards = prepared.shards
            return requests, open_gate(self._cluster, gate, shards, max_staleness=stale)

        return make

    def position(self) -> Position:
        """See ``Runner.position``."""
        return self.runs.position()

    def staleness(self) -> Staleness:
        """See ``Runner.staleness``."""
        last = self.runs.last
        if last is None or not last.handles:
            return {}
        gate = self._step.container
        return staleness_of(self._cluster, gate, last.shards, last.workers)

    def members(self) -> RunMembers:
        """See ``Runner.members``."""
        return self.runs.members.members()

    def rounds(self) -> Rounds:
        """See ``Runner.rounds``."""
        return self.runs.rounds.rounds()

    def plan(self) -> Any:
        """See ``Runner.plan``."""
        return None if self.runs.last is None else self.runs.last.plan
