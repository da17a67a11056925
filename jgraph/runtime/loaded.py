"""Loaded partition: its executables and the dependencies of its nodes."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from jgraph.errors import InvalidProgramError
from jgraph.graph.ir import TaskName
from jgraph.plan.program.nodes import (
    AggregateNode,
    ConstNode,
    FeedNode,
    LookupNode,
    Node,
    ReadNode,
    SegmentNode,
    SendNode,
    ValueId,
    ValueType,
    WriteNode,
    inputs_of,
    outputs_of,
)
from jgraph.plan.program.program import Partition, SegmentCode, row_type
from jgraph.runtime.compiled.compile_cache import (
    CompileCache,
    Executable,
    SizedExecutable,
)
from jgraph.runtime.cost import Cost


@final
@dataclass(frozen=True, slots=True)
class LoadedPartition:
    """A partition with what its executor needs, computed once per registration.

    Attributes:
      partition: the partition itself.
      executables: per node, the compiled segment (None for other nodes).
      inputs: per node, the values that it takes, each once.
      outputs: per node, the values that it makes.
      needs: per node, how many values and earlier nodes it waits for.
      consumers: per value, the nodes that take it.
      followers: per node, the nodes that name it in ``after``.
      costs: per node, what running it has cost so far.
      owned: values that a segment makes for one use only.
      fed: tasks that are sent what is there when a step begins.
    """

    partition: Partition
    executables: tuple[Executable | None, ...]
    inputs: tuple[tuple[ValueId, ...], ...]
    outputs: tuple[tuple[ValueId, ...], ...]
    needs: tuple[int, ...]
    consumers: tuple[tuple[int, ...], ...]
    followers: tuple[tuple[int, ...], ...]
    costs: tuple[Cost, ...]
    owned: frozenset[ValueId]
    fed: frozenset[TaskName]


def load_partition(
    partition: Partition, segments: Iterable[SegmentCode], cache: CompileCache
) -> LoadedPartition:
    """Compiles a partition's segments and indexes its nodes.

    Raises:
      InvalidProgramError: a segment is missing or its bytes are not its digest's.
    """
    codes = {code.digest: code for code in segments}
    executables: list[Executable | None] = []
    inputs: list[tuple[ValueId, ...]] = []
    needs: list[int] = []
    consumers: list[list[int]] = [[] for _ in partition.values]
    followers: list[list[int]] = [[] for _ in partition.nodes]
    for index, node in enumerate(partition.nodes):
        executables.append(_executable(partition, node, codes, cache))
        inputs.append(tuple(dict.fromkeys(inputs_of(node))))
        after = set(_after(node))
        needs.append(len(inputs[index]) + len(after))
        for value in inputs[index]:
            consumers[value].append(index)
        for earlier in after:
            followers[earlier].append(index)
    uses = Counter(v for node in partition.nodes for v in inputs_of(node))
    return LoadedPartition(
        partition,
        tuple(executables),
        tuple(inputs),
        tuple(map(outputs_of, partition.nodes)),
        tuple(needs),
        tuple(map(tuple, consumers)),
        tuple(map(tuple, followers)),
        tuple(Cost(kind=_kind(node)) for node in partition.nodes),
        frozenset(
            value
            for node in partition.nodes
            if isinstance(node, SegmentNode)
            for value in node.outs
            if uses[value] == 1
        ),
        _fed(partition),
    )


def _fed(partition: Partition) -> frozenset[TaskName]:
    known = {
        node.out for node in partition.nodes if isinstance(node, FeedNode | ConstNode)
    }
    return frozenset(
        node.dst
        for node in partition.nodes
        if isinstance(node, SendNode) and known.issuperset(node.values)
    )


def _after(node: Node) -> tuple[int, ...]:
    match node:
        case SegmentNode() | ReadNode() | WriteNode() | LookupNode():
            return node.after
        case _:
            return ()


def _kind(node: Node) -> str:
    match node:
        case SegmentNode():
            return "update" if node.updates or node.row_updates else "compute"
        case LookupNode() | ReadNode():
            return "lookup"
        case WriteNode() | AggregateNode():
            return "update"
        case _:
            return "rows"


def _executable(
    partition: Partition, node: Node, codes: dict[str, SegmentCode], cache: CompileCache
) -> Executable | None:
    if not isinstance(node, SegmentNode):
        return None
    if node.digest not in codes:
        raise InvalidProgramError(
            f"the program names segment {node.digest[:12]}… and does not bring it",
            digest=node.digest,
        )
    rows = len(node.row_updates) + len(node.row_reads)
    state = len(node.updates) + len(node.reads) + rows
    donated = (*range(len(node.updates)), *(state + i for i in node.donate))
    run = cache.load(codes[node.digest], donated)
    arguments = _arguments(partition, node)
    if isinstance(run, SizedExecutable) and not any(t.symbols for t in arguments):
        run.of(arguments)  # all rows that there can be: what fails, fails now
    return run


def _arguments(partition: Partition, node: SegmentNode) -> list[ValueType]:
    stored = [partition.variables[v].type for v in (*node.updates, *node.reads)]
    rows = [row_type(partition, r) for r in (*node.row_updates, *node.row_reads)]
    return [*stored, *rows, *(partition.values[v] for v in node.inputs)]
