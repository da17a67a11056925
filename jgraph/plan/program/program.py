"""Program: what the client ships and the tasks run. Plain data, no code.

A ``Program`` holds one ``Partition`` per task. A partition is a list of runtime nodes
in topological order over numbered values. Compiled code is in ``SegmentCode``:
serialized StableHLO under its SHA-256 digest, shared by all partitions of a program.
"""

from dataclasses import dataclass, replace
from typing import final

from jgraph.graph.ir import TaskName
from jgraph.graph.rows.hash_spec import HashSpec
from jgraph.plan.program.nodes import (
    LookupNode,
    Node,
    RecvNode,
    Rows,
    SegmentNode,
    SendNode,
    ValueType,
)


@final
@dataclass(frozen=True, slots=True)
class StoredVariable:
    """One variable of a partition as its task stores it."""

    name: str
    type: ValueType
    container: str = ""
    table: HashSpec | None = None
    """Of which hash table it is the column of that name; else it is an array."""


@final
@dataclass(frozen=True, slots=True)
class SegmentCode:
    """One compiled-to-be function: ``jax.export`` bytes and their SHA-256 digest."""

    digest: str
    exported: bytes
    platforms: tuple[str, ...]
    label: str
    """For people: what the segment computes, e.g. ``dot_general x4, add x9``."""


@final
@dataclass(frozen=True, slots=True)
class Partition:
    """The part of a program that one task runs.

    ``gate`` names the gate of the task that each step passes before it starts here; a
    partition with an ``AggregateNode`` belongs to its gate and passes at once.
    """

    task: TaskName
    values: tuple[ValueType, ...]
    variables: tuple[StoredVariable, ...]
    nodes: tuple[Node, ...]
    gate: str = ""


def row_type(partition: Partition, rows: Rows) -> ValueType:
    """Returns the type of the rows of a variable that ids name, padded."""
    stored, ids = partition.variables[rows.variable].type, partition.values[rows.ids]
    return ValueType((*ids.shape, *stored.shape[1:]), stored.dtype, ids.ragged)


@final
@dataclass(frozen=True, slots=True)
class Program:
    """What is shipped: partitions, code, and the names at the edges.

    ``driver`` is the task that gets the feeds, gives the fetches and starts steps.
    Every task with a partition takes part in every step.
    """

    name: str
    driver: TaskName
    partitions: tuple[Partition, ...]
    segments: tuple[SegmentCode, ...]
    feeds: tuple[tuple[str, ValueType], ...]
    fetches: tuple[tuple[str, ValueType], ...]

    def partition(self, task: TaskName) -> Partition:
        """Returns the partition of ``task``; KeyError if it has none."""
        for partition in self.partitions:
            if partition.task == task:
                return partition
        raise KeyError(task)

    def only(self, task: TaskName) -> "Program":
        """Returns what ``task`` needs of it: its partition and its segments."""
        own = self.partition(task)
        needed = {n.digest for n in own.nodes if isinstance(n, SegmentNode)}
        segments = tuple(code for code in self.segments if code.digest in needed)
        return replace(self, partitions=(own,), segments=segments)

    def peeking(self) -> "Program":
        """Returns the program with lookups that change no hash table."""

        def node(n: Node) -> Node:
            return replace(n, peeks=True) if isinstance(n, LookupNode) else n

        return replace(
            self,
            partitions=tuple(
                replace(p, nodes=tuple(map(node, p.nodes))) for p in self.partitions
            ),
        )

    def rename_task(self, old: TaskName, new: TaskName) -> "Program":
        """Returns the same program with task ``old`` called ``new`` everywhere.

        Between-graph replication: one plan serves every worker.
        """

        def name(task: TaskName) -> TaskName:
            return new if task == old else task

        def node(n: Node) -> Node:
            match n:
                case SendNode():
                    return replace(n, dst=name(n.dst))
                case RecvNode():
                    return replace(n, src=name(n.src))
                case _:
                    return n

        return replace(
            self,
            driver=name(self.driver),
            partitions=tuple(
                replace(p, task=name(p.task), nodes=tuple(node(n) for n in p.nodes))
                for p in self.partitions
            ),
        )
