"""Consistent snapshots of variables, taken while training updates them.

One step copies what a task holds to variables beside it: a read of several variables is
of one moment, and no update waits for more than that. The copies are then read piece by
piece, or written to files by their tasks, and dropped.
"""

import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

from jgraph.client.connection import Connection
from jgraph.client.state.snapshot_handle import SnapshotHandle
from jgraph.client.values import VariableValues, in_pieces, types_of
from jgraph.client.variables import VariableDirectory, shards_of
from jgraph.graph.ir import TaskName
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.plan.placement.spread import nbytes_of
from jgraph.plan.plan import plan
from jgraph.plan.program.program import Program


@final
class Snapshots:
    """Takes snapshots of variables; each needs as much memory again on their tasks."""

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
        self._variables.look_up(v.spec for v in variables)
        container = f"snapshot-{uuid.uuid4().hex[:12]}"
        shards = shards_of(variables)
        copies = [self._copy(shard, container) for shard in shards]

        def release() -> None:
            self._cluster.reset(container)
            for copy in copies:
                self._variables.tasks.pop(copy.spec.key, None)

        try:
            self._values.run_once("snapshot", partial(_copied, shards, copies), shards)
        except BaseException:
            release()
            raise
        keys = [shard.spec.key for shard in shards]
        tasks = {key: self._variables.tasks[key] for key in keys}
        by_key = dict(zip(keys, copies, strict=True))
        return SnapshotHandle(self._values, by_key, tasks, release)

    def repeatable(
        self, variables: Sequence[Variable], driver: TaskName
    ) -> tuple[Program, SnapshotHandle]:
        """Returns what copies variables whenever it is run, and what is held then.

        Args:
          variables: which.
          driver: of the program.
        """
        self._variables.look_up(v.spec for v in variables)
        container = f"snapshot-{uuid.uuid4().hex[:12]}"
        shards = shards_of(variables)
        copies = [self._copy(shard, container) for shard in shards]
        with types_of(shards):
            graph, _ = trace(partial(_copied, shards, copies), variables=shards)
            planned = plan(
                graph,
                tasks=self._cluster.tasks(),
                driver=driver,
                variable_tasks=self._variables.tasks,
                platforms=self._cluster.platforms,
            )
        keys = [shard.spec.key for shard in shards]
        tasks = {key: self._variables.tasks[key] for key in keys}
        by_key = dict(zip(keys, copies, strict=True))
        held = SnapshotHandle(
            self._values, by_key, tasks, lambda: self._cluster.reset(container)
        )
        return planned.program, held

    def prepared(self, variables: Sequence[Variable]) -> Callable[[], SnapshotHandle]:
        """Returns what takes a snapshot at once; each in place of the one before."""
        program, held = self.repeatable(variables, self._cluster.master)
        nbytes = sum(nbytes_of(variable.spec) for variable in variables)
        copy = self._values.prepared(program, nbytes)

        def take() -> SnapshotHandle:
            copy()
            return held

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
            given = [targets[source.spec.key] for source in piece]
            self._values.run_once("copy", partial(_copied, piece, given), piece)

    def _copy(self, shard: Variable, container: str) -> Variable:
        # Never initialised: the snapshot is what writes it first.
        return Variable(
            shard.name,
            (shard.shape, shard.dtype, None),
            device=self._variables.tasks[shard.spec.key],
            container=container,
        )


def _copied(variables: Sequence[Variable], copies: Sequence[Variable]) -> None:
    """Reads all first: what one task holds is one read then."""
    values = [variable[...] for variable in variables]
    for copy, value in zip(copies, values, strict=True):
        copy[...] = value
