"""Rows of a run's hash tables: read from and loaded to the parameter servers.

To the client a table is what the exported model has: a row per known key, after one for
all others, and likewise for each slot of the optimizer. So a checkpoint does not depend
on the number of ps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, final

import numpy as np

from jgraph.client.cluster import Cluster
from jgraph.client.state.table_calls import load_shard, report_of_shard, state_of_shard
from jgraph.graph.ir import TaskName
from jgraph.graph.rows.hash_keys import join_keys, split_keys
from jgraph.graph.rows.hash_spec import Column, HashSpec
from jgraph.runtime.store.hash_rows import np_dtype
from jgraph.runtime.store.hash_shard import State, reshard
from jgraph.train.hash_tables.hash_step import ModelTable, TableShards

NO_KEYS = np.zeros((1, 2), np.uint32)
"""What a graph has in place of the known keys, which only the servers know."""

_SHARED = ("keys", "age", "uses")


@final
@dataclass(frozen=True, slots=True)
class TableEvent:
    """What happened in one shard of a hash table since it was made.

    Attributes:
      table: name of the parameter.
      task: the ps that has the shard.
      rows: ids that have a row now.
      nbytes: in use now.
      found: lookups of ids that had a row.
      admitted: ids that got a row.
      declined: not admitted by the policy.
      refused: admitted, but there was no room.
      evicted: rows given up for others.
      expired: rows given up because of their age.
      dropped: updates of ids that had no row any more.
    """

    table: str
    task: TaskName
    rows: int
    nbytes: int
    found: int
    admitted: int
    declined: int
    refused: int
    evicted: int
    expired: int
    dropped: int


COUNTS = tuple(f.name for f in fields(TableEvent) if f.name not in {"table", "task"})
"""What is counted of each shard."""


@final
@dataclass(frozen=True, slots=True)
class TrainedTable:
    """A hash table of a run.

    Attributes:
      spec: of any of its shards, without the number of the shard.
      known: name of the state that says which keys have rows.
      container: of its variables.
      ps: the task of each shard.
    """

    spec: HashSpec
    known: str
    container: str
    ps: tuple[TaskName, ...]

    @property
    def shards(self) -> list[tuple[TaskName, HashSpec]]:
        """Task and description of each shard."""
        return [(task, self.spec.part(n)) for n, task in enumerate(self.ps)]

    @property
    def names(self) -> list[str]:
        """Names of its variables, that of the known keys last."""
        return [*(column.name for column in self.spec.columns), self.known]


def trained_tables(
    tables: Sequence[ModelTable],
    specs: Mapping[str, TableShards],
    container: str,
    tasks: Mapping[str, tuple[TaskName, ...]],
) -> list[TrainedTable]:
    """Returns the tables of a model that are on ps; none without specs.

    Args:
      tables: of the model.
      specs: of those that are, by parameter.
      container: of their variables.
      tasks: of the shards of each, by parameter.
    """
    return [
        TrainedTable(specs[table.rows].spec, table.known, container, tasks[table.rows])
        for table in tables
        if table.rows in specs
    ]


@final
class TableRows:
    """Moves the rows of hash tables.

    Args:
      cluster: has their shards.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def read(self, table: TrainedTable) -> dict[str, Any]:
        """Returns the values that stand for a table, by name."""
        states = [
            renamed(state_of_shard(self._cluster, task, table.container, spec), number)
            for number, (task, spec) in enumerate(table.shards)
        ]
        (state,) = reshard(states, 1)
        return values_of(table, state)

    def load(self, table: TrainedTable, values: Mapping[str, Any]) -> None:
        """Replaces all rows of a table by those of values as ``read`` returns."""
        states = reshard([state_of(table, values)], len(table.ps))
        for number, (task, spec) in enumerate(table.shards):
            state = numbered(states[number], number)
            load_shard(self._cluster, task, table.container, spec, state)

    def events(self, table: TrainedTable) -> list[TableEvent]:
        """Returns what happened in each shard."""
        events = []
        for task, spec in table.shards:
            report = report_of_shard(self._cluster, task, table.container, spec)
            counts = asdict(report.counts)
            events.append(
                TableEvent(table.spec.name, task, report.rows, report.nbytes, **counts)
            )
        return events


def renamed(state: State, number: int) -> State:
    """Returns the state of a shard with the columns called as in the whole table."""
    return {name.removesuffix(f"/part_{number}"): x for name, x in state.items()}


def numbered(state: State, number: int) -> State:
    """Returns a part of the whole state as that of the shard of this number."""
    return {
        name if name in _SHARED else f"{name}/part_{number}": x
        for name, x in state.items()
    }


def values_of(table: TrainedTable, state: State) -> dict[str, Any]:
    """Returns what stands for a table: a value per column, and the known keys."""
    # Pairs are in order of their high half, as unsigned numbers.
    order = np.argsort(state["keys"].view(np.uint64))
    pairs = split_keys(state["keys"][order])
    values: dict[str, Any] = {
        column.name: np.concatenate([_of_others(column), state[column.name][order]])
        for column in table.spec.columns
    }
    return {**values, table.known: np.pad(pairs, ((1, 0), (0, 0)))}


def state_of(table: TrainedTable, values: Mapping[str, Any]) -> State:
    """Returns the state of a table that values stand for.

    When rows were last looked up is not among them: all count as looked up now, once.
    """
    keys = join_keys(np.asarray(values[table.known])[1:])
    state: State = {
        "keys": keys,
        "age": np.zeros(len(keys), np.int64),
        "uses": np.ones(len(keys), np.uint32),
    }
    for column in table.spec.columns:
        state[column.name] = np.asarray(values[column.name])[1:]
    return state


def _of_others(column: Column) -> np.ndarray[Any, Any]:
    """Returns the row that keys without one read: the mean of what new rows are."""
    return np.full((1, column.width), column.initial.mean, np_dtype(column))
