"""Synchronous parameter-server training: one update averages the workers' gradients.

Every worker computes the gradient of its own batch from the same parameters. The ps
average the first ones to come, the same set for every variable, and apply the mean with
one traced optax update; then all workers go on with the new parameters.

Source: Chen et al., "Revisiting Distributed Synchronous SGD", 2016 (backup workers);
tensorflow/python/training/sync_replicas_optimizer.py.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

from jgraph.client.cluster import Cluster
from jgraph.client.runs.gates import open_gate
from jgraph.cluster.loop_messages import ARBITER, LoopRequest, SyncRequest
from jgraph.coordination.data.batch_book import BatchBook
from jgraph.coordination.data.shares import Cut
from jgraph.coordination.step.step_metrics import CONTRIBUTIONS
from jgraph.coordination.sync.rounds import RoundRule
from jgraph.coordination.sync.secure_rounds import SumRule
from jgraph.errors import ConfigError
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName
from jgraph.plan.plan import Plan
from jgraph.plan.program.accumulate import MEAN, averaging, contributing, shards_of
from jgraph.plan.program.replicas import own_prefix
from jgraph.train.data.data import Dataset
from jgraph.train.privacy.secure_sum import SecureSum
from jgraph.train.run.members import RunMembers
from jgraph.train.run.rounds import Rounds
from jgraph.train.state.placement import plan_on
from jgraph.train.state.remote_state import RemoteState
from jgraph.train.state.runner import Chunk, Order, Position, Staleness
from jgraph.train.step.batch_pieces import BatchPieces
from jgraph.train.step.group_parts import GroupParts, group_parts
from jgraph.train.step.host_parts import HostParts, host_parts
from jgraph.train.step.sync_step import SyncStep
from jgraph.train.step.train_step import TrainStep
from jgraph.train.strategies.batch_share import check_data, check_rows, cut_for
from jgraph.train.strategies.elastic import elastic_order
from jgraph.train.strategies.options import SyncPS
from jgraph.train.strategies.prepared import Prepared
from jgraph.train.strategies.remote_runs import RemoteRuns

__all__ = ["SyncPS", "SyncRunner"]

_LATE = 100  # times as long as a round may be, before a client is given up


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
      pace_s: seconds of the steps that a worker takes alone, where it is told how many.
      rule: how many workers are invited to a step; None: all take part.
      secure: the ps see sums of what they contribute alone; None: they see each.

    Attributes:
      runs: what it has done on the cluster, and does.

    Raises:
      ConfigError: the cluster has too few workers for the strategy.
    """

    def __init__(
        self,
        step: TrainStep,
        cluster: Cluster,
        strategy: SyncPS,
        pace_s: float = 0.0,
        rule: RoundRule | None = None,
        secure: SecureSum | None = None,
    ) -> None:
        self._step = step
        self._secure = secure
        self._rule = rule
        self._pace_s = pace_s
        self._cluster = cluster
        self._strategy = strategy
        self.state = RemoteState(step, cluster, strategy.durability, together=True)
        orders = elastic_order(
            strategy.elastic,
            contributions=strategy.replicas_to_aggregate or 0,
            backup_workers=strategy.backup_workers,
        )
        self.runs = RemoteRuns(self.state, self._plan, strategy.elastic, orders)
        self._workers = self.runs.workers
        strategy.contributions(len(self._workers.tasks))  # which may be too few
        self._cut: Cut | None = None
        _ = self._sums  # which may be refused
        self.compute_wait_s: Mapping[int, float] = {}
        """For benchmarks: emulated computing by replica, see ``StepRun``."""

    @property
    def _contributions(self) -> int:
        """How many an update takes of the workers that a run begins with."""
        return self._strategy.contributions(len(self._workers.tasks))

    @property
    def _sums(self) -> SumRule | None:
        """How what is contributed is summed; None: the ps see each.

        Raises:
          ConfigError: the cluster has too few workers for that, or nobody knows.
        """
        if self._secure is None or self._rule is None:
            return None
        elastic, workers = self._strategy.elastic, len(self._workers.tasks)
        if elastic is not None:
            if elastic.most is None:
                raise ConfigError(
                    "secure_sum= with elastic=jg.Elastic(workers=(…, None)) needs to "
                    "know how many clients there are at most, as their sum has to have "
                    "room; write workers=(1, 16)"
                )
            workers = elastic.most
        local = self._step.local
        weighs = local is not None and local.rule.weighs
        return self._secure.rule(self._rule.drawn(workers), weighs=weighs)

    def _most(self, batch: Any) -> tuple[int, int]:
        """Returns of how many contributions, and workers, an update is at most.

        Args:
          batch: types of one.

        Raises:
          ConfigError: nobody knows, and arrays of that size are needed.
        """
        elastic, workers = self._strategy.elastic, len(self._workers.tasks)
        if elastic is None:
            return self._contributions, workers
        if elastic.most is not None:
            return self._strategy.contributions(elastic.most), elastic.most
        by_rows = self._step.row_step(batch)
        has_rows = by_rows is not None and bool(by_rows.tables.tables)
        if has_rows or self._step.compression is not None:
            raise ConfigError(
                "elastic=jg.Elastic(workers=(…, None)) with a table of rows, "
                "or with gradient_dtype=, needs to know how many workers there are at "
                "most, as arrays have that size; write workers=(1, 16)"
            )
        return self._contributions, workers

    def prepare(self, dataset: Dataset, batch_size: int) -> None:
        """See ``Runner.prepare``."""
        self.runs.prepare(dataset, self._piece(dataset, batch_size))

    def _piece(self, dataset: Dataset, batch_size: int) -> int:
        """Returns the examples of a piece; decides how batches are cut from now on."""
        share, elastic = self._strategy.batch_share, self._strategy.elastic
        workers = len(self._workers.tasks)
        self._cut = cut_for(share, elastic, batch_size, workers)
        self.runs.variant = self._cut
        if self._cut is None:
            return batch_size
        check_data(dataset)
        return batch_size // self._cut.each

    def run(self, order: Order) -> Generator[Chunk, None, None]:
        """See ``Runner.run``."""
        chunks = self.runs.run(
            order,
            lambda prepared, cut: partial(self._open_round, prepared, cut),
            cut=self._in_pieces,
            book=lambda cut: self._book(cut, self.state.global_step()),
        )
        for chunk in chunks:
            yield self._in_batches(chunk)

    def _in_pieces(self, order: Order) -> Order:
        """Returns an order whose batches are pieces for the workers there are."""
        return replace(order, batch_size=self._piece(order.dataset, order.batch_size))

    def _in_batches(self, chunk: Chunk) -> Chunk:
        """Returns a chunk that says of how many batches its updates were."""
        cut = self._cut
        if cut is None or not cut.total or chunk.batches is None:
            return chunk
        return replace(chunk, batches=len(chunk) * cut.total // cut.each)

    def position(self) -> Position:
        """See ``Runner.position``."""
        return self.runs.position()

    def staleness(self) -> Staleness:
        """See ``Runner.staleness``."""
        return {}  # every gradient is of the newest values

    def members(self) -> RunMembers:
        """See ``Runner.members``."""
        return self.runs.members.members()

    def rounds(self) -> Rounds:
        """See ``Runner.rounds``."""
        return self.runs.rounds.rounds()

    def plan(self) -> Any:
        """See ``Runner.plan``."""
        return None if self.runs.last is None else self.runs.last.plan

    def _plan(self, batch: Any, step: TrainStep) -> Prepared:
        cut = None if self._cut is None else BatchPieces(self._cut.most)
        if cut is not None:
            check_rows(step.row_step(batch))
        sync = SyncStep(step, batch, *self._most(batch), cut, self._secure)
        gate, ps = step.container, step.arrangement.ps
        apply_graph = sync.apply_graph()
        # Who counts the updates applies them, and decides what they are made of.
        count = step.variables[step.names.index("global_step")]
        leader = TaskName(str(count.device))
        apply_program = plan_on(self._cluster, apply_graph, leader, ps=ps).program
        reads = {v.name for p in apply_program.partitions for v in p.variables}
        reads = {name for name in reads if name.startswith(MEAN)}
        graph = sync.gradient_graph(reads)
        notes = [*step.arrangement.notes(step.variables), *self._strategy.notes]
        # A worker that holds variables has a part of its own in the step of each.
        owns = bool(step.owners)
        parts: GroupParts | None = None
        on_hosts: HostParts | None = None
        if self._strategy.dense == "xla":
            parts = group_parts(sync.dense_means(reads), self._workers.tasks)
        elif owns:
            on_hosts = host_parts(
                *(sync.dense_means(reads), self._workers.tasks),
                *(self._cluster.spec.hosts, self._strategy.gradient_dtype),
            )
        notes += [summed.note for summed in (parts, on_hosts) if summed]
        graph = replace(graph, notes=(*graph.notes, *notes))
        plans = [
            self._plan_for(worker, graph, ps, parts or on_hosts)
            for worker in (self._workers.tasks if owns else self._workers.tasks[:1])
        ]
        plan = plans[0]
        shards = [leader, *(s for s in shards_of(plan.program) if s != leader)]
        names = [*step.reported(apply_graph), CONTRIBUTIONS]
        finite = sync.finite_check(apply_graph)
        on_ps = (averaging(apply_program, gate, shards),)
        programs = {p.program.driver: p.program for p in plans} if owns else {}
        entropy = () if sync.entropy is None else sync.entropy.shape
        return Prepared(
            *(graph, plan, names, shards, finite, on_ps, programs),
            entropy=entropy,
            words=sync.words,
            group=parts and parts.order(self._strategy.step_timeout_s),
            host_sums=on_hosts and on_hosts.order(),
        )

    def _plan_for(
        self,
        worker: TaskName,
        graph: Graph,
        ps: Sequence[TaskName],
        parts: GroupParts | HostParts | None,
    ) -> Plan:
        """Returns the plan of one worker's contribution."""
        homes = None if parts is None else parts.homes(worker)
        plan = plan_on(self._cluster, graph, worker, own_prefix(0), ps, homes)
        program = contributing(plan.program, self._step.container)
        return replace(plan, program=program)

    def _book(self, order: Order, version: int) -> BatchBook:
        """Returns the book of a run that begins where the state is."""
        plan = order.dataset.plan(order.batch_size, order.seed)
        each = self._contributions
        if self._cut is not None:
            each = self._cut.of(len(self._workers.tasks))
        return BatchBook(plan, self.state.position, skip=version * each)

    def _open_round(
        self, prepared: Prepared, order: Order, run: str
    ) -> tuple[list[LoopRequest], None]:
        """Opens the gates; returns a request for each loop that is to begin."""
        version, shards = self.state.global_step(), prepared.shards
        gate, plan = (
            self._step.container,
            order.dataset.plan(order.batch_size, order.seed),
        )
        open_gate(
            *(self._cluster, gate, shards),
            synchronous=True,
            version=version,
            run=run,
            term=1,
            group=prepared.group,
            host_sums=prepared.host_sums,
            readers=self._strategy.max_readers or 0,
            handles=prepared.handles[: len(self._workers.tasks)],
        )
        limit = self._strategy.step_timeout_s
        # The ps see better who is missing, and say so first. A step goes on without one
        # who was invited and is late, who may then be so for long.
        patience_s = 2 * limit + 5 if self._rule is None else _LATE * limit + 5
        requests = self._workers.requests(
            *(prepared, order), step_timeout_s=patience_s, pace_s=self._pace_s
        )
        sums = self._sums
        if sums is not None:
            sums = replace(sums, words=prepared.words)
        workers = [
            replace(
                one,
                sums=sums,
                compute_wait_s=self.compute_wait_s.get(one.replica, 0.0),
                pieces=0 if self._cut is None else self._cut.most,
                pieces_feed="" if self._cut is None else "pieces",
            )
            for one in requests
        ]
        sync = SyncRequest(
            gate=gate,
            version=version,
            wanted=self._contributions,
            replicas={one.handle: one.task for one in workers},
            shards=shards,
            plan=plan,
            position=self._book(order, version).position(),
            halt_every=order.halts,
            halt_s=self.state.halt_s,
            cut=self._cut,
            entropy=prepared.entropy,
            rule=self._rule,
            sums=sums,
            group=prepared.group,
            host_sums=prepared.host_sums,
            readers=self._strategy.max_readers or 0,
        )
        arbiter = LoopRequest(
            task=shards[0],
            handle=prepared.handles[-1],
            data="",
            steps=order.steps,
            batch_size=0,
            replica=ARBITER,
            step_timeout_s=limit,
            report_every_s=order.report_every_s,
            sync=sync,
            finite=prepared.finite,
        )
        return [arbiter, *workers], None
