"""Loaded partition: its executables and the dependencies of its nodes."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

import numpy as np

from jgraph.coordination.timeline.node_times import NodeOrder, order_of
from jgraph.errors import InvalidProgramError
from jgraph.plan.program.nodes import (
    AggregateNode,
    ContributeNode,
    FetchNode,
    LookupNode,
    Node,
    ReadNode,
    RecvNode,
    SegmentNode,
    SendNode,
    UnpackNode,
    ValueId,
    ValueType,
    WriteNode,
    after_of,
    inputs_of,
    outputs_of,
    packed_types,
    runs,
)
from jgraph.plan.program.program import Partition, SegmentCode, row_type
from jgraph.plan.program.replay import changes_state
from jgraph.plan.program.row_values import Cut, cuts_of, smaller_sizes
from jgraph.runtime.compiled.compile_cache import (
    CompileCache,
    Executable,
    SizedExecutable,
)
from jgraph.runtime.cost import Cost
from jgraph.runtime.store.groups import VariableGroup


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
      releases: per node, the nodes that wait for it or what it makes, and for how much.
      taken_alone: per node, the values that it takes and no other node.
      taken_by_more: per node, those that others take too.
      variables: per node, the whole variables that it writes and that it only reads.
      types: per node, shape and dtype of what it receives.
      cuts: per node, where the values lie in the flat array that it takes.
      is_padded: per node, whether it takes values that may have fewer rows.
      in_turn: per node, whether it waits for the end of the step before.
      order: of the nodes.
      sends: how many of them send.
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
    releases: tuple[tuple[tuple[int, int], ...], ...]
    taken_alone: tuple[tuple[ValueId, ...], ...]
    taken_by_more: tuple[tuple[ValueId, ...], ...]
    variables: tuple[tuple[VariableGroup, VariableGroup], ...]
    types: tuple[list[tuple[tuple[int, ...], np.dtype[Any]]], ...]
    cuts: tuple[tuple[Cut, ...], ...]
    is_padded: tuple[bool, ...]
    in_turn: tuple[bool, ...]
    order: NodeOrder
    sends: int


def load_partition(
    partition: Partition,
    segments: Iterable[SegmentCode],
    cache: CompileCache,
    *,
    all_sizes: bool = False,
) -> LoadedPartition:
    """Compiles a partition's segments and indexes its nodes.

    Args:
      partition: of one task.
      segments: code of its segments, and perhaps of others.
      cache: of the task.
      all_sizes: a segment of rows that has run for no number of rows yet is compiled
        for each that may come; else when it comes.

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
        executables.append(_executable(partition, node, codes, cache, all_sizes))
        inputs.append(tuple(dict.fromkeys(inputs_of(node))))
        after = set(after_of(node))
        needs.append(len(inputs[index]) + len(after))
        for value in inputs[index]:
            consumers[value].append(index)
        for earlier in after:
            followers[earlier].append(index)
    uses = Counter(v for node in partition.nodes for v in inputs_of(node))
    outputs = tuple(map(outputs_of, partition.nodes))
    alone = [tuple(v for v in taken if len(consumers[v]) == 1) for taken in inputs]
    more = [tuple(v for v in taken if len(consumers[v]) > 1) for taken in inputs]
    releases = [
        Counter(n for v in results for n in consumers[v]) + Counter(followers[index])
        for index, results in enumerate(outputs)
    ]
    return LoadedPartition(
        partition,
        tuple(executables),
        tuple(inputs),
        outputs,
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
        tuple(tuple(waiting.items()) for waiting in releases),
        tuple(alone),
        tuple(more),
        tuple(_variables(partition, node) for node in partition.nodes),
        tuple(_types(partition, node) for node in partition.nodes),
        tuple(_cuts(partition, node) for node in partition.nodes),
        tuple(_is_padded(partition, taken) for taken in inputs),
        tuple(_in_turn(partition)),
        order_of(partition),
        sum(isinstance(node, SendNode) for node in partition.nodes),
    )


def _variables(partition: Partition, node: Node) -> tuple[VariableGroup, VariableGroup]:
    written: tuple[int, ...] = ()
    read: tuple[int, ...] = ()
    packs: tuple[int, ...] = ()
    read_packs: tuple[int, ...] = ()
    match node:
        case SegmentNode():
            written, packs = node.updates, node.packs
            read, read_packs = node.reads, node.read_packs
        case ReadNode():
            read, read_packs = node.variables, node.packs
        case WriteNode():
            written = node.variables
        case AggregateNode():
            packed = _averaged_flat(partition, node)
            packs = tuple(map(len, packed))
            written = tuple(dict.fromkeys([*chain(*packed), *node.all_variables]))
    named = partition.variables
    return (
        VariableGroup([named[v] for v in written], packs),
        VariableGroup([named[v] for v in read], read_packs),
    )


def _averaged_flat(partition: Partition, node: AggregateNode) -> list[Sequence[int]]:
    """Returns the runs of averaged variables that segments read as flat arrays."""
    found: list[Sequence[int]] = []
    remaining = set(node.variables)
    for other in partition.nodes:
        if isinstance(other, SegmentNode):
            packed, _ = runs(other.reads, other.read_packs)
            for run in packed:
                if remaining.issuperset(run):
                    remaining.difference_update(run)
                    found.append(run)
    return found


def _types(
    partition: Partition, node: Node
) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
    outs = node.outs if isinstance(node, RecvNode) else ()
    return [(partition.values[v].shape, partition.values[v].np_dtype) for v in outs]


def _cuts(partition: Partition, node: Node) -> tuple[Cut, ...]:
    if not isinstance(node, UnpackNode):
        return ()
    return cuts_of([partition.values[v] for v in node.outs])


def _is_padded(partition: Partition, taken: Sequence[ValueId]) -> bool:
    return any(partition.values[v].ragged for v in taken)


def _in_turn(partition: Partition) -> Iterator[bool]:
    """Yields whether each node waits for the end of the step before.

    So does what changes variables, what ends the driver's part, and what computes from
    values of other tasks: of its data alone, or of variables, a step computes ahead.
    """
    received: set[ValueId] = set()
    for node in partition.nodes:
        of_others = not received.isdisjoint(inputs_of(node))
        if of_others or isinstance(node, RecvNode):
            received.update(outputs_of(node))
        yield (
            isinstance(node, AggregateNode | ContributeNode | FetchNode)
            or (of_others and isinstance(node, SegmentNode))
            or changes_state(partition, node)
        )


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
    partition: Partition,
    node: Node,
    codes: dict[str, SegmentCode],
    cache: CompileCache,
    all_sizes: bool,
) -> Executable | None:
    if not isinstance(node, SegmentNode):
        return None
    if node.digest not in codes:
        raise InvalidProgramError(
            f"the program names segment {node.digest[:12]}… and does not bring it",
            digest=node.digest,
        )
    rows = len(node.row_updates) + len(node.row_reads)
    updates = len(node.updates) - sum(node.packs) + len(node.packs)
    reads = len(node.reads) - sum(node.read_packs) + len(node.read_packs)
    state = updates + reads + rows
    donated = (*range(updates), *(state + i for i in node.donate))
    run = cache.load(codes[node.digest], donated)
    arguments = _arguments(partition, node)
    if isinstance(run, SizedExecutable) and not any(t.symbols for t in arguments):
        run.of(arguments)  # all rows that there can be: what fails, fails now
        if all_sizes and run.sizes == 1:
            for smaller in smaller_sizes(arguments):
                run.of(smaller)
    return run


def _arguments(partition: Partition, node: SegmentNode) -> list[ValueType]:
    stored = [
        *packed_types([partition.variables[v].type for v in node.updates], node.packs),
        *packed_types(
            [partition.variables[v].type for v in node.reads], node.read_packs
        ),
    ]
    rows = [row_type(partition, r) for r in (*node.row_updates, *node.row_reads)]
    return [*stored, *rows, *(partition.values[v] for v in node.inputs)]
