"""Consistent snapshots of variables, taken while training updates them.

One step copies what a task holds to variables beside it: a read of several variables is
of one moment, and no update waits for more than that. On a CPU large ones stay where
they are until they change, and then rows that change are copied (``LentArray``). The
copies are then read piece by piece, or written to files by their tasks, and dropped.
"""

import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self, final

import numpy as np

from jgraph.client.connection import Connection
from jgraph.client.values import (
    VariableValues,
    check_names,
    in_pieces,
    joined,
    types_of,
)
from jgraph.client.variables import VariableDirectory, shards_of
from jgraph.cluster.shard_messages import Shard
from jgraph.graph.ir import TaskName, VariableKey, VariableSpec
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.plan.placement.spread import nbytes_of
from jgraph.plan.plan import plan
from jgraph.plan.program.nodes import FetchNode, Node, ReadNode, WriteNode
from jgraph.plan.program.program import Partition, Program, StoredVariable
from jgraph.plan.program.types import to_plain, value_type
from jgraph.runtime.files.shard_files import Slice

# Handle of a snapshot: copies of variables kept on their tasks until released.
#
# A checkpoint is written from there: each task writes what it has, and only what no
# task can write comes to the client.


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
        arrays = self.values.read([self.copies[s.spec.key] for s in shards])
        values = {shard.spec.key: arrays[shard.name] for shard in shards}
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
        shards, start = [], 0
        for number, part in enumerate(variable.shards):
            copy, task = self.copies[part.spec.key], self.tasks[part.spec.key]
            type_ = value_type(part.spec.aval)
            rows = replace(whole, type=type_, start=start)
            if sharding is not None and sharding.layout.kind == "mod":
                rows = replace(rows, start=number, step=sharding.shards)
            start += rows.count
            source = StoredVariable(copy.name, type_, copy.spec.container)
            self._by_stored[source] = copy
            shards.append(Shard(task, source, rows))
        return shards


@final
class Snapshots:
    """Takes snapshots of variables; each takes memory of their tasks for changes."""

    def __init__(
        self,
        cluster: Connection,
        variables: VariableDirectory,
        values: VariableValues,
    ) -> None:
        self._cluster = cluster
        self._variables = variables
        self._values = values

    def live(self, variables: Sequence[Variable]) -> SnapshotHandle:
        """Returns variables as they are when they are read, or where they will be."""
        self._variables.look_up(v.spec for v in variables)
        shards = {shard.spec.key: shard for shard in shards_of(variables)}
        tasks = self._variables.choose([v.spec for v in variables])
        return SnapshotHandle(self._values, shards, tasks, release=lambda: None)

    def take(self, variables: Sequence[Variable]) -> SnapshotHandle:
        """Copies variables, those of a task at one moment."""
        program, handle = self.repeatable(variables, self._cluster.master)
        try:
            self._values.run_program(program, _nbytes(variables))
        except BaseException:
            handle.release()
            raise
        return handle

    def repeatable(
        self, variables: Sequence[Variable], driver: TaskName
    ) -> tuple[Program, SnapshotHandle]:
        """Returns what copies variables whenever it is run, and what is held then.

        Args:
          variables: which.
          driver: of the program.
        """
        check_names(variables)
        variables = list({v.spec.key: v for v in variables}.values())
        self._variables.look_up(v.spec for v in variables)
        container = f"snapshot-{uuid.uuid4().hex[:12]}"
        shards = shards_of(variables)
        copies = [self._copy(shard, container) for shard in shards]
        tasks = [self._variables.tasks[shard.spec.key] for shard in shards]
        platforms = self._cluster.platforms
        if all(platforms.get(task) == ("cpu",) for task in tasks):
            specs = [(s.spec, c.spec) for s, c in zip(shards, copies, strict=True)]
            program = _copying(zip(tasks, specs, strict=True), driver)
        else:
            with types_of(shards):
                graph, _ = trace(partial(_copied, shards, copies), variables=shards)
                program = plan(
                    graph,
                    tasks=self._cluster.tasks(),
                    driver=driver,
                    variable_tasks=self._variables.tasks,
                    platforms=platforms,
                ).program

        def release() -> None:
            self._cluster.reset(container)
            for copy in copies:
                self._variables.tasks.pop(copy.spec.key, None)

        keys = [shard.spec.key for shard in shards]
        by_key = dict(zip(keys, copies, strict=True))
        by_task = dict(zip(keys, tasks, strict=True))
        return program, SnapshotHandle(self._values, by_key, by_task, release)

    def prepared(self, variables: Sequence[Variable]) -> Callable[[], SnapshotHandle]:
        """Returns what takes a snapshot at once; each in place of the one before."""
        program, handle = self.repeatable(variables, self._cluster.master)
        copy = self._values.prepared(program, _nbytes(variables))

        def take() -> SnapshotHandle:
            copy()
            return handle

        return take

    def copy(
        self, pairs: Sequence[tuple[Variable, Variable]], *, at_once: bool = False
    ) -> None:
        """Copies the first of each pair of shards to the second, from task to task.

        Args:
          pairs: of whole variables of one type, or shards.
          at_once: those of each task at one moment.
        """
        targets = {source.spec.key: target for source, target in pairs}
        sources = [source for source, _ in pairs]
        self._variables.look_up(v.spec for pair in pairs for v in pair)
        for piece in [sources] if at_once and sources else in_pieces(sources):
            copies = [targets[source.spec.key] for source in piece]
            self._values.run_once("copy", partial(_copied, piece, copies), piece)

    def _copy(self, shard: Variable, container: str) -> Variable:
        # Never initialised: the snapshot is what writes it first.
        return Variable(
            shard.name,
            (shard.shape, shard.dtype, None),
            device=self._variables.tasks[shard.spec.key],
            container=container,
        )


def _nbytes(variables: Sequence[Variable]) -> int:
    return sum(nbytes_of(variable.spec) for variable in variables)


def _copied(variables: Sequence[Variable], copies: Sequence[Variable]) -> None:
    """Reads all first: what one task holds is one read then."""
    values = [variable[...] for variable in variables]
    for copy, value in zip(copies, values, strict=True):
        copy[...] = value


def _copying(
    pairs: Iterable[tuple[TaskName, tuple[VariableSpec, VariableSpec]]],
    driver: TaskName,
) -> Program:
    """Returns a program without code that copies variables, each task's at a moment.

    Args:
      pairs: what is copied and to what, with the task of both.
      driver: starts the steps.
    """
    by_task: defaultdict[TaskName, list[tuple[VariableSpec, VariableSpec]]]
    by_task = defaultdict(list, {driver: []})
    for task, pair in pairs:
        by_task[task].append(pair)
    return Program(
        name="snapshot",
        driver=driver,
        partitions=tuple(
            _partition(task, by_task[task], drives=task == driver)
            for task in sorted(by_task)
        ),
        segments=(),
        feeds=(),
        fetches=(),
    )


def _partition(
    task: TaskName, pairs: list[tuple[VariableSpec, VariableSpec]], *, drives: bool
) -> Partition:
    sources, copies = [s for s, _ in pairs], [c for _, c in pairs]
    values = tuple(range(len(pairs)))
    nodes: list[Node] = []
    if pairs:
        targets = tuple(range(len(pairs), 2 * len(pairs)))
        nodes += [ReadNode(values, values), WriteNode(targets, values)]
    if drives:
        nodes.append(FetchNode(()))
    return Partition(
        task=task,
        values=tuple(value_type(source.aval) for source in sources),
        variables=tuple(
            StoredVariable(v.name, value_type(v.aval), v.container)
            for v in (*sources, *copies)
        ),
        nodes=tuple(nodes),
    )
