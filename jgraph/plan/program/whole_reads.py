"""Variables that one task of a program sends another whole, as they are.

Who takes part in a step has in its hands what it read: the messages in which variables
came whole, and what an update writes of them, are told by the partitions.
"""

from collections import Counter
from dataclasses import dataclass
from typing import final

from jgraph.graph.ir import TaskName
from jgraph.plan.program.nodes import (
    LookupNode,
    ReadNode,
    SegmentNode,
    SendNode,
    ValueId,
    WriteNode,
    runs,
)
from jgraph.plan.program.program import Partition, Program, StoredVariable


@final
@dataclass(frozen=True, slots=True)
class WholeRead:
    """A value of a message that is a variable, or several in a flat array.

    Attributes:
      key: of the message.
      place: of the value in it.
      variables: of the task that sends it.
    """

    key: str
    place: int
    variables: tuple[StoredVariable, ...]


def whole_reads(program: Program, owner: TaskName, reader: TaskName) -> list[WholeRead]:
    """Returns the variables of a task that another one gets in each step.

    Example:
      >>> from jgraph.plan.program.nodes import RecvNode, ValueType
      >>> owner, worker = TaskName("/job:worker/task:0"), TaskName("/job:worker/task:1")
      >>> w = StoredVariable("params/w", ValueType((2,), "float32"))
      >>> nodes = ReadNode((0,), (0,)), SendNode(worker, "m0", (0,))
      >>> parts = (Partition(owner, (w.type,), (w,), nodes),)
      >>> program = Program("step", worker, parts, (), (), ())
      >>> [(r.key, r.variables[0].name) for r in whole_reads(program, owner, worker)]
      [('m0', 'params/w')]
    """
    found: list[WholeRead] = []
    for partition in program.partitions:
        if partition.task == owner:
            read = _read(partition)
            for node in partition.nodes:
                if isinstance(node, SendNode) and node.dst == reader:
                    found += [
                        WholeRead(node.key, place, read[value])
                        for place, value in enumerate(node.values)
                        if value in read
                    ]
    return found


def _read(partition: Partition) -> dict[ValueId, tuple[StoredVariable, ...]]:
    read: dict[ValueId, tuple[StoredVariable, ...]] = {}
    for node in partition.nodes:
        if isinstance(node, ReadNode):
            named = [partition.variables[v] for v in node.variables]
            packed, alone = runs(named, node.packs)
            each = [*map(tuple, packed), *((variable,) for variable in alone)]
            read.update(zip(node.outs, each, strict=True))
    return read


def writings(partition: Partition) -> Counter[str] | None:
    """Returns how often a step writes each variable; None: that does not show.

    What is averaged is not among these, and of a hash table it does not show.
    """
    found = Counter[str]()
    for node in partition.nodes:
        numbers: tuple[int, ...] = ()
        match node:
            case WriteNode():
                numbers = node.variables
            case SegmentNode():
                numbers = (*node.updates, *(r.variable for r in node.row_updates))
            case LookupNode():
                if any(partition.variables[r.variable].table for r in node.rows):
                    return None
        variables = [partition.variables[number] for number in numbers]
        if any(variable.table is not None for variable in variables):
            return None
        found.update(variable.name for variable in variables)
    return found
