"""Synchronous parameter-server training: one update averages the workers' gradients.

Every worker computes the gradient of its own batch from the same parameters. The ps
average the first ones to come, the same set for every variable, and apply the mean with
one traced optax update; then all workers go on with the new parameters.

Source: Chen et al., "Revisiting Distributed Synchronous SGD", 2016 (backup workers);
tensorflow/python/training/sync_replicas_optimizer.py.
"""

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

from jgraph.client.cluster import Cluster
from jgraph.client.connection import unique
from jgraph.client.runs.failover import begin_with_failover, release_run
from jgraph.client.runs.gates import open_gate
from jgraph.client.runs.holds import DrainHolds
from jgraph.client.runs.loops import LoopHandle
from jgraph.clock import SystemClock
from jgraph.cluster.loop_messages import LoopReport, LoopRequest, SyncRequest
from jgraph.coordination.step.finite import FiniteCheck
from jgraph.errors import JGError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName
from jgraph.plan.plan import Plan, plan
from jgraph.plan.program.accumulate import MEAN, averaging, contributing, shards_of
from jgraph.plan.program.program import Program
from jgraph.train.data.data import Dataset
from jgraph.train.model.metrics import CONTRIBUTIONS
from jgraph.train.state.remote_arrays import RunSnapshot
from jgraph.train.state.runner import (
    Chunk,
    Events,
    Order,
    Position,
    Staleness,
    position_in,
)
from jgraph.train.step.compress import for_replica
from jgraph.train.step.sync_step import SyncStep
from jgraph.train.step.train_step import TrainStep
from jgraph.train.strategies.async_runner import AsyncPS, AsyncRunner
from jgraph.train.strategies.options import SyncPS
from jgraph.train.strategies.rejoin import Rejoin, is_one_back
from jgraph.train.strategies.workers import (
    chunk_of,
    end_loops,
    halted_chunk,
    rest,
    restored_chunk,
)

__all__ = ["SyncPS", "SyncRunner"]


@final
@dataclass(slots=True)
class _Prepared:
    graph: Graph
    plan: Plan
    apply: Program
    names: list[str]
    shards: list[TaskName]
    finite: FiniteCheck | None
    handles: list[str] = field(default_factory=list)


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
        # Variables, their values and checkpoints are the same business.
        self.state = AsyncRunner(step, cluster, AsyncPS(durability=strategy.durability))
        self._workers = self.state.workers
        self._wanted = strategy.contributions(len(self._workers.tasks))
        self._prepared: dict[str, _Prepared] = {}
        self._last: _Prepared | None = None
        self._position: Position = None
        self._loops: LoopHandle | None = None
        self._present: set[int] = set()
        self._back: set[int] = set()
        """Replicas that will take part from the next loops on."""
        self._drain_holds: DrainHolds | None = None
        self._replaced = False  # programs of workers, after one was lost
        self.compute_wait_s: Mapping[int, float] = {}
        """For benchmarks: emulated computing by replica, see ``StepRun``."""

    @property
    def replicas(self) -> int:
        """See ``Runner.replicas``."""
        return len(self._workers.tasks)

    def prepare(self, dataset: Dataset, batch_size: int) -> None:
        """See ``Runner.prepare``."""
        batch = dataset.avals(batch_size)
        key = f"{batch} {dataset.note}"
        if key not in self._prepared:
            prepared = self._plan(batch)
            noted = dataset.noted(prepared.plan.graph)
            prepared.plan = replace(prepared.plan, graph=noted)
            self._prepared[key] = prepared
        self._last = self._prepared[key]

    def run(self, order: Order) -> Generator[Chunk, None, None]:
        """See ``Runner.run``."""
        self.prepare(order.dataset, order.batch_size)
        prepared = self._last
        assert prepared is not None  # prepare sets it
        with self.state.lock:
            self.state.initialize()
            if order.save_every and not order.detached:
                self.state.prepare_to_keep(anew=self._replaced)
            self._register(prepared)
            # First: what counts contributions is copied with all that a ps holds.
            self.state.clear_residuals(prepared.graph)
            if self.state.copies is not None:
                *workers, apply = prepared.handles
                programs = [prepared.plan.program, prepared.apply]
                self.state.copies.open(programs, updates=1)
                self.state.copies.admit(0, workers)
                self.state.copies.admit(1, [apply])
            self._workers.upload(prepared.graph, order)
        self._present, self._back = set(range(self.replicas)), set()
        admit = None if order.detached else partial(self._admit, prepared, order)
        rejoin = Rejoin(self._cluster, admit)
        self.state.is_training = True
        self._workers.stop_with(order, self._stop_loops)
        drain_holds = self._drain_holds = DrainHolds(self._cluster)
        try:
            yield from self._follow(prepared, order, rejoin, drain_holds)
        except GeneratorExit:
            if self._loops is not None:
                end_loops(self._loops)
            raise
        except JGError:
            self._workers.forget_data()
            raise
        finally:
            rejoin.close()
            self._workers.end_feeding()
            self._loops, self.state.is_training = None, False

    def _follow(
        self, prepared: _Prepared, order: Order, rejoin: Rejoin, drain_holds: DrainHolds
    ) -> Generator[Chunk, None, None]:
        clock, left = SystemClock(), order.steps
        began, sync = 0.0, self._sync(prepared, order)
        end = sync.version + order.steps
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
                self._loops = loops
            now, late = clock.now(), Counter[TaskName]()
            began = began or now
            for report in loops:
                self._stop_if_due(order, report, loops)
                if report.state == "halted":
                    self._position = report.position
                    yield halted_chunk(loops)
                    continue
                if report.restored is not None:
                    self._replaced, self._position = True, report.position
                    left = end - report.restored.back_to
                    beside.clear()
                    yield restored_chunk(report.restored)
                    continue
                if report.replica < self.replicas:
                    beside += self._of_a_worker(prepared, report, rejoin)
                    continue
                if report.position is not None:
                    self._position, late = report.position, Counter(report.dropped)
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
            left = 0 if order.detached else left  # its master has begun all others
            dropped += late
            sync = replace(sync, term=loops.term)

    def _stop_if_due(self, order: Order, report: LoopReport, loops: LoopHandle) -> None:
        if self._workers.ran_out(report):
            order.stop.set()  # the others would wait for that one
        if order.stop.is_set():
            loops.stop()

    def _stop_loops(self) -> None:
        loops = self._loops
        if loops is not None:
            loops.stop()

    def _of_a_worker(
        self, prepared: _Prepared, report: LoopReport, rejoin: Rejoin
    ) -> list[Chunk]:
        self._workers.note(report)
        if report.state in {"lost", "left"}:
            self._replaced = True
            self._present.discard(report.replica)
            rejoin.lost(report.replica, report.task)
        elif report.handle not in {"", prepared.handles[report.replica]}:
            self._present.add(report.replica)  # its master has taken it back
            prepared.handles[report.replica] = report.handle
        return [chunk_of(report, (), report.replica)] if len(report.steps) else []

    def _admit(self, prepared: _Prepared, order: Order, replica: int) -> None:
        """Lets the worker of a replica take part again, from the next update on."""
        program = self._programs(prepared)[replica]
        (handle,) = self.state.session.register_all([program])
        if self.state.copies is not None:
            self.state.copies.admit(0, [handle])
        self._workers.renew(replica, prepared.graph, order.dataset)
        self.state.clear_residuals(prepared.graph, [replica])
        with self.state.lock:
            prepared.handles[replica] = handle
            self._back.add(replica)
            loops = self._loops
        if loops is not None:
            loops.pause()

    def global_step(self) -> int:
        """See ``Runner.global_step``."""
        return self.state.global_step()

    def values(
        self, *, model_only: bool = False, halted: bool = False
    ) -> Sequence[Any]:
        """See ``Runner.values``."""
        return self.state.values(model_only=model_only, halted=halted)

    def keep(self, taken: Callable[[], None] | None = None) -> RunSnapshot:
        """See ``Runner.keep``."""
        return self.state.keep(taken)

    def places(self) -> Sequence[Any]:
        """See ``Runner.places``."""
        return self.state.places()

    def nbytes(self) -> int:
        """See ``Runner.nbytes``."""
        return self.state.nbytes()

    def check_model(self) -> None:
        """See ``Runner.check_model``."""
        self.state.check_model()

    def position(self) -> Position:
        """See ``Runner.position``."""
        return self._position

    def load(self, values: Sequence[Any], position: Position = None) -> None:
        """See ``Runner.load``."""
        self.state.load(values)
        steps = int(self._step.unflatten(values)["global_step"])
        self._workers.done = [steps] * self.replicas
        self._position = position

    def adopt(self, position: Position) -> None:
        """Takes the variables as they are: another client has made them."""
        self.state.adopt(position)
        self._workers.done = [self.global_step()] * self.replicas
        self._position = position

    def inherit(self, old: "SyncRunner") -> None:
        """See ``Runner.inherit``."""
        self.state.inherit(old.state)
        self._workers.done = [self.global_step()] * self.replicas
        self._position = old.position()
        if self.state.copies is not None and self._last is not None:
            self.state.clear_residuals(self._last.graph)
            programs = [self._last.plan.program, self._last.apply]
            self.state.copies.open(programs, updates=1)

    def staleness(self) -> Staleness:
        """See ``Runner.staleness``."""
        return {}  # every gradient is of the newest values

    def events(self) -> Events:
        """See ``Runner.events``."""
        return self.state.events()

    def plan(self) -> Any:
        """See ``Runner.plan``."""
        return None if self._last is None else self._last.plan

    def let_go(self) -> None:
        """See ``Runner.let_go``."""
        if self._drain_holds is not None:
            release_run(self._cluster, self._drain_holds)
            self._drain_holds = None

    def close(self) -> None:
        """See ``Runner.close``."""
        self.state.close()

    def _plan(self, batch: Any) -> _Prepared:
        sync = SyncStep(self._step, batch, self._wanted, self.replicas)
        gate = self._step.container
        apply_graph = sync.apply_graph()
        # Who counts the updates applies them, and decides what they are made of.
        step = self._step.variables[self._step.names.index("global_step")]
        leader = TaskName(str(step.device))
        applied = self._planned(apply_graph, leader).program
        used = {v.name for p in applied.partitions for v in p.variables}
        graph = sync.gradient_graph({name for name in used if name.startswith(MEAN)})
        planned = self._planned(graph, self._workers.tasks[0])
        planned = replace(planned, program=contributing(planned.program, gate))
        shards = [leader, *(s for s in shards_of(planned.program) if s != leader)]
        names = [*self._step.reported(apply_graph), CONTRIBUTIONS]
        finite = self._step.finite_check(apply_graph)
        return _Prepared(
            graph, planned, averaging(applied, gate, shards), names, shards, finite
        )

    def _planned(self, graph: Graph, driver: TaskName) -> Plan:
        return plan(
            graph,
            tasks=self._cluster.tasks(),
            driver=driver,
            default=DeviceSpec.from_string(driver),
            platforms=self._cluster.platforms,
        )

    def _programs(self, prepared: _Prepared) -> list[Program]:
        """Returns what each worker runs, and then what is run on the ps."""
        first, program = self._workers.tasks[0], prepared.plan.program
        tasks = enumerate(self._workers.tasks)
        each = [for_replica(program.rename_task(first, w), n) for n, w in tasks]
        return [*each, prepared.apply]

    def _register(self, prepared: _Prepared) -> None:
        if not prepared.handles or self._replaced:
            self._replaced = False
            register = self.state.session.register_all
            prepared.handles = register(self._programs(prepared))

    def _sync(self, prepared: _Prepared, order: Order) -> SyncRequest:
        """Returns what all loops of a run that decide are told alike."""
        programs = dict(zip(prepared.handles, self._programs(prepared), strict=True))
        return SyncRequest(
            gate=self._step.container,
            version=self.state.global_step(),
            wanted=self._wanted,
            replicas={},
            shards=prepared.shards,
            plan=order.dataset.plan(order.batch_size, order.seed),
            run=unique("run"),
            detached=self.state.detached(
                *(order, prepared.graph, prepared.names, programs),
                recorded=[prepared.handles[0], prepared.handles[-1]],
                sync=True,
            ),
            halt_every=order.halts,
            halt_s=self.state.halt_s,
        )

    def _begin(
        self, prepared: _Prepared, order: Order, sync: SyncRequest
    ) -> LoopHandle:
        """Sets the loops of those workers going that are present."""
        version, shards = self.state.global_step(), prepared.shards
        open_gate(
            *(self._cluster, sync.gate, shards),
            synchronous=True,
            version=version,
            run=sync.run,
            term=sync.term,
        )
        *handles, apply = prepared.handles
        limit = self._strategy.step_timeout_s
        requests = self._workers.requests(
            prepared.graph,
            handles,
            order,
            # The ps see better who is missing, and say so first.
            step_timeout_s=2 * limit + 5,
            together=True,
        )
        workers = [
            replace(one, compute_wait_s=self.compute_wait_s.get(one.replica, 0.0))
            for one in requests
            if one.replica in self._present
        ]
        begin = position_in(sync.plan, self._position, version * self._wanted)
        # Who ended whom, of an earlier loop, is in no position of a ``Dispatch``.
        position = {**begin, "deaths": (self._position or {}).get("deaths", [])}
        sync = replace(
            sync,
            version=version,
            replicas={one.handle: one.task for one in workers},
            position=position,
        )
        arbiter = LoopRequest(
            task=shards[0],
            handle=apply,
            data="",
            steps=order.steps,
            batch_size=0,
            replica=self.replicas,
            step_timeout_s=limit,
            report_every_s=order.report_every_s,
            sync=sync,
            finite=prepared.finite,
        )
        return self.state.session.run_loops([arbiter, *workers])
