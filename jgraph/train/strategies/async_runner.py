"""Asynchronous parameter-server training: runs the workers' loops independently.

Between-graph replication: the step is traced and planned once, for worker 0, and the
same program serves the other workers under their own names. Each worker's server runs
its own loop over its part of the data; workers never wait for each other.
"""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

from jgraph.client.cluster import Cluster
from jgraph.client.runs.failover import release_run
from jgraph.client.runs.gates import open_gate, staleness_of
from jgraph.client.runs.holds import DrainHolds
from jgraph.client.runs.loops import LoopHandle
from jgraph.client.session import Session
from jgraph.client.state.snapshot_handle import SnapshotHandle
from jgraph.cluster.deadlines import bulk_timeout_s
from jgraph.cluster.loop_messages import Detached, LoopReport, LoopRequest
from jgraph.errors import ClusterError, JGError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName
from jgraph.graph.variable import Variable
from jgraph.plan.plan import Plan, plan
from jgraph.plan.program.accumulate import gated, shards_of
from jgraph.plan.program.program import Program
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.train.checkpoint.remote_saver import saves_order
from jgraph.train.data.data import Dataset
from jgraph.train.hash_tables.hash_state import NO_KEYS, TableRows
from jgraph.train.state.remote_arrays import (
    RemoteArray,
    RunSnapshot,
    arrays_of,
    places_of,
    releasing_after_an_error,
)
from jgraph.train.state.runner import Chunk, Events, Order, Position, Staleness
from jgraph.train.state.size_limits import KEPT_BYTES, check_sizes, total_nbytes
from jgraph.train.step.compress import begun, for_replica
from jgraph.train.step.train_step import TrainStep
from jgraph.train.strategies.durability import make_durable_copies
from jgraph.train.strategies.messages import dealt_data, restart_programs, run_info
from jgraph.train.strategies.options import AsyncPS
from jgraph.train.strategies.rejoin import Rejoin
from jgraph.train.strategies.workers import (
    Workers,
    chunk_of,
    end_loops,
    halted_chunk,
    rest,
    restored_chunk,
    shares,
)

__all__ = ["AsyncPS", "AsyncRunner"]


@final
@dataclass(slots=True)
class _Prepared:
    graph: Graph
    plan: Plan
    names: list[str]
    handles: list[str]
    workers: dict[str, TaskName] = field(default_factory=dict)
    """By handle, also of programs of workers that were lost."""

    def programs(self, workers: Sequence[TaskName]) -> dict[str, Program]:
        """Returns what each worker runs, by handle."""
        return {h: self.program(n, workers) for n, h in enumerate(self.handles)}

    def program(self, replica: int, workers: Sequence[TaskName]) -> Program:
        """Returns what the worker of a replica runs."""
        program = self.plan.program.rename_task(workers[0], workers[replica])
        return for_replica(program, replica)


@final
class AsyncRunner:
    """Runs a step's program once per worker, in the workers' own loops."""

    def __init__(self, step: TrainStep, cluster: Cluster, strategy: AsyncPS) -> None:
        self._step = step
        self._cluster = cluster
        self._strategy = strategy
        self.session: Session = cluster.session()
        self.copies = make_durable_copies(
            strategy.durability, cluster, self.session, step
        )
        self.workers = Workers(step, cluster, self.session)
        self._tables = TableRows(cluster)
        # A run is looked at from other threads than the one that trains.
        self.lock = threading.RLock()
        self._prepared: dict[str, _Prepared] = {}
        self._last: _Prepared | None = None
        self._initialized = False
        self._position: Position = None
        self._loops: LoopHandle | None = None
        self.is_training = False
        self._drain_holds: DrainHolds | None = None
        self._replaced = False  # programs of workers, after one was lost
        self._copy_at_once: Callable[[], SnapshotHandle] | None = None
        self._in_flight = 0  # steps that may be applied though the loops stand still

    @property
    def halt_s(self) -> float:
        """How long loops stand still at most while the run is saved."""
        return bulk_timeout_s(total_nbytes(self._step.variables))

    @property
    def replicas(self) -> int:
        """See ``Runner.replicas``."""
        return len(self.workers.tasks)

    def prepare(self, dataset: Dataset, batch_size: int) -> None:
        """See ``Runner.prepare``."""
        batch = dataset.avals(batch_size)
        key = f"{batch} {dataset.note}"
        if key not in self._prepared:
            graph = dataset.noted(self._step.graph(batch))
            names = self._step.reported(graph)
            planned = plan(
                graph,
                tasks=self._cluster.tasks(),
                driver=self.workers.tasks[0],
                default=DeviceSpec.from_string(self.workers.tasks[0]),
                platforms=self._cluster.platforms,
            )
            program = gated(planned.program, self._step.container)
            planned = replace(planned, program=program)
            self._prepared[key] = _Prepared(graph, planned, names, [])
        self._last = self._prepared[key]

    def run(self, order: Order) -> Generator[Chunk, None, None]:
        """See ``Runner.run``."""
        self.prepare(order.dataset, order.batch_size)
        prepared = self._last
        assert prepared is not None  # prepare sets it
        with self.lock:
            self.initialize()
            if order.save_every and not order.detached:
                self.prepare_to_keep(anew=self._replaced)
            self._register(prepared)
            if self.copies is not None:
                self.copies.open([prepared.plan.program])
                self.copies.admit(0, prepared.handles)
            self.clear_residuals(prepared.graph)
            self.workers.upload(prepared.graph, order)
            gate = open_gate(
                self._cluster,
                self._step.container,
                shards_of(prepared.plan.program),
                max_staleness=self._strategy.max_staleness,
            )
            programs = prepared.programs(self.workers.tasks)
            detached = self.detached(
                *(order, prepared.graph, prepared.names, programs),
                recorded=prepared.handles[:1],
                gate=gate,
            )
            loops = self._loops = self.session.run_loops(
                self._requests(prepared, order),
                dealt_data(
                    order,
                    self._position,
                    self.workers.done,
                    self.global_step,
                    detached,
                    self.halt_s,
                ),
            )
        self.is_training = True
        self.workers.stop_with(order, loops.stop)
        admit = partial(self._admit, prepared, order, loops)
        rejoin = Rejoin(self._cluster, None if order.detached else admit)
        self._drain_holds = DrainHolds(self._cluster)
        loops.take_leave(self._drain_holds)
        try:
            for report in loops:
                if order.stop.is_set():
                    loops.stop()
                if report.state in {"lost", "left"}:
                    rejoin.lost(report.replica, report.task)
                yield from self._chunks(report, loops, prepared.names)
            self.is_training = False
            yield from rest(loops)
        except GeneratorExit:
            end_loops(loops)
            raise
        except JGError:
            self.workers.forget_data()
            raise
        finally:
            rejoin.close()
            self.workers.end_feeding()
            with self.lock:
                self._loops, self.is_training = None, False
                with contextlib.suppress(ClusterError):  # gone, and the run with it
                    self._position = loops.close()

    def _chunks(
        self, report: LoopReport, loops: LoopHandle, names: Sequence[str]
    ) -> Iterator[Chunk]:
        self._replaced |= report.state in {"lost", "left", "restored"}
        if report.state == "halted":
            self._in_flight = report.in_flight
            yield halted_chunk(loops)
            self._in_flight = 0
        elif report.restored is not None:
            yield restored_chunk(report.restored)
        else:
            self.workers.note(report)
            if len(report.steps):
                yield chunk_of(report, names, report.replica)

    def _register(self, prepared: _Prepared) -> None:
        if prepared.handles and not self._replaced:
            return
        workers = self.workers.tasks
        prepared.handles = self.session.register_all(
            [prepared.program(n, workers) for n in range(len(workers))]
        )
        prepared.workers = dict(zip(prepared.handles, workers, strict=True))
        self._replaced = False

    def _requests(self, prepared: _Prepared, order: Order) -> list[LoopRequest]:
        limit_s, handles = self._strategy.step_timeout_s, prepared.handles
        requests = self.workers.requests
        return requests(
            *(prepared.graph, handles, order),
            step_timeout_s=limit_s,
            finite=self._step.finite_check(prepared.graph),
        )

    def _admit(
        self, prepared: _Prepared, order: Order, loops: LoopHandle, replica: int
    ) -> None:
        """Lets the worker of a replica take part again, from where the data is."""
        worker = self.workers.tasks[replica]
        program = prepared.program(replica, self.workers.tasks)
        (handle,) = self.session.register_all([program])
        if self.copies is not None:
            self.copies.admit(0, [handle])
        self.workers.renew(replica, prepared.graph, order.dataset)
        self.clear_residuals(prepared.graph, [replica])
        with self.lock:
            prepared.handles[replica] = handle
            prepared.workers[handle] = worker
            again = self._requests(prepared, order)[replica]
        loops.add(again)

    def position(self) -> Position:
        """See ``Runner.position``."""
        with self.lock:
            if self._loops is None:
                return self._position
            position = self._loops.position()
            return {**position, "again": position["again"] + self._in_flight}

    def global_step(self) -> int:
        """See ``Runner.global_step``."""
        with self.lock:
            if not self._initialized:
                return 0
            variable = self._step.variables[self._step.names.index("global_step")]
            return int(self.session.read([variable])["global_step"])

    def values(
        self, *, model_only: bool = False, halted: bool = False
    ) -> Sequence[Any]:
        """See ``Runner.values``."""
        if model_only:
            self.check_model()
        wanted = self._model() if model_only else self._step.variables
        wanted = [v for v in wanted if v.spec.table is None]
        with self.lock:
            self.initialize()
            # A large model has no room for another of itself.
            at_once = self.is_training and total_nbytes(wanted) <= KEPT_BYTES
            at_once &= not halted  # nothing changes meanwhile
            read = self.session.snapshot if at_once else self.session.read
            values = read(wanted)
            for table in self._step.tables:
                values |= self._tables.read(table)
        return [values.get(name) for name in self._step.names]

    def prepare_to_keep(self, *, anew: bool = False) -> None:
        """Compiles what copies the state while loops stand still, before they do.

        With ``anew`` also if that was done: a task may have been started again.
        """
        plain = [v for v in self._step.variables if v.spec.table is None]
        needed = anew or self._copy_at_once is None
        if needed and total_nbytes(plain) <= KEPT_BYTES:
            self._copy_at_once = self.session.snapshots.prepared(plain)

    def keep(self, taken: Callable[[], None] | None = None) -> RunSnapshot:
        """See ``Runner.keep``; rows of tables come, they are sorted by key."""
        plain = [v for v in self._step.variables if v.spec.table is None]
        with self.lock:
            self.initialize()
            # A large model has no room for another of itself.
            at_once = self.is_training and total_nbytes(plain) <= KEPT_BYTES
            held = self._hold(plain, at_once=at_once, halted=taken is not None)
            with releasing_after_an_error(held):
                found: dict[str, Any] = {}
                for table in self._step.tables:
                    found |= self._tables.read(table)
                if taken is not None and at_once:
                    taken()
                found |= arrays_of(self._cluster, held, plain)
        values = [found.get(name) for name in self._step.names]
        return RunSnapshot(values, held.release, is_live=not at_once)

    def _hold(
        self, plain: Sequence[Variable], *, at_once: bool, halted: bool
    ) -> SnapshotHandle:
        snapshots = self.session.snapshots
        if not at_once:
            return snapshots.live(plain)
        if not halted:
            return snapshots.take(plain)
        if self._copy_at_once is None:
            self.prepare_to_keep()
        copy, self._copy_at_once = self._copy_at_once, None
        assert copy is not None  # prepared
        held = copy()  # what another master knows nothing of is prepared anew
        self._copy_at_once = copy
        return held

    def places(self) -> Sequence[Any]:
        """See ``Runner.places``."""
        with self.lock:
            return places_of(self._cluster, self.session, self._step)

    def nbytes(self) -> int:
        """See ``Runner.nbytes``."""
        held = sum(event.nbytes for event in self.events())
        return total_nbytes(self._step.variables) + held

    def check_model(self) -> None:
        """See ``Runner.check_model``."""
        check_sizes(self._model())

    def _model(self) -> list[Variable]:
        return [v for v in self._step.variables if not v.name.startswith("opt/")]

    def load(self, values: Sequence[Any], position: Position = None) -> None:
        """See ``Runner.load``."""
        with self.lock:
            new = dict(zip(self._step.variables, values, strict=True))
            named = dict(zip(self._step.names, values, strict=True))
            for table in self._step.tables:
                self._tables.load(table, named)
            known = {table.known for table in self._step.tables}
            left = [v for v in self._step.plain if not isinstance(new[v], RemoteArray)]
            self.session.write(
                {v: NO_KEYS if v.name in known else new[v] for v in left}
            )
            self._initialized = True
            self._position = position
            steps = int(self._step.unflatten(values)["global_step"])
            self.workers.done = shares(steps, len(self.workers.tasks))

    def adopt(self, position: Position) -> None:
        """Takes the variables as they are: another client has made them."""
        self._initialized, self._position = True, position
        self.workers.done = shares(self.global_step(), len(self.workers.tasks))

    def inherit(self, old: "AsyncRunner") -> None:
        """See ``Runner.inherit``."""
        assert old.copies is not None  # of the same strategy
        with self.lock:
            position = old.position()
            old.copies.move(self._step)
            self._initialized = True
            self._position = position
            self.workers.done = shares(self.global_step(), len(self.workers.tasks))
            if self.copies and self._last:  # before the old ones go
                self.copies.open([self._last.plan.program])

    def staleness(self) -> Staleness:
        """See ``Runner.staleness``."""
        if self._last is None or not self._last.handles:
            return {}
        gate, shards = self._step.container, shards_of(self._last.plan.program)
        return staleness_of(self._cluster, gate, shards, self._last.workers)

    def events(self) -> Events:
        """See ``Runner.events``."""
        return [e for table in self._step.tables for e in self._tables.events(table)]

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
        with self.lock:
            self.session.close()
            streams = [] if self.copies is None else self.copies.streams
            self._cluster.reset(self._step.container, *streams)

    def detached(
        self,
        order: Order,
        graph: Graph,
        names: Sequence[str],
        programs: Mapping[str, Program],
        *,
        recorded: Sequence[str],
        sync: bool = False,
        gate: pb.OpenGate | None = None,
    ) -> Detached | None:
        """Returns what the master is told of a detached run; None: it is not.

        Args:
          order: what to train.
          graph: of the step.
          names: of its metrics.
          programs: of the workers, and of ps, by handle.
          recorded: handles of the programs that change what copies are kept of.
          sync: training is synchronous.
          gate: of asynchronous training.
        """
        if not order.detached:
            return None
        saves = None
        if order.saves is not None:
            state = self._step, self.session, self._cluster
            saves, program = saves_order(*state, order.saves)
            programs = {**programs, saves.snapshot: program}
        zeros = defaultdict[TaskName, list[Variable]](list)
        for variable in self._zeros(graph, self._all):
            zeros[TaskName(str(variable.device))].append(variable)
        return run_info(
            *(order, self.global_step(), self._step.container, names),
            sync=sync,
            saves=saves,
            copies=self.copies and self.copies.about(recorded),
            programs=[*restart_programs(self._cluster, programs, zeros)],
            gate=gate,
        )

    def initialize(self) -> None:
        """Gives the variables their values, unless they have some."""
        if not self._initialized:
            self.session.initialize(self._step.plain)
            self._initialized = True

    def clear_residuals(
        self, graph: Graph, replicas: Sequence[int] | None = None
    ) -> None:
        """Forgets what rounding took from earlier gradients, of all replicas."""
        if self._step.compression is not None:
            wanted = self._all if replicas is None else replicas
            self.session.initialize(self._zeros(graph, wanted), again=True)

    @property
    def _all(self) -> Sequence[int | None]:
        """All that have variables for this: the ps, and the workers."""
        return None, *range(self.replicas)

    def _zeros(self, graph: Graph, of: Sequence[int | None]) -> list[Variable]:
        if self._step.compression is None:
            return []
        return [variable for each in of for variable in begun(graph, each)]
