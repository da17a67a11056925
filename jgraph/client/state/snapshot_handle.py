"""Handle of a snapshot: copies of variables kept on their tasks until released.

A checkpoint is written from there: each task writes what it has, and only what no task
can write comes to the client.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, final

import numpy as np

from jgraph.client.values import VariableValues, joined
from jgraph.client.variables import shards_of
from jgraph.cluster.shard_messages import Shard
from jgraph.graph.ir import TaskName, VariableKey
from jgraph.graph.variable import Variable
from jgraph.plan.program.program import StoredVariable
from jgraph.plan.program.types import to_plain, value_type
from jgraph.runtime.files.shard_files import Slice


@final
@dataclass(frozen=True, slots=True)
class SnapshotHandle:
    """What tasks hold, until ``release``.

    Attributes:
      values: reads them.
      copies: what is held of each shard, by the (container, name) of the shard.
      tasks: where, likewise.
      release: lets go of it.
    """

    values: VariableValues
    copies: Mapping[VariableKey, Variable]
    tasks: Mapping[VariableKey, TaskName]
    release: Callable[[], None]
    _by_stored: dict[StoredVariable, Variable] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def read(self, variables: Sequence[Variable]) -> dict[str, Any]:
        """Returns the values of variables by name."""
        shards = shards_of(variables)
        found = self.values.read([self.copies[s.spec.key] for s in shards])
        values = {shard.spec.key: found[shard.name] for shard in shards}
        return {v.name: joined(v, values) for v in variables}

    def read_shard(self, shard: Shard) -> np.ndarray[Any, Any]:
        """Returns the value of one shard that ``shards`` returned."""
        variable = self._by_stored[shard.variable]
        return np.asarray(to_plain(self.values.read([variable])[variable.name]))

    def shards(self, variable: Variable, whole: Slice) -> list[Shard]:
        """Returns what tasks have of a variable, given the array that it is.

        Nothing if it is cut along another axis than the first: that is no rows.
        """
        sharding = variable.spec.sharding
        if sharding is not None and sharding.axis != 0:
            return []
        found, start = [], 0
        for number, part in enumerate(variable.shards):
            copy, task = self.copies[part.spec.key], self.tasks[part.spec.key]
            type_ = value_type(part.spec.aval)
            rows = replace(whole, type=type_, start=start)
            if sharding is not None and sharding.layout.kind == "mod":
                rows = replace(rows, start=number, step=sharding.shards)
            start += rows.count
            stored = StoredVariable(copy.name, type_, copy.spec.container)
            self._by_stored[stored] = copy
            found.append(Shard(task, stored, rows))
        return found
