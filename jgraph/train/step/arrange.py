"""Variable placement of a training run: shards and their tasks.

A parameter and the optimizer's state for it are cut alike and live together, shard by
shard: an update then needs nothing from elsewhere.

Dense parameters may have owners: tasks over which each is cut evenly. Where these are
the workers, an update is a reduce-scatter of gradients and an all-gather of parameters
in two hops, and each worker has its part of the optimizer's state.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", 2020; Jiang et al., "A Unified Architecture for Accelerating
Distributed DNN Training in Heterogeneous GPU/CPU Clusters", 2020 (BytePS).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeAlias, final

from jgraph.errors import ConfigError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.ir import TaskName, VariableSpec
from jgraph.graph.sharding import (
    Partitioner,
    Sharding,
    array_nbytes,
    at_pages,
    sharding_of,
)
from jgraph.graph.variable import Variable
from jgraph.plan.placement.rearrange import arrangements
from jgraph.plan.placement.spread import nbytes_of
from jgraph.train.hash_tables.hash_step import TableShards
from jgraph.view.units import bytes_text, count_text

Place: TypeAlias = Callable[[Mapping[str, int]], Mapping[str, TaskName]]
"""Chooses a task for each group of variables, given the bytes of each group."""

_MIN_SHARD_BYTES: Final = 64 << 10
"""A smaller piece costs more as a message of its own than it saves."""


@final
@dataclass(frozen=True, slots=True)
class Owners:
    """Tasks that hold all variables of a run but its tables, cut over them.

    Attributes:
      tasks: who they are.
      place: where what is not cut into one piece for each of them lives.
      tables: parameters that they do not hold, with their optimizer state.
    """

    tasks: tuple[TaskName, ...]
    place: Place
    tables: frozenset[str] = frozenset()

    def note(self, variables: Sequence[Variable]) -> str:
        """Returns a line for the plan on the variables of a run."""
        parameters = [v for v in variables if v.name.startswith("params/")]
        dense = [v for v in parameters if v.name not in self.tables]
        nbytes = sum(nbytes_of(v.spec) for v in dense)
        cut = sum(v.spec.sharding is not None for v in dense)
        where = f"{count_text(len(self.tasks), 'worker')} as well as their state"
        tables = len(parameters) - len(dense)
        rest = f"; {count_text(tables, 'table')} on ps" if tables else ""
        return (
            f"dense: {count_text(len(dense), 'parameter')}, {bytes_text(nbytes)}, on "
            f"{where}, {cut} of them in {len(self.tasks)} parts{rest}"
        )

    def cut(self, shape: Sequence[int], dtype: Any) -> list[int]:
        """Returns the number of shards per axis: one for each owner, or one in all.

        Example:
          >>> tasks = tuple(TaskName(f"/job:worker/task:{n}") for n in range(2))
          >>> owners = Owners(tasks, lambda sizes: {})
          >>> owners.cut([1000, 64], "float32"), owners.cut([10, 64], "float32")
          ([2, 1], [1, 1])
          >>> owners.cut([1, 64000], "float32")
          [1, 2]
        """
        counts, shards = [1] * len(shape), len(self.tasks)
        fits = [axis for axis, size in enumerate(shape) if size >= shards]
        if fits and array_nbytes(shape, dtype) >= _MIN_SHARD_BYTES * shards:
            counts[fits[0]] = shards
        return counts


@final
@dataclass(frozen=True, slots=True)
class ElasticPs:
    """Parameter servers that join and leave: what is cut for that, and where it lies.

    Attributes:
      least: how many there are at least.
      most: how many there are at most.
      vshards: into how many pieces of equal bytes the variables of one ps are cut when
        there are the most.
    """

    least: int
    most: int
    vshards: int

    @property
    def tasks(self) -> list[TaskName]:
        """All that there may be."""
        return [TaskName(f"/job:ps/task:{index}") for index in range(self.most)]

    def cut(self, shape: Sequence[int], dtype: Any, total: int) -> list[int]:
        """Returns the number of shards per axis of a parameter.

        Args:
          shape: of it.
          dtype: of it.
          total: bytes of all parameters.

        Example:
          >>> ElasticPs(1, 2, 4).cut([1000, 64], "float32", 512_000)
          [4, 1]
          >>> ElasticPs(1, 2, 4).cut([10, 64], "float32", 512_000)
          [1, 1]
        """
        piece = max(total // (self.vshards * self.most), _MIN_SHARD_BYTES)
        shards = -(-array_nbytes(shape, dtype) // piece)
        return [min(shards, shape[0]), *(1 for _ in shape[1:])]

    def shards_of(self, nbytes: int) -> int:
        """Returns the number of shards of a hash table with a budget of so many bytes.

        A key stays in its shard, however many ps there are.

        Example:
          >>> ElasticPs(1, 2, 4).shards_of(1 << 30), ElasticPs(1, 2, 4).shards_of(1)
          (8, 1)
        """
        return min(self.vshards * self.most, max(1, nbytes // _MIN_SHARD_BYTES))

    def homes(self, sizes: Mapping[str, int]) -> dict[int, dict[str, TaskName]]:
        """Returns where each group is, by the number of ps; counters on the first."""
        counters = [name for name in sizes if not name.startswith("params/")]
        return arrangements(sizes, self.tasks, self.least, counters)


@final
@dataclass(frozen=True, slots=True)
class Arrangement:
    """How the variables of a run are cut and placed.

    Attributes:
      place: where they live; the plan's choice if unset.
      partitioner: into how many shards a parameter is cut; whole if unset.
      partition_strategy: ``"div"`` or ``"mod"``: which rows a shard has.
      ps: tasks on each of which a hash table has a shard; where they join and leave,
        several, as ``elastic`` says.
      owners: hold all but the tables; None: all is placed alike.
      why: they do, or do not, for the plan; empty: the user said so.
      elastic: which ps join and leave; None: none does. Variables are then placed for
        as many as ``ps`` has.
      homes: who has the part of each owner that is away.
    """

    place: Place | None = None
    partitioner: Partitioner | None = None
    partition_strategy: str = "div"
    ps: tuple[TaskName, ...] = ()
    owners: Owners | None = None
    why: str = ""
    elastic: ElasticPs | None = None
    homes: Mapping[TaskName, TaskName] = field(default_factory=dict)

    def on(self, ps: int) -> "Arrangement":
        """Returns how variables are cut and placed when there are so many ps."""
        assert self.elastic is not None  # who asks has seen to it
        elastic = self.elastic
        place = lambda sizes: elastic.homes(sizes)[ps]
        return replace(self, place=place, ps=tuple(elastic.tasks[:ps]))

    def notes(self, variables: Sequence[Variable]) -> list[str]:
        """Returns lines for the plan on who holds the variables of a run."""
        lines = [] if self.owners is None else [self.owners.note(variables)]
        return [*lines, *([self.why] if self.why else [])]

    def variables(
        self,
        names: Sequence[str],
        groups: Sequence[str],
        values: Sequence[Any],
        container: str = "",
        tables: Mapping[str, TableShards] | None = None,
    ) -> tuple[Variable, ...]:
        """Returns a variable for each value.

        Args:
          names: of the variables.
          groups: name of the parameter that each belongs to, or its own.
          values: initial values, as for ``Variable``.
          container: of the variables.
          tables: the shards of hash tables, by group.

        Raises:
          ConfigError: the partitioner is no function.
          ShardingError: it wants shards that cannot be.
        """
        by_name = dict(zip(names, values, strict=True))
        table_shards = tables or {}
        parameters = [v for n, v in by_name.items() if n.startswith("params/")]
        total = sum(array_nbytes(_shape(v), _dtype(v)) for v in parameters)
        cuts = {
            name: self._cut(name, value, total)
            for name, value in by_name.items()
            if name.startswith("params/") and name not in table_shards
        }

        def make(name: str, group: str, devices: Sequence[DeviceSpec] = ()) -> Variable:
            if group in table_shards:
                table = table_shards[group]
                return self._column(name, by_name[name], container, table, devices)
            cut = cuts.get(group)
            shape = _shape(by_name[name])
            if cut is None or shape != _shape(by_name[group]):
                device = devices[0] if devices else DeviceSpec()
                return Variable(name, by_name[name], device=device, container=container)
            return Variable(
                name,
                by_name[name],
                container=container,
                sharding=cut,
                shard_devices=devices,
            )

        pairs = list(zip(names, groups, strict=True))
        variables = tuple(make(name, group) for name, group in pairs)
        if self.place is None:
            return variables
        tasks = self._tasks(
            [
                (variable, group)
                for variable, group in zip(variables, groups, strict=True)
                if self.elastic is not None or group not in table_shards
            ]
        )

        def devices(variable: Variable, group: str) -> list[DeviceSpec]:
            keys = [_key(group, n) for n in range(len(variable.spec.shards))]
            return [DeviceSpec.from_string(tasks[key]) for key in keys]

        return tuple(
            variable
            if self.elastic is None and group in table_shards
            else make(name, group, devices(variable, group))
            for variable, (name, group) in zip(variables, pairs, strict=True)
        )

    def _tasks(
        self, variables: Sequence[tuple[Variable, str]]
    ) -> Mapping[str, TaskName]:
        """Returns the task of each shard of each group."""
        assert self.place is not None  # who asks has seen to it
        if self.owners is None:
            return self.place(_bytes_of(variables))
        tables = self.owners.tables
        apart = [pair for pair in variables if pair[1] in tables]
        dense = [pair for pair in variables if pair[1] not in tables]
        owned = self.owners.place(_bytes_of(dense))
        return {
            **(self.place(_bytes_of(apart)) if apart else {}),
            **{key: self.homes.get(task, task) for key, task in owned.items()},
        }

    def table_shards(self, nbytes: int) -> int:
        """Returns in how many shards a hash table of such a budget is cut."""
        return len(self.ps) if self.elastic is None else self.elastic.shards_of(nbytes)

    def _column(
        self,
        name: str,
        value: Any,
        container: str,
        table: TableShards,
        devices: Sequence[DeviceSpec],
    ) -> Variable:
        """Returns a column of a hash table; ``value`` is of one row, and not used."""
        places = list(devices) or [DeviceSpec.from_string(task) for task in self.ps]
        if self.elastic is not None and not devices:  # they are placed with all others
            places = places[:1] * table.count
        return Variable(
            name,
            ((len(places), *_shape(value)[1:]), _dtype(value), None),
            container=container,
            shard_devices=places,
            table=table.spec,
        )

    def _cut(self, name: str, value: Any, total: int) -> Sharding | None:
        partitioner = self.partitioner
        if partitioner is None and self.elastic is not None:
            partitioner = partial(self.elastic.cut, total=total)
        if partitioner is None and self.owners and name not in self.owners.tables:
            partitioner = self.owners.cut
        if partitioner is None or not _shape(value):
            return None
        if not callable(partitioner):
            raise ConfigError(
                f"variable_partitioner is {partitioner!r:.60}; give a partitioner "
                "such as jg.fixed_size_partitioner(2)"
            )
        shape, dtype = _shape(value), _dtype(value)
        counts = partitioner(shape, dtype)
        cut = sharding_of(name, shape, counts, self.partition_strategy)
        if cut is None or self.owners is None or partitioner != self.owners.cut:
            return cut
        return at_pages(cut, shape, dtype)  # each owner makes a whole of all parts


def _key(group: str, shard: int) -> str:
    return group if shard == 0 else f"{group}/part_{shard}"


def groups_of(
    variables: Sequence[Variable], groups: Sequence[str]
) -> dict[str, list[VariableSpec]]:
    """Returns what must live together, by the name of the group.

    Args:
      variables: of a run.
      groups: name of the parameter that each belongs to, or its own.
    """
    found: dict[str, list[VariableSpec]] = {}
    for variable, group in zip(variables, groups, strict=True):
        for number, spec in enumerate(variable.spec.shards):
            found.setdefault(_key(group, number), []).append(spec)
    return found


def _bytes_of(variables: Sequence[tuple[Variable, str]]) -> dict[str, int]:
    """Returns the bytes of what must live together; first shards with the whole."""
    sizes: dict[str, int] = {}
    for variable, group in variables:
        for number, spec in enumerate(variable.spec.shards):
            key = _key(group, number)
            sizes[key] = sizes.get(key, 0) + held_nbytes(spec)
    return sizes


def held_nbytes(spec: VariableSpec) -> int:
    """Returns the bytes that a variable, or a shard, may come to hold.

    A hash table has its whole budget at its parameter, and nothing at other columns.
    """
    if spec.table is None:
        return nbytes_of(spec)
    is_parameter = spec.table.columns[0].name == spec.name
    return spec.table.capacity_bytes if is_parameter else 0


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value[0] if isinstance(value, tuple) else value.shape)


def _dtype(value: Any) -> Any:
    return value[1] if isinstance(value, tuple) else value.dtype
