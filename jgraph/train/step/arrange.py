"""Variable placement of a training run: shards and their tasks.

A parameter and the optimizer's state for it are cut alike and live together, shard by
shard: an update then needs nothing from elsewhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from jgraph.errors import ConfigError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.ir import TaskName
from jgraph.graph.rows.hash_spec import HashSpec
from jgraph.graph.sharding import Partitioner, Sharding, sharding_of
from jgraph.graph.variable import Variable
from jgraph.plan.placement.spread import nbytes_of

Place: TypeAlias = Callable[[Mapping[str, int]], Mapping[str, TaskName]]
"""Chooses a task for each group of variables, given the bytes of each group."""


@final
@dataclass(frozen=True, slots=True)
class Arrangement:
    """How the variables of a run are cut and placed.

    Attributes:
      place: where they live; the plan's choice if unset.
      partitioner: into how many shards a parameter is cut; whole if unset.
      partition_strategy: ``"div"`` or ``"mod"``: which rows a shard has.
      ps: tasks on each of which a hash table has a shard.
    """

    place: Place | None = None
    partitioner: Partitioner | None = None
    partition_strategy: str = "div"
    ps: tuple[TaskName, ...] = ()

    def variables(
        self,
        names: Sequence[str],
        groups: Sequence[str],
        values: Sequence[Any],
        container: str = "",
        tables: Mapping[str, HashSpec] | None = None,
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
        cuts = {
            name: self._cut(name, value)
            for name, value in by_name.items()
            if name.startswith("params/") and name not in table_shards
        }

        def make(name: str, group: str, devices: Sequence[DeviceSpec] = ()) -> Variable:
            if group in table_shards:
                return self._column(name, by_name[name], container, table_shards[group])
            counts = cuts.get(group)
            shape = _shape(by_name[name])
            if counts is None or shape != _shape(by_name[group]):
                device = devices[0] if devices else DeviceSpec()
                return Variable(name, by_name[name], device=device, container=container)
            return Variable(
                name,
                by_name[name],
                container=container,
                partitioner=lambda *_: counts,
                partition_strategy=self.partition_strategy,
                shard_devices=devices,
            )

        pairs = list(zip(names, groups, strict=True))
        variables = tuple(make(name, group) for name, group in pairs)
        if self.place is None:
            return variables
        free = [n for n, group in enumerate(groups) if group not in table_shards]
        tasks = self.place(
            _bytes_of([variables[n] for n in free], [groups[n] for n in free])
        )

        def devices(variable: Variable, group: str) -> list[DeviceSpec]:
            keys = [_key(group, n) for n in range(len(variable.spec.shards))]
            return [DeviceSpec.from_string(tasks[key]) for key in keys]

        return tuple(
            variable
            if group in table_shards
            else make(name, group, devices(variable, group))
            for variable, (name, group) in zip(variables, pairs, strict=True)
        )

    def _column(
        self, name: str, value: Any, container: str, table: HashSpec
    ) -> Variable:
        """Returns a column of a hash table; ``value`` is of one row, and not used."""
        shape = len(self.ps), *_shape(value)[1:]
        return Variable(
            name,
            (shape, _dtype(value), None),
            container=container,
            shard_devices=self.ps,
            table=table,
        )

    def _cut(self, name: str, value: Any) -> list[int] | None:
        if self.partitioner is None or not _shape(value):
            return None
        if not callable(self.partitioner):
            raise ConfigError(
                f"variable_partitioner is {self.partitioner!r:.60}; give a partitioner "
                "such as jg.fixed_size_partitioner(2)"
            )
        shape, dtype = _shape(value), _dtype(value)
        counts = self.partitioner(shape, dtype)
        cut = sharding_of(name, shape, counts, self.partition_strategy)
        return None if cut is None else _counts(cut, len(shape))


def _counts(cut: Sharding, ndim: int) -> list[int]:
    return [cut.shards if axis == cut.axis else 1 for axis in range(ndim)]


def _key(group: str, shard: int) -> str:
    return group if shard == 0 else f"{group}/part_{shard}"


def _bytes_of(variables: Sequence[Variable], groups: Sequence[str]) -> dict[str, int]:
    """Returns the bytes of what must live together; first shards with the whole."""
    sizes: dict[str, int] = {}
    for variable, group in zip(variables, groups, strict=True):
        for number, spec in enumerate(variable.spec.shards):
            key = _key(group, number)
            sizes[key] = sizes.get(key, 0) + nbytes_of(spec)
    return sizes


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value[0] if isinstance(value, tuple) else value.shape)


def _dtype(value: Any) -> Any:
    return value[1] if isinstance(value, tuple) else value.dtype
