"""Work of state and compute nodes, and its replay from a change log.

A node that changes state may tell what it took to a ``note``: the same node with the
same arrays, in the same order, changes the same state elsewhere by the same bits
(``repeat``).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np

from jgraph import _compat
from jgraph.errors import MalformedMessageError
from jgraph.plan.program.nodes import (
    AggregateNode,
    CheckNode,
    LookupNode,
    MergeNode,
    ReadNode,
    RouteNode,
    Rows,
    SegmentNode,
    SplitNode,
    ValueId,
    WriteNode,
    runs,
)
from jgraph.plan.program.program import row_type
from jgraph.plan.program.replay import changes_state
from jgraph.plan.program.row_values import at_level, level_of, moved, padded
from jgraph.runtime.compiled.compile_cache import SizedExecutable
from jgraph.runtime.gate import Gate, aggregator, averages
from jgraph.runtime.loaded import LoadedPartition
from jgraph.runtime.store.entry import RowsOf
from jgraph.runtime.store.local_mesh import SpreadExecutable, whole
from jgraph.runtime.store.store import RecordChange, VariableStore
from jgraph.runtime.store.undo import Undo

Array: TypeAlias = np.ndarray[Any, Any]
Note: TypeAlias = Callable[[Sequence[Array]], None]
"""Is told what a node took, while nobody else can change what it changed."""

Work: TypeAlias = (
    ReadNode
    | WriteNode
    | SegmentNode
    | AggregateNode
    | LookupNode
    | RouteNode
    | CheckNode
    | MergeNode
    | SplitNode
)


def work_of(
    loaded: LoadedPartition,
    index: int,
    values: dict[ValueId, Any],
    store: VariableStore,
    gate: Gate | None = None,
    note: Note | None = None,
    undo: Undo | None = None,
) -> Callable[[], list[Any]]:
    """Returns what a node does, to be called once, in any thread.

    Args:
      loaded: its partition.
      index: of the node; its kind is one of ``Work``.
      values: what it takes; forgotten when it is done.
      store: the variables of the task.
      gate: of the partition.
      note: is told what the node took, if it changes state.
      undo: is told what puts back what the node changed.
    """
    node = cast(Work, loaded.partition.nodes[index])
    record = None
    if note is not None and not isinstance(node, AggregateNode):
        record = _recording_of(loaded, index, node, values, note)
    match node:
        case ReadNode():
            read = loaded.variables[index][1]
            return lambda: list(store.read(read))
        case WriteNode():

            def write() -> list[Any]:
                new = [values[v] for v in node.values]
                mine = [n for n, v in enumerate(node.values) if v in loaded.owned]
                named = loaded.variables[index][0]
                # What is told is read later: it must stay as it is.
                owned = () if record else mine
                store.write(named, new, owned, record, undo, absent=node.absent)
                return []

            return write
        case AggregateNode():
            chosen, means = aggregator(gate).chosen(), loaded.variables[index][0]

            def average() -> list[Any]:
                results = averages(loaded.partition, node, means, chosen)
                owned = () if note else range(len(results))
                store.write(
                    means, results, owned, partial(note, results) if note else None
                )
                return []

            return average
        case LookupNode():
            return look_up(loaded, node, values, store, record)
        case SegmentNode():
            return lambda: _compute(loaded, index, node, values, store, record, undo)
        case _:
            types = loaded.partition.values
            return lambda: list(moved(node, values.__getitem__, types))


def look_up(
    loaded: LoadedPartition,
    node: LookupNode,
    values: Mapping[ValueId, Any] | Sequence[Any],
    store: VariableStore,
    record: RecordChange | None = None,
) -> Callable[[], list[Any]]:
    """Returns what looks up the rows of a node, see ``work_of``."""
    rows = _rows_of(loaded, node.rows, values)
    return lambda: list(store.lookup(rows, record, peeks=node.peeks))


def repeat(
    loaded: LoadedPartition, index: int, inputs: Sequence[Any], store: VariableStore
) -> None:
    """Does what a node did that told a ``Note`` of ``inputs``.

    Raises:
      MalformedMessageError: no node of this partition told that.
    """
    nodes = loaded.partition.nodes
    node = nodes[index] if 0 <= index < len(nodes) else None
    if isinstance(node, AggregateNode):
        means = loaded.variables[index][0]
        packed, alone = runs(means, means.packs)
        _check_count(inputs, [*packed, *alone])
        store.write(means, inputs)
    elif isinstance(node, WriteNode | LookupNode | SegmentNode):
        _check_count(inputs, loaded.inputs[index])
        values = dict(zip(loaded.inputs[index], inputs, strict=True))
        work_of(loaded, index, values, store)()
    else:
        raise MalformedMessageError(f"node {index} of a record changes no state")


def _check_count(inputs: Sequence[Any], due: Sequence[Any]) -> None:
    if len(inputs) != len(due):
        raise MalformedMessageError(
            f"a record has {len(inputs)} arrays for a node that takes {len(due)}"
        )


def _recording_of(
    loaded: LoadedPartition,
    index: int,
    node: Work,
    values: Mapping[ValueId, Any],
    note: Note,
) -> RecordChange | None:
    """Returns what tells that a node changed state; None: it changes none."""
    if not changes_state(loaded.partition, node):
        return None
    lent = frozenset[ValueId]()
    if isinstance(node, SegmentNode):
        # Their memory is the executable's once it runs.
        lent = frozenset(node.inputs[i] for i in node.donate)
    inputs = [
        np.array(values[v]) if v in lent else np.asarray(values[v])
        for v in loaded.inputs[index]
    ]
    return partial(note, inputs)


def _compute(
    loaded: LoadedPartition,
    index: int,
    node: SegmentNode,
    values: dict[ValueId, Any],
    store: VariableStore,
    record: RecordChange | None,
    undo: Undo | None,
) -> list[Any]:
    partition = loaded.partition
    run = loaded.executables[index]
    assert run is not None  # load_partition compiled it
    level = level_of(partition, node, values) if isinstance(run, SizedExecutable) else 0
    inputs = [values[v] for v in node.inputs]
    if loaded.is_padded[index]:
        inputs = [
            padded(value, at_level(partition.values[v], level))
            for v, value in zip(node.inputs, inputs, strict=True)
        ]
    spread = run if isinstance(run, SpreadExecutable) else None
    results = store.update(
        *loaded.variables[index],
        lambda *state: run(*state, *inputs),
        _rows_of(loaded, node.row_updates, values, level),
        _rows_of(loaded, node.row_reads, values, level),
        spread.layouts if spread else (),
        record,
        undo,
    )
    if spread:
        results = [whole(result) for result in results]
    # Now, not when this thread gets on: it may be memory for the peer's answer.
    values.clear()
    inputs.clear()
    _compat.release_arguments()
    return results


def _rows_of(
    loaded: LoadedPartition,
    rows: Sequence[Rows],
    values: Mapping[ValueId, Any] | Sequence[Any],
    level: int = 0,
) -> list[RowsOf]:
    partition = loaded.partition
    types = [at_level(row_type(partition, r), level) for r in rows]
    return [
        RowsOf(partition.variables[r.variable], values[r.ids], type_)
        for r, type_ in zip(rows, types, strict=True)
    ]
