"""Variable directory of a client: the task of every variable, known or to be chosen."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import final

from jgraph.client.connection import Connection
from jgraph.errors import ConfigError, TaskLostError, VariableMismatchError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName, VariableKey, VariableSpec
from jgraph.graph.variable import Variable
from jgraph.plan.auto.auto import AutoPlanner
from jgraph.plan.placement.tasks import Tasks, assign_variables, may_be
from jgraph.plan.plan import Plan, plan
from jgraph.plan.program.types import value_type
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.status import from_status


@final
class VariableDirectory:
    """Tasks of variables: those the cluster has stored, and those chosen here.

    A variable keeps its task for the life of the directory, so that every function of
    a session finds it in the same place.
    """

    def __init__(
        self,
        cluster: Connection,
        *,
        soft_placement: bool = False,
        platforms: Sequence[str] = (),
        auto: AutoPlanner | None = None,
    ) -> None:
        self._cluster = cluster
        self._platforms = tuple(platforms)
        self._auto = auto
        self._soft_placement = soft_placement
        self._specs: dict[VariableKey, VariableSpec] = {}
        self.tasks: dict[VariableKey, TaskName] = {}

    def look_up(self, specs: Iterable[VariableSpec]) -> set[VariableKey]:
        """Asks the cluster what it has stored and takes over where that is.

        Sharded variables are stored as their shards.

        Returns:
          (container, name) of everything stored.

        Raises:
          TaskLostError: one of ``specs`` may be on a task that does not answer.
          VariableMismatchError: one of ``specs`` is stored with another shape or dtype,
            or on another task than it asks for.
        """
        query = frame(variable_query=pb.VariableQuery())
        table = body_of(self._cluster.call("Master.Variables", query))
        rows: defaultdict[VariableKey, dict[str, pb.VariableInfo]] = defaultdict(dict)
        for row in table.variables:
            rows[row.container, row.name][row.task] = row
        errors = [from_status(status) for status in table.missing]
        members = set(self._cluster.tasks())
        for spec in (shard for logical in specs for shard in logical.shards):
            home = spec.device.task_name or ""
            if home and spec.key in self.tasks:
                self.tasks[spec.key] = TaskName(home)  # it may have moved since
                if home not in members:  # it joined, and is lost
                    what = f"{home}, which held '{spec.name}', left the cluster"
                    raise TaskLostError(what, task=home)
            if spec.key in rows:  # on two tasks at most, while it moves
                stored = rows[spec.key]
                row = stored.get(home) or next(iter(stored.values()))
                _check_stored(spec, row)
                self.tasks[spec.key] = TaskName(row.task)
                continue
            for error in errors:
                if may_be(error.details["task"], spec.device):
                    raise error
        return set(rows)

    def choose(self, specs: Sequence[VariableSpec]) -> dict[VariableKey, TaskName]:
        """Returns the task of each variable, choosing where that is open.

        Of a sharded variable, those of its shards.
        """
        cluster = self._cluster
        specs = [shard for spec in specs for shard in spec.shards]
        tasks = Tasks(tuple(cluster.tasks()), cluster.master, DeviceSpec())
        homes = assign_variables(specs, tasks, self.tasks)
        by_key = {s.key: task for s, task in zip(specs, homes, strict=True)}
        self.tasks.update(by_key)
        return by_key

    def plan(self, graph: Graph, driver: TaskName | None = None) -> Plan:
        """Returns what goes where in a graph, and remembers where its variables go.

        Args:
          graph: of a step.
          driver: has its feeds and fetches; the master if unset.
        """
        graph_plan = plan(
            graph,
            tasks=self._cluster.tasks(),
            driver=driver or self._cluster.master,
            variable_tasks=self.tasks,
            platforms=self._cluster.platforms,
            soft_placement=self._soft_placement,
            also_for=self._platforms,
            auto=self._auto,
            one_host=self._cluster.spec.is_on_one_host,
        )
        self.tasks.update(graph_plan.variable_tasks)
        return graph_plan

    def surroundings(self, variables: Iterable[Variable]) -> tuple[object, ...] | None:
        """Returns what a plan of variables hangs on beside its graph.

        None: where one of them is, is still open.
        """
        cluster = self._cluster
        homes = tuple(self.tasks.get(v.spec.key) for v in variables)
        if None in homes:
            return None
        tasks, platforms = tuple(cluster.tasks()), tuple(cluster.platforms.items())
        return homes, tasks, platforms, cluster.master

    def forget(self) -> None:
        """Forgets which variables have values, and where."""
        self._specs.clear()
        self.tasks.clear()

    def unknown(self, variables: Iterable[Variable]) -> list[Variable]:
        """Returns those not known to have a value."""
        return [v for v in variables if self._specs.get(v.spec.key) != v.spec]

    def note_initialized(self, variables: Iterable[Variable]) -> None:
        """Remembers that these have values."""
        self._specs.update({v.spec.key: v.spec for v in variables})


def shards_of(variables: Iterable[Variable]) -> list[Variable]:
    """Returns the shards of variables, or themselves where they are whole."""
    return [shard for variable in variables for shard in variable.shards]


def as_variables(argument: object, method: str) -> list[Variable]:
    """Returns the variables that a method of a session was given, or one alone.

    Raises:
      ConfigError: names, or anything else.
    """
    if isinstance(argument, Variable):
        return [argument]
    variables = []
    for one in argument if isinstance(argument, Iterable) else [argument]:
        if not isinstance(one, Variable):
            raise ConfigError(
                f"{method} takes jg.Variable objects, not {one!r:.60}; keep the object "
                "that jg.Variable(name, …) gave"
            )
        variables.append(one)
    return variables


def _check_stored(spec: VariableSpec, row: pb.VariableInfo) -> None:
    type_, shape = value_type(spec.aval), tuple(row.type.shape)
    if (type_.dtype, type_.shape) != (row.type.dtype, shape):
        raise VariableMismatchError(
            f"variable '{spec.name}' is {type_} here, and the cluster already has it "
            f"as {row.type.dtype}[{','.join(map(str, shape))}] on {row.task}; choose "
            "another name, or drop the old one with cluster.reset()",
            variable=spec.name,
        )
    home = spec.device.task_name
    if home is not None and home != row.task:
        raise VariableMismatchError(
            f"variable '{spec.name}' is asked to live on {home}, and the cluster has "
            f"it on {row.task}; choose another name, or drop the old one with "
            "cluster.reset()",
            variable=spec.name,
        )
