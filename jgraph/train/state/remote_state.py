"""Remote state: the variables of a training run that tasks of a cluster hold."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

from jgraph.client.cluster import Cluster
from jgraph.client.runs.failover import release_run
from jgraph.client.runs.holds import DrainHolds
from jgraph.client.state.snapshots import SnapshotHandle
from jgraph.cluster.deadlines import bulk_timeout_s
from jgraph.errors import CheckpointError, ConfigError, TaskLostError
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName
from jgraph.graph.variable import Variable
from jgraph.plan.program.replicas import goes_on
from jgraph.train.hash_tables.hash_state import NO_KEYS, TableRows
from jgraph.train.state.durability import Durability, make_durable_copies
from jgraph.train.state.remote_arrays import (
    KEPT_BYTES,
    RemoteArray,
    RunSnapshot,
    arrays_of,
    check_sizes,
    places_of,
    releasing_after_an_error,
    total_nbytes,
)
from jgraph.train.state.runner import Events, Position
from jgraph.train.step.compress import begun
from jgraph.train.step.train_step import TrainStep


@final
class RemoteState:
    """The variables of a step on the tasks of a cluster; see ``RunState``.

    Args:
      step: whose variables.
      cluster: where they are.
      durability: what is kept of them.
      together: each worker takes part in every update; else in its share of them.

    Raises:
      ConfigError: what is kept has nowhere to be.
    """

    def __init__(
        self,
        step: TrainStep,
        cluster: Cluster,
        durability: Durability,
        *,
        together: bool = False,
    ) -> None:
        self.step = step
        self.cluster = cluster
        self.session = cluster.session()
        self.copies = make_durable_copies(durability, cluster, self.session, step)
        # A run is looked at from other threads than the one that trains.
        self.lock = threading.RLock()
        self.is_training = False
        self.has_copies = False
        """There are copies or logs, of a run that goes on or is about to begin."""
        self.position: Position = None
        """Where in the data the run was when that was told last."""
        self.done = [0] * len(cluster.tasks("worker"))
        """Steps by replica, over all runs; they number its next ones."""
        self._together = together
        self._tables = TableRows(cluster)
        self._is_initialized = self._has_loaded = self._is_closed = False
        self.is_initial = True
        """No variable has had another value than its initial one."""
        self._copy_at_once: Callable[[], SnapshotHandle] | None = None
        self._drain_holds: DrainHolds | None = None
        self._moves, self._homes_before = 0, dict[TaskName, TaskName]()

    @property
    def halt_s(self) -> float:
        """How long loops stand still at most while the run is saved."""
        return bulk_timeout_s(total_nbytes(self.step.variables))

    def global_step(self) -> int:
        """See ``RunState.global_step``."""
        with self.lock:
            if not self._is_initialized:
                return 0
            variable = self.step.variables[self.step.names.index("global_step")]
            return int(self.session.read([variable])["global_step"])

    def values(
        self, *, model_only: bool = False, halted: bool = False
    ) -> Sequence[Any]:
        """See ``RunState.values``."""
        self._check_open()
        if model_only:
            self.check_model()
        variables = self._model() if model_only else self.step.variables
        variables = [v for v in variables if v.spec.table is None]
        with self.lock:
            self.initialize()
            # A large model has no room for another of itself.
            at_once = self.is_training and total_nbytes(variables) <= KEPT_BYTES
            at_once &= not halted  # nothing changes meanwhile
            read = self.session.snapshot if at_once else self.session.read
            values = read(variables)
            for table in self.step.tables:
                values |= self._tables.read(table)
        return [values.get(name) for name in self.step.names]

    def prepare_to_keep(self, *, anew: bool = False) -> None:
        """Compiles what copies the state while loops stand still, before they do.

        With ``anew`` also if that was done: a task may have been started again.
        """
        plain = [v for v in self.step.variables if v.spec.table is None]
        needed = anew or self._copy_at_once is None
        if needed and total_nbytes(plain) <= KEPT_BYTES:
            self._copy_at_once = self.session.snapshots.prepared(plain)

    def keep(self, go_on: Callable[[], None] | None = None) -> RunSnapshot:
        """See ``RunState.keep``; rows of tables come, they are sorted by key."""
        plain = [v for v in self.step.variables if v.spec.table is None]
        with self.lock:
            self.initialize()
            # A large model has no room for another of itself.
            at_once = self.is_training and total_nbytes(plain) <= KEPT_BYTES
            snapshot = self._hold(plain, at_once=at_once, halted=go_on is not None)
            with releasing_after_an_error(snapshot):
                rows: dict[str, Any] = {}
                for table in self.step.tables:
                    rows |= self._tables.read(table)
                if go_on is not None and at_once:
                    go_on()
                # The known keys are among both, and only the tables know them.
                arrays = {**arrays_of(self.cluster, snapshot, plain), **rows}
        values = [arrays.get(name) for name in self.step.names]
        return RunSnapshot(values, snapshot.release, is_live=not at_once)

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
        snapshot = copy()  # what another master knows nothing of is prepared anew
        self._copy_at_once = copy
        return snapshot

    def places(self) -> Sequence[Any]:
        """See ``RunState.places``."""
        with self.lock:
            return places_of(self.cluster, self.session, self.step)

    def nbytes(self) -> int:
        """See ``RunState.nbytes``."""
        table_bytes = sum(event.nbytes for event in self.events())
        return total_nbytes(self.step.variables) + table_bytes

    def check_model(self) -> None:
        """See ``RunState.check_model``."""
        check_sizes(self._model())

    def _model(self) -> list[Variable]:
        return [v for v in self.step.variables if not v.name.startswith("opt/")]

    def load(self, values: Sequence[Any], position: Position = None) -> None:
        """See ``RunState.load``."""
        self._check_open()
        with self.lock:
            new = dict(zip(self.step.variables, values, strict=True))
            by_name = dict(zip(self.step.names, values, strict=True))
            for table in self.step.tables:
                self._tables.load(table, by_name)
            key_names = {table.known for table in self.step.tables}
            rest = [v for v in self.step.plain if not isinstance(new[v], RemoteArray)]
            self.session.write(
                {v: NO_KEYS if v.name in key_names else new[v] for v in rest}
            )
            # Of a run that goes back, its master begins anew what is of workers.
            self._has_loaded |= not self.is_training
            self._go_on(position, int(by_name["global_step"]))

    def load_part(self, values: Sequence[Any], tasks: Collection[TaskName]) -> None:
        """Gives tasks what is not theirs to read of a checkpoint.

        Args:
          values: one per variable; those that are on tasks are there.
          tasks: these; what others hold stays as it is.

        Raises:
          CheckpointError: a part of a variable would have to be written alone.
        """
        new = dict(zip(self.step.variables, values, strict=True))
        rest = {v: x for v, x in new.items() if not isinstance(x, RemoteArray)}
        mine = dict[Variable, Any]()
        for variable, value in rest.items():
            homes = {shard.spec.device.task_name for shard in variable.shards}
            if homes.isdisjoint(tasks):
                continue
            if not homes.issubset(tasks):
                raise CheckpointError(
                    f"'{variable.name}' is cut so that a checkpoint has no part of it"
                )
            mine[variable] = value
        with self.lock:
            self.session.write(mine)

    def read(self, names: Sequence[str]) -> Mapping[str, Any]:
        """See ``RunState.read``."""
        self._check_open()
        with self.lock:
            self.initialize()
            return self.session.read(
                [v for v in self.step.variables if v.name in names]
            )

    def write(self, values: Mapping[str, Any]) -> None:
        """See ``RunState.write``; a step of its own, as of any session."""
        self._check_open()
        variables = {v.name: v for v in self.step.variables}
        with self.lock:
            if self.has_copies:
                raise ConfigError(
                    "copies and logs (durability=) have what the steps of a run "
                    f"change, and would not have {', '.join(values)}; set it before "
                    "the run, or give the optimizer a schedule"
                )
            self.initialize()
            self.session.write({variables[n]: value for n, value in values.items()})
            self.is_initial = False

    def adopt(self, position: Position) -> None:
        """Takes the variables as they are: another client has made them."""
        with self.lock:
            self.has_copies = self.copies is not None
            self._go_on(position)

    def _go_on(self, position: Position, steps: int | None = None) -> None:
        """Takes note that the variables have values: those after so many updates."""
        self._is_initialized, self.position = True, position
        self.is_initial = False
        steps = self.global_step() if steps is None else steps
        count = len(self.done)
        self.done = [steps] * count if self._together else shares(steps, count)

    def initialize(self, *, again: bool = False) -> None:
        """Gives the variables their values, unless they have some.

        With ``again`` also if that was done: a task may have been started again.

        Raises:
          ConfigError: the Trainer was closed.
        """
        self._check_open()
        if again or not self._is_initialized:
            self.session.initialize(self.step.plain)
            self._is_initialized = True

    def begin_anew(self) -> None:
        """Gives all variables their initial values: some may have had an update."""
        self.cluster.reset(self.step.container)
        self.initialize(again=True)
        self.is_initial, self.position = True, None
        self.done = [0] * len(self.done)

    def lost_values(self) -> list[TaskName]:
        """Returns the tasks that have lost values: their processes are others."""
        if not self._is_initialized:
            return []
        lacking = self.session.lacking(self.step.plain)
        tasks = {spec.device.task_name for spec in lacking}
        return sorted(TaskName(task) for task in tasks if task is not None)

    def check_values(self) -> None:
        """Raises ``TaskLostError`` if a task has lost values."""
        for task in self.lost_values():
            what = f"{task} was started again while the run was prepared"
            raise TaskLostError(what, task=task)

    def clear_residuals(
        self, graph: Graph, replicas: Sequence[int] | None = None
    ) -> None:
        """Forgets what rounding took from earlier gradients, of all replicas.

        The state of the optimizers of workers goes on, unless the model was given
        other values since.
        """
        if not self.step.own:
            return
        variables = self.residuals(graph, replicas)
        states = [v for v in variables if goes_on(v.name)]
        rest = [v for v in variables if not goes_on(v.name)]
        self.session.initialize(rest, again=True)
        self.session.initialize(states, again=self._has_loaded)
        self._has_loaded = False

    def residuals(
        self, graph: Graph, replicas: Sequence[int] | None = None
    ) -> list[Variable]:
        """Returns the variables of replicas that are zeros when a run begins.

        Args:
          graph: of the step.
          replicas: whose; None: of all, and what the ps have for this.
        """
        if not self.step.own:
            return []
        everyone = (None, *range(len(self.done)))
        of = everyone if replicas is None else replicas
        return [variable for each in of for variable in begun(graph, each)]

    def events(self) -> Events:
        """See ``RunState.events``."""
        return [e for table in self.step.tables for e in self._tables.events(table)]

    def move_to(self, ps: int) -> None:
        """Looks for the variables on so many ps from now on."""
        self.step.move_to(ps)
        self._copy_at_once = None  # it copies them where they were

    def begin_run(self) -> None:
        """Takes note that a run begins, whose parts move from where they are now."""
        self._moves, self._homes_before = 0, dict(self.step.arrangement.homes)

    def look_at(self, number: int, homes: Mapping[TaskName, TaskName]) -> bool:
        """Looks for the parts of owners with who has them; returns whether it is new.

        Args:
          number: how often parts have moved then.
          homes: who has the part of each owner that is away.
        """
        if number <= self._moves:
            return False
        self._moves = number
        before = self._homes_before
        self.step.look_at(
            {t: homes.get(by, by) for t, by in before.items()} | {**homes}
        )
        self._copy_at_once = None  # it copies them where they were
        return True

    def hold(self) -> DrainHolds:
        """Holds the tasks of a run until ``let_go``: nobody ends who was told to."""
        arrangement = self.step.arrangement
        ps = None if arrangement.elastic is None else len(arrangement.ps)
        self._drain_holds = DrainHolds(self.cluster, self.step.owners, ps)
        return self._drain_holds

    def let_go(self) -> None:
        """See ``RunState.let_go``."""
        if self._drain_holds is not None:
            release_run(self.cluster, self._drain_holds)
            self._drain_holds = None

    def close(self) -> None:
        """See ``RunState.close``."""
        with self.lock:
            self._is_closed = True
            self.session.close()
            streams = [] if self.copies is None else self.copies.streams
            self.cluster.reset(self.step.container, *streams)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError(
                "this Trainer was closed, and what it had on the cluster went with "
                "that; a run that was over before still has its model: run.model()"
            )


def shares(steps: int, count: int) -> list[int]:
    """Cuts ``steps`` into ``count`` parts that differ by one at most.

    Example:
      >>> shares(7, 3)
      [3, 2, 2]
    """
    return [steps // count + (i < steps % count) for i in range(count)]
