"""Change-log records, and the partition of a task that replays them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

import numpy as np

from jgraph.graph.device import is_worker
from jgraph.graph.ir import TaskName
from jgraph.graph.rows.hash_spec import HashSpec
from jgraph.plan.program.nodes import (
    LookupNode,
    Node,
    RecvNode,
    SegmentNode,
    SendNode,
    WriteNode,
)
from jgraph.plan.program.program import Partition, Program


@final
@dataclass(frozen=True, slots=True)
class NodeRan:
    """A node changed state; see ``node_work.repeat``.

    Attributes:
      program: number of the program.
      node: its index in the task's partition.
    """

    program: int
    node: int


@final
@dataclass(frozen=True, slots=True)
class RowsAre:
    """Rows of a variable have values: ids (int32[m]) and rows, in this order.

    Attributes:
      name: of the variable.
      rows: how many it has.
    """

    name: str
    rows: int


@final
@dataclass(frozen=True, slots=True)
class KeyedRowsAre:
    """Some rows of a hash table are so, and perhaps all: see ``HashShard.copied``.

    Attributes:
      spec: of the table.
      ends: no more will come: this is what is not of one row, see ``HashShard.ends``.
    """

    spec: HashSpec
    ends: bool


What: TypeAlias = str | RowsAre | HashSpec | KeyedRowsAre | NodeRan
"""A variable has a value, by its name, or some of its rows have; a hash table has rows,
or some of them; a node changed state."""


@final
@dataclass(frozen=True, slots=True)
class Record:
    """What changed.

    Attributes:
      number: of the record, from 1, without gaps.
      what: see ``What``.
      arrays: the value, the rows (``HashShard.state``), or what the node took.
      version: of a value; or the update that a node had a part in, 0 for none.
    """

    number: int
    what: What
    arrays: Sequence[np.ndarray[Any, Any]]
    version: int = 0


def changes_state(partition: Partition, node: Node) -> bool:
    """Whether a node changes variables; what is averaged is not among these."""
    match node:
        case WriteNode():
            return True
        case SegmentNode():
            return bool(node.updates or node.row_updates)
        case LookupNode():  # keys come into a table, and others go
            variables = partition.variables
            hashed = (variables[rows.variable].table is not None for rows in node.rows)
            return not node.peeks and any(hashed)
        case _:
            return False


def changing(partition: Partition) -> frozenset[int]:
    """Returns the nodes that change variables, by index."""
    nodes = enumerate(partition.nodes)
    return frozenset(n for n, node in nodes if changes_state(partition, node))


def is_recorded(program: Program, task: TaskName, *, updates: bool) -> bool:
    """Whether a copy of what a task holds follows the steps of a program.

    Of a worker only the updates: what it has of its own steps, as what rounding took
    from gradients, begins anew with its process.

    Args:
      program: has a partition of the task, or none.
      task: who holds variables.
      updates: the program makes synchronous updates.
    """
    has_part = any(part.task == task for part in program.partitions)
    return has_part and (updates or not is_worker(task))


def replayed(
    program: Program, task: TaskName, onto: TaskName, container: str
) -> Program:
    """Returns a task's partition alone, for another task and other variables.

    Its nodes keep their numbers. It is for ``node_work.repeat``; as steps it never
    runs, as nobody sends it anything.

    Args:
      program: has a partition of ``task``.
      task: what it did.
      onto: does it again; may be the same task.
      container: of its variables there.
    """
    partition = program.partition(task)

    def away(peer: TaskName) -> TaskName:
        return task if peer == onto else peer  # no node talks to its own task

    def node(n: Node) -> Node:
        match n:
            case SendNode():
                return replace(n, dst=away(n.dst))
            case RecvNode():
                return replace(n, src=away(n.src))
            case _:
                return n

    used = {digest for n in partition.nodes if (digest := getattr(n, "digest", ""))}
    moved = replace(
        partition,
        task=onto,
        variables=tuple(replace(v, container=container) for v in partition.variables),
        nodes=tuple(map(node, partition.nodes)),
    )
    driver = onto if program.driver == task else away(program.driver)
    return replace(
        program,
        name=f"{program.name} again",
        driver=driver,
        partitions=(moved,),
        segments=tuple(s for s in program.segments if s.digest in used),
    )
