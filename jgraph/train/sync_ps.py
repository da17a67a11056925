"""Synchronous training: one update is the mean of what workers computed together.

Every worker computes the gradient of its own batch from the same parameters. The ps
average the first ones to come, the same set for every variable, and apply the mean with
one traced optax update; then all workers go on with the new parameters.

Source: Chen et al., "Revisiting Distributed Synchronous SGD", 2016 (backup workers);
tensorflow/python/training/sync_replicas_optimizer.py.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from jgraph.cluster.client import Cluster
from jgraph.cluster.gate_client import open_gate
from jgraph.cluster.loop_orders import LoopRequest, SyncRequest
from jgraph.cluster.loops import LoopHandle
from jgraph.errors import ConfigError, JGError
from jgraph.graph import markup
from jgraph.graph.device import DeviceSpec
from jgraph.graph.ir import Graph, TaskName
from jgraph.graph.sharding import Partitioner
from jgraph.plan.accumulate import MEAN, averaging, contributing, shards_of
from jgraph.plan.plan import Plan, plan
from jgraph.plan.program import Program
from jgraph.plan.spread import PlacementFunction
from jgraph.train.arguments import is_count
from jgraph.train.arrange import Arrangement
from jgraph.train.async_ps import AsyncPS, AsyncRunner
from jgraph.train.compress import GradientDtype, check_gradient_dtype, for_replica
from jgraph.train.data import Dataset
from jgraph.train.kept_copies import Durability, check_durability
from jgraph.train.on_tasks import Kept
from jgraph.train.placing import Placement
from jgraph.train.runner import Chunk, Events, Order, Position, Staleness, position_in
from jgraph.train.step import TrainStep
from jgraph.train.sync_step import SyncStep
from jgraph.train.workers import chunk_of, end_loops

CONTRIBUTIONS = "contributions"
"""Metric of a step: how many contributions its update is the mean of (int32)."""


@final
@dataclass(frozen=True, slots=True)
class SyncPS:
    """Train on a cluster's workers in step: each update averages a set of gradients.

    With ``b`` backup workers, the first ``workers - b`` contributions of a step count;
    later ones are dropped, counted for their worker, and that worker goes on with the
    newest parameters. When a worker goes away, a step takes as many contributions as
    workers are left; the metric ``contributions`` says how many each step had.

    ``batch_size`` is that of one worker: a step of ``n`` workers is one step of one
    process on their ``n`` batches together, which are neighbours in the order of the
    epoch. Every batch of an epoch counts exactly once: that of a late contribution, or
    of a worker that went away, is dealt again, and may then count in the next epoch's
    first steps. With backup workers a slow worker gets fewer batches.

    The model's state, such as BatchNorm statistics, is averaged like the gradients. Of
    a table of rows (see ``Trainer(sparse=…)``) each worker contributes the rows that it
    looked up, and one update is made of all these. The mean of a row is the sum of its
    gradients over the number of contributions: who did not look it up adds zeros. The
    same goes for hash tables, by keys.

    Args:
      replicas_to_aggregate: contributions of a step; all workers but the backups if
        unset.
      backup_workers: how many workers a step does not wait for.
      step_timeout_s: limit for one step, in seconds.
      variable_partitioner: cuts parameters into shards, as for ``AsyncPS``.
      partition_strategy: which rows a shard has, as for ``AsyncPS``.
      placement: chooses the ps of each parameter or shard, as for ``AsyncPS``.
      gradient_dtype: what gradients travel as, as for ``AsyncPS``. They are summed in
        float32. With a late contribution the left-overs that it carried are dropped.
      durability: what a run is left with when a ps is lost, as for ``AsyncPS``.

    Raises:
      ConfigError: a number outside what is possible.

    Example:
      >>> SyncPS(backup_workers=1).contributions(4)
      3
    """

    replicas_to_aggregate: int | None = None
    backup_workers: int = 0
    step_timeout_s: float = 60.0
    variable_partitioner: Partitioner | None = None
    partition_strategy: str = "div"
    placement: PlacementFunction | None = None
    gradient_dtype: GradientDtype | None = None
    durability: Durability = "checkpoint"

    def arrangement(self, cluster: Cluster) -> Arrangement:
        """Returns how variables are cut and placed on a cluster.

        Raises:
          ConfigError: the cluster has no ps or no worker.
        """
        return Arrangement(
            Placement(cluster, self.placement, "SyncPS"),
            self.variable_partitioner,
            self.partition_strategy,
            tuple(cluster.tasks("ps")),
        )

    def __post_init__(self) -> None:
        check_gradient_dtype(self.gradient_dtype)
        check_durability(self.durability)
        wanted = self.replicas_to_aggregate
        if wanted is not None and not is_count(wanted, 1):
            raise ConfigError(
                f"replicas_to_aggregate is {wanted!r}; a step averages at least 1 "
                "gradient, leave it out to average those of all workers"
            )
        backups = self.backup_workers
        if not is_count(backups, 0):
            raise ConfigError(
                f"backup_workers is {backups!r}; give a whole number, 0 or more"
            )
        if not self.step_timeout_s > 0:
            raise ConfigError(
                f"step_timeout_s is {self.step_timeout_s}; it must be over 0 seconds"
            )

    def contributions(self, workers: int) -> int:
        """Returns how many contributions a step of so many workers takes.

        Raises:
          ConfigError: more than there are workers.

        Example:
          >>> SyncPS(backup_workers=1).contributions(4)
          3
        """
        backups = self.backup_workers
        wanted = self.replicas_to_aggregate or workers - backups
        if wanted < 1 or wanted + backups > workers:
            asked = "" if self.replicas_to_aggregate is None else f"{wanted} workers "
            raise ConfigError(
                f"SyncPS is to average {asked}with {backups} backup workers, and the "
                f"cluster has {workers} workers; start more, or ask for less"
            )
        return wanted

    def _repr_html_(self) -> str:
        return markup.data(self)


@final
@dataclass(slots=True)
class _Prepared:
    graph: Graph
    plan: Plan
    apply: Program
    names: list[str]
    shards: list[TaskName]
    handles: list[str] = field(default_factory=list)


@final
class SyncRunner:
    """Runs gradient programs in the workers' loops, and updates on the ps.

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
        self.compute_wait_s: Mapping[int, float] = {}
        """For benchmarks: emulated computing by replica, see ``StepRun``."""

    @property
    def replicas(self) -> int:
        """See ``Runner.replicas``."""
        return len(self._workers.tasks)

    def prepare(self, dataset: Dataset, batch_size: int) -> None:
        """See ``Runner.prepare``."""
        batch = dataset.avals(batch_size)
        key = str(batch)
        if key not in self._prepared:
            self._prepared[key] = self._plan(batch)
        self._last = self._prepared[key]

    def run(self, order: Order) -> Generator[Chunk, None, None]:
        """See ``Runner.run``."""
        self.prepare(order.dataset, order.batch_size)
        prepared = self._last
        assert prepared is not None  # prepare sets it
        with self.state.lock:
            self.state.initialize()
            self._register(prepared)
            if self.state.copies is not None:
                *workers, apply = prepared.handles
                self.state.copies.open([prepared.plan.program, prepared.apply])
                self.state.copies.admit(0, workers)
                self.state.copies.admit(1, [apply])
            self.state.clear_residuals(prepared.graph)
            self._workers.upload(prepared.graph, order.dataset)
            version = self.state.global_step()
            gate, shards = self._step.container, prepared.shards
            open_gate(self._cluster, gate, shards, synchronous=True, version=version)
            requests = self._requests(prepared, order, version)
            loops = self.state.session.run_loops(requests)
        self.state.is_training = True
        try:
            yield from self._follow(loops, prepared, order)
        except GeneratorExit:
            end_loops(loops)
            raise
        except JGError:
            self._workers.forget_data()
            raise
        finally:
            self.state.is_training = False

    def _follow(
        self, loops: LoopHandle, prepared: _Prepared, order: Order
    ) -> Generator[Chunk, None, None]:
        for report in loops:
            if order.stop.is_set():
                loops.stop()
            if report.replica < self.replicas:
                self._workers.note(report)
                continue
            self._position = report.position
            if len(report.steps):
                yield chunk_of(report, prepared.names, replica=0)

    def global_step(self) -> int:
        """See ``Runner.global_step``."""
        return self.state.global_step()

    def values(self, *, model_only: bool = False) -> Sequence[Any]:
        """See ``Runner.values``."""
        return self.state.values(model_only=model_only)

    def keep(self) -> Kept:
        """See ``Runner.keep``."""
        return self.state.keep()

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

    def inherit(self, old: "SyncRunner") -> None:
        """See ``Runner.inherit``."""
        self.state.inherit(old.state)
        self._workers.done = [self.global_step()] * self.replicas
        self._position = old.position()
        if self.state.copies is not None and self._last is not None:
            programs = [self._last.plan.program, self._last.apply]
            self.state.copies.open(programs)

    def staleness(self) -> Staleness:
        """See ``Runner.staleness``."""
        return {}  # every gradient is of the newest values

    def untold(self) -> int:
        """See ``Runner.untold``: a ps tells of the updates, not the workers."""
        return 0

    def events(self) -> Events:
        """See ``Runner.events``."""
        return self.state.events()

    def plan(self) -> Any:
        """See ``Runner.plan``."""
        return None if self._last is None else self._last.plan

    def close(self) -> None:
        """See ``Runner.close``."""
        self.state.close()

    def _plan(self, batch: Any) -> _Prepared:
        sync = SyncStep(self._step, batch, self._wanted)
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
        names = [*self._step.metric_names(apply_graph), CONTRIBUTIONS]
        return _Prepared(
            graph, planned, averaging(applied, gate, shards), names, shards
        )

    def _planned(self, graph: Graph, driver: TaskName) -> Plan:
        return plan(
            graph,
            tasks=self._cluster.tasks(),
            driver=driver,
            default=DeviceSpec.from_string(driver),
            platforms=self._cluster.platforms,
        )

    def _register(self, prepared: _Prepared) -> None:
        if not prepared.handles:
            first, program = self._workers.tasks[0], prepared.plan.program
            programs = [
                for_replica(program.rename_task(first, worker), replica)
                for replica, worker in enumerate(self._workers.tasks)
            ]
            session = self.state.session
            prepared.handles = session.register_all([*programs, prepared.apply])

    def _requests(
        self, prepared: _Prepared, order: Order, version: int
    ) -> list[LoopRequest]:
        *handles, apply = prepared.handles
        limit = self._strategy.step_timeout_s
        workers = [
            replace(request, compute_wait_s=self.compute_wait_s.get(replica, 0.0))
            for replica, request in enumerate(
                self._workers.requests(
                    prepared.graph,
                    handles,
                    order,
                    # The ps see better who is missing, and say so first.
                    step_timeout_s=2 * limit + 5,
                )
            )
        ]
        plan = order.dataset.plan(order.batch_size, order.seed)
        sync = SyncRequest(
            gate=self._step.container,
            version=version,
            wanted=self._wanted,
            replicas=dict(zip(handles, self._workers.tasks, strict=True)),
            shards=prepared.shards,
            plan=plan,
            position=position_in(plan, self._position, version * self._wanted),
        )
        arbiter = LoopRequest(
            task=prepared.shards[0],
            handle=apply,
            data="",
            steps=order.steps,
            batch_size=0,
            replica=self.replicas,
            step_timeout_s=limit,
            report_every_s=order.report_every_s,
            sync=sync,
        )
        return [arbiter, *workers]
