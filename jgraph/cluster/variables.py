"""Which variables a cluster holds and where, as one client knows it."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from jgraph.errors import ConfigError, VariableMismatchError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.ir import TaskName, VariableSpec
from jgraph.graph.variable import Variable
from jgraph.plan.row_blocks import initial_value
from jgraph.plan.tasks import Tasks, assign_variables
from jgraph.plan.types import value_type
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.status import from_status

if TYPE_CHECKING:
    from jgraph.cluster.client import Cluster


# What a task has in hand at once when variables are read or written by a client.
_PIECE_BYTES = 16 << 20

# Smaller ones are not looked at: they may be shards, but never of anything huge.
_SMALL_BYTES = 1 << 20
_LARGE_BYTES = 1 << 30

_logger = logging.getLogger(__name__)


@final
class VariableDirectory:
    """Tasks of variables: those the cluster has stored, and those chosen here.

    A variable keeps its task for the life of the directory, so that every function of
    a session finds it in the same place.
    """

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster
        self._initialized: dict[tuple[str, str], VariableSpec] = {}
        self.tasks: dict[str, TaskName] = {}

    def look_up(self, specs: Iterable[VariableSpec]) -> set[tuple[str, str]]:
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
        stored = {(row.container, row.name): row for row in table.variables}
        for spec in (shard for logical in specs for shard in logical.shards):
            if table.missing and key_of(spec) not in stored:
                raise from_status(table.missing[0])  # it may be there
            if (row := stored.get(key_of(spec))) is not None:
                _check_stored(spec, row)
                self.tasks[spec.name] = TaskName(row.task)
        return set(stored)

    def choose(self, specs: Sequence[VariableSpec]) -> dict[str, TaskName]:
        """Returns the task of each variable by name, choosing where that is open.

        Of a sharded variable, those of its shards.
        """
        cluster = self._cluster
        specs = [shard for spec in specs for shard in spec.shards]
        tasks = Tasks(tuple(cluster.tasks()), cluster.master, DeviceSpec())
        found = assign_variables(specs, tasks, self.tasks)
        chosen = {s.name: task for s, task in zip(specs, found, strict=True)}
        self.tasks.update(chosen)
        return chosen

    def unknown(self, variables: Iterable[Variable]) -> list[Variable]:
        """Returns those not known to have a value."""
        return [v for v in variables if self._initialized.get(key_of(v.spec)) != v.spec]

    def note_initialized(self, variables: Iterable[Variable]) -> None:
        """Remembers that these have values."""
        self._initialized.update({key_of(v.spec): v.spec for v in variables})


def in_pieces(
    variables: Sequence[Variable], nbytes: int = _PIECE_BYTES
) -> list[list[Variable]]:
    """Cuts variables into runs of at most ``nbytes`` together (a larger one alone)."""
    pieces: list[list[Variable]] = []
    room = 0
    for variable in variables:
        size = value_type(variable.spec.aval).nbytes
        if not pieces or size > room:
            pieces.append([])
            room = nbytes
        pieces[-1].append(variable)
        room -= size
    return pieces


def shards_of(variables: Iterable[Variable]) -> list[Variable]:
    """Returns the shards of variables, or themselves where they are whole."""
    return [shard for variable in variables for shard in variable.shards]


def joined(variable: Variable, values: Mapping[str, Any]) -> Any:
    """Returns the value of a variable, given those of its shards by name."""
    sharding = variable.spec.sharding
    parts = [values[spec.name] for spec in variable.spec.shards]
    return parts[0] if sharding is None else sharding.joined(parts)


def split(variable: Variable, value: Any) -> list[Any]:
    """Returns the values of a variable's shards."""
    sharding = variable.spec.sharding
    if sharding is None:
        return [value]
    array = np.asarray(value)
    return [array[sharding.index(array.ndim, n)] for n in range(sharding.shards)]


def key_of(spec: VariableSpec) -> tuple[str, str]:
    """Returns what makes two variables the same one: (container, name)."""
    return spec.container, spec.name


def as_variables(given: object, method: str) -> list[Variable]:
    """Returns the variables that a method of a session was given.

    Raises:
      ConfigError: one variable without a list, names, or anything else.
    """
    if isinstance(given, Variable):
        raise ConfigError(
            f"{method} takes several variables; write session.{method}([{given.name}])"
        )
    variables = []
    for one in given if isinstance(given, Iterable) else [given]:
        if not isinstance(one, Variable):
            raise ConfigError(
                f"{method} takes jg.Variable objects, not {one!r:.60}; keep the object "
                "that jg.Variable(name, …) gave"
            )
        variables.append(one)
    return variables


def checked_values(values: Mapping[Variable, Any]) -> list[Any]:
    """Returns the arrays to write, each of its variable's type.

    Raises:
      VariableMismatchError: a value has another shape or dtype than its variable.
    """
    arrays = []
    for variable, value in values.items():
        array = variable.typed(value)
        array = array if hasattr(array, "dtype") else np.asarray(array)
        if tuple(array.shape) != variable.shape or array.dtype != variable.dtype:
            raise VariableMismatchError(
                f"variable '{variable.name}' is {variable.dtype}"
                f"{list(variable.shape)}, and the value to write is "
                f"{array.dtype}{list(array.shape)}; give an array of that type, for "
                "example with .astype(…)",
                variable=variable.name,
            )
        arrays.append(array)
    return arrays


def _check_stored(spec: VariableSpec, row: pb.VariableInfo) -> None:
    wanted, shape = value_type(spec.aval), tuple(row.type.shape)
    if (wanted.dtype, wanted.shape) != (row.type.dtype, shape):
        raise VariableMismatchError(
            f"variable '{spec.name}' is {wanted} here, and the cluster already has it "
            f"as {row.type.dtype}[{','.join(map(str, shape))}] on {row.task}; choose "
            "another name, or drop the old one with cluster.reset()",
            variable=spec.name,
        )
    asked = spec.device.task_name
    if asked is not None and asked != row.task:
        raise VariableMismatchError(
            f"variable '{spec.name}' is asked to live on {asked}, and the cluster has "
            f"it on {row.task}; choose another name, or drop the old one with "
            "cluster.reset()",
            variable=spec.name,
        )


# What a session traces for itself; the variables are bound, the arrays are fed.


def assign_initial(variables: Sequence[Variable]) -> None:
    """Gives variables what their init functions make, large ones block by block."""
    for variable in variables:
        assert variable.init is not None  # chosen by the caller
        size = value_type(variable.spec.aval).nbytes
        if size < _SMALL_BYTES:
            variable[...] = variable.init()
            continue
        variable[...], largest = initial_value(variable.init)
        if largest > _LARGE_BYTES:
            _logger.warning(
                "the initial value of '%s' (%.1f GB) is not made row by row; its task "
                "needs memory for several arrays of %.1f GB while it is made",
                variable.name,
                size / 1e9,
                largest / 1e9,
            )


def values_of(variables: Sequence[Variable]) -> dict[str, Any]:
    """Returns the values of variables by name."""
    return {variable.name: variable[...] for variable in variables}


def assign(variables: Sequence[Variable], arrays: list[Any]) -> None:
    """Gives variables these values."""
    for variable, array in zip(variables, arrays, strict=True):
        variable[...] = array
