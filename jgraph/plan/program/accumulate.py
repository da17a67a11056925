"""Synchronous training as two programs: contribute gradients, apply their mean.

To the planner both are ordinary graphs, and what is averaged are ordinary variables
that live on the task of what they update. The gradient graph writes them, the apply
graph reads them. Here writing becomes contributing (``contributing``), and reading is
of the mean of what was contributed (``averaging``).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jgraph.errors import InternalError
from jgraph.graph.ir import TaskName
from jgraph.graph.rows.hash_keys import padded_pairs
from jgraph.plan.program.nodes import (
    AggregateNode,
    ContributeNode,
    LookupNode,
    Node,
    ReadNode,
    RowMean,
    SegmentNode,
    ValueId,
    ValueType,
    WriteNode,
)
from jgraph.plan.program.program import Partition, Program, StoredVariable
from jgraph.plan.program.row_values import padded

MEAN = "mean/"
"""Prefix of the names of variables that are averaged."""

IDS, ROWS = f"{MEAN}ids/", f"{MEAN}rows/"
"""Prefixes of those for rows: ``mean/rows/t`` has the rows of ``mean/ids/t``."""

SUM = f"{MEAN}sum/"
"""Prefix of those that are summed in place of that: uint32, modulo 2^32."""

SLOT = "slot/"
"""Prefix of the names of the int32 variables that a step writes its data slot to."""

_CHUNK = 1 << 16  # values at a time, so that sums stay in the cache


def mean(values: Sequence[np.ndarray[Any, Any]], over: int = 0) -> np.ndarray[Any, Any]:
    """Returns the mean of arrays of one type, summed in their order.

    The same arrays in the same order give the same bits. Half types are summed as
    float32. Of integers and booleans, which count or choose, the first is taken.

    Args:
      values: the arrays.
      over: of how many values it is the mean, as some are sums; 0: as there are arrays.

    Example:
      >>> mean([np.float32([1, 2]), np.float32([3, 6])]).tolist()
      [2.0, 4.0]
      >>> mean([np.uint32([7]), np.uint32([9])]).tolist()
      [7]
      >>> mean([np.float32([1]), np.float32([5])], over=3).tolist()  # 5 = 2 + 3
      [2.0]
    """
    first = np.asarray(values[0])
    if first.dtype.kind in "biu":
        return first
    over = over or len(values)
    result = _aligned(first.size, first.dtype)
    rows = [np.ascontiguousarray(value).reshape(-1) for value in values]
    for start in range(0, first.size, _CHUNK):
        piece = slice(start, start + _CHUNK)
        total = _summed([row[piece] for row in rows], result[piece])
        if over != 1:
            np.divide(total, over, out=total)
        if total.dtype != result.dtype:
            result[piece] = total
    return result.reshape(first.shape)


def _summed(
    values: Sequence[np.ndarray[Any, Any]], out: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Returns the sum of arrays in their order: ``out``, or float32 of half types."""
    first, *others = values
    if out.dtype.itemsize < 4:
        total = first.astype(np.float32)
    elif others:  # without a copy of the first
        total = np.add(first, others.pop(0), out=out)
    else:
        total = out
        total[:] = first
    for value in others:
        total += value
    return total


def total(values: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Returns the sum of arrays of uint32, modulo 2^32.

    Example:
      >>> total([np.uint32([7, 2**32 - 1]), np.uint32([9, 3])]).tolist()
      [16, 2]
    """
    first = np.asarray(values[0])
    result = _aligned(first.size, first.dtype).reshape(first.shape)
    result[...] = first
    for value in values[1:]:
        np.add(result, value, out=result)
    return result


def mean_of_rows(
    contributions: Sequence[Sequence[np.ndarray[Any, Any]]], count: int
) -> list[np.ndarray[Any, Any]]:
    """Returns the mean of rows of a table, of which not every contribution has all.

    A row is the sum of those of its id, in the order of the contributions, over the
    number of all contributions: who has no such row adds zeros. So the rows are those
    of the mean of whole gradients.

    Args:
      contributions: of each its ids, int32[m], or keys, int64[m], each once, and
        arrays of their rows.
      count: rows of the result.

    Returns:
      The ids that any contribution has, ascending and padded, and arrays of their rows,
      padded with zeros. Keys are pairs of uint32, padded with ``NO_KEY``.

    Raises:
      MalformedMessageError: there are more than ``count``.

    Source: tensorflow/core/kernels/sparse_conditional_accumulator.h, which divides by
    the number of contributions too.

    Example:
      >>> one, two = (np.int32([0, 4]), np.float32([2, 2])), (np.int32([4]), [6.0])
      >>> ids, rows = mean_of_rows([one, two], 3)
      >>> ids.tolist(), rows.tolist()
      ([0, 4, 2147483647], [1.0, 4.0, 0.0])
    """
    columns = list(zip(*contributions, strict=True))
    ids = np.unique(np.concatenate(columns[0]))
    places = [np.searchsorted(ids, each) for each in columns[0]]
    type_ = ValueType((count,), ids.dtype.name, ragged=True)
    hashed = type_.dtype == "int64"
    full = padded(ids, type_)  # an error if there are more
    sums = [padded_pairs(ids, count) if hashed else full]
    for column in columns[1:]:
        first = np.asarray(column[0])
        half = first.dtype.itemsize < 4
        shape = (count, *first.shape[1:])
        total = np.zeros(shape, np.float32 if half else first.dtype)
        for place, rows in zip(places, column, strict=True):
            total[place] += rows[: len(place)]
        total[: len(ids)] /= len(column)
        result = _aligned(total.size, first.dtype).reshape(shape)
        result[:] = total
        sums.append(result)
    return sums


def contributing(program: Program, gate: str) -> Program:
    """Returns a program that contributes what it would write, once per task.

    Args:
      program: writes variables called ``mean/…``, and on each task that has some also
        one called ``slot/…``; it writes no others, except variables of the driver's
        own, which are written as they are.
      gate: of the tasks that it contributes to.
    """
    return _each(program, lambda p: _contributing(p, gate, program.driver))


def averaging(program: Program, gate: str, shards: Iterable[TaskName]) -> Program:
    """Returns a program that first sets its variables ``mean/…`` to what is averaged.

    Args:
      program: reads variables called ``mean/…``.
      gate: of the tasks that hold these variables.
      shards: tasks with that gate; each has a part in the program.
    """
    with_gate = set(shards)
    return _each(program, lambda p: _averaging(p, gate) if p.task in with_gate else p)


def gated(program: Program, gate: str) -> Program:
    """Returns a program whose steps pass ``gate`` where they find variables."""

    def with_gate(partition: Partition) -> Partition:
        remote = partition.variables and partition.task != program.driver
        return replace(partition, gate=gate) if remote else partition

    return _each(program, with_gate)


def shards_of(program: Program) -> list[TaskName]:
    """Returns the tasks on which steps of a program pass a gate, sorted."""
    return sorted(p.task for p in program.partitions if p.gate)


def _each(program: Program, change: Callable[[Partition], Partition]) -> Program:
    return replace(program, partitions=tuple(map(change, program.partitions)))


def _contributing(partition: Partition, gate: str, driver: TaskName) -> Partition:
    written: dict[int, ValueId] = {}
    remaining: dict[int, Node] = {}
    for index, node in enumerate(partition.nodes):
        if not isinstance(node, WriteNode):
            remaining[index] = node
            continue
        own, contributed = _apart(partition, node, is_driver=partition.task == driver)
        written.update(contributed)
        if own is not None:
            remaining[index] = own
    means = [v for v in written if _starts(partition.variables[v], MEAN)]
    if not written:
        return partition
    slots = [
        written.pop(v) for v in list(written) if _starts(partition.variables[v], SLOT)
    ]
    others = [v for v in written if v not in means]
    if others or not slots:
        names = [partition.variables[v].name for v in others]
        raise InternalError.of(
            f"a gradient graph that writes {names} on {partition.task}, with "
            f"{len(slots)} slots"
        )
    contribute = ContributeNode(tuple(written), tuple(written.values()), slots[0])
    place = {old: new for new, old in enumerate(remaining)}
    nodes = [_moved(node, place) for node in remaining.values()]
    variables = _as_given(partition, written)
    return replace(
        partition, variables=variables, nodes=(*nodes, contribute), gate=gate
    )


def _apart(
    partition: Partition, node: WriteNode, *, is_driver: bool
) -> tuple[WriteNode | None, dict[int, ValueId]]:
    """Returns what a node writes to the driver's own variables, and what it gives."""
    pairs = dict(zip(node.variables, node.values, strict=True))
    contributed = {
        v: value
        for v, value in pairs.items()
        if not is_driver or partition.variables[v].name.startswith((MEAN, SLOT))
    }
    own = {v: value for v, value in pairs.items() if v not in contributed}
    write = replace(node, variables=tuple(own), values=tuple(own.values()))
    return (write if own else None), contributed


def _as_given(
    partition: Partition, written: Mapping[int, ValueId]
) -> tuple[StoredVariable, ...]:
    """Returns the variables; keys are int64, for which int32 stands in a graph."""
    variables = list(partition.variables)
    for v, value in written.items():
        type_ = replace(variables[v].type, dtype=partition.values[value].dtype)
        variables[v] = replace(variables[v], type=type_)
    return tuple(variables)


def _averaging(partition: Partition, gate: str) -> Partition:
    variables = _with_ids(partition.variables)
    named = {v.name: n for n, v in enumerate(variables) if _starts(v, MEAN)}
    row_means = [
        RowMean(n, tuple(named[r] for r in (_rows_beside(name),) if r in named))
        for name, n in named.items()
        if name.startswith(IDS)
    ]
    means = tuple(n for v, n in named.items() if not v.startswith((IDS, ROWS)))
    first = AggregateNode(means, tuple(row_means))
    place = {old: old + 1 for old in range(len(partition.nodes))}
    nodes = [
        _after_mean(_moved(node, place), first.all_variables)
        for node in partition.nodes
    ]
    return replace(partition, variables=variables, nodes=(first, *nodes), gate=gate)


def _rows_beside(ids: str) -> str:
    return ROWS + ids.removeprefix(IDS)


def _with_ids(variables: tuple[StoredVariable, ...]) -> tuple[StoredVariable, ...]:
    """Adds the ids of rows that are read without them: their mean needs these."""
    found = {v.name for v in variables}
    missing = [
        StoredVariable(name, ValueType(v.type.shape[:1], "int32"), v.container)
        for v in variables
        if _starts(v, ROWS) and (name := IDS + v.name.removeprefix(ROWS)) not in found
    ]
    return (*variables, *missing)


def _moved(node: Node, place: dict[int, int]) -> Node:
    """Returns a node of which the nodes that it follows have new places."""
    if isinstance(node, SegmentNode | ReadNode | WriteNode | LookupNode):
        return replace(node, after=tuple(place[i] for i in node.after if i in place))
    return node


def _after_mean(node: Node, means: tuple[int, ...]) -> Node:
    """Returns a node that follows the first one if it reads what that one sets."""
    match node:
        case SegmentNode() if {*node.reads, *node.updates} & set(means):
            return replace(node, after=(0, *node.after))
        case ReadNode() if set(node.variables) & set(means):
            return replace(node, after=(0, *node.after))
        case _:
            return node


def _starts(variable: StoredVariable, prefix: str) -> bool:
    return variable.name.startswith(prefix)


def _aligned(size: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Returns an array that JAX takes without a copy: aligned to 64 bytes."""
    memory = np.empty(size * dtype.itemsize + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size * dtype.itemsize].view(dtype)
