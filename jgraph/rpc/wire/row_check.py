"""Validation of the row nodes of a program that came over the wire."""

from collections.abc import Sequence
from dataclasses import replace

from jgraph.errors import InvalidProgramError
from jgraph.graph.rows.rows import MOST_ROWS
from jgraph.plan.program.nodes import (
    CheckNode,
    LookupNode,
    MergeNode,
    RouteNode,
    Rows,
    SplitNode,
    ValueId,
    ValueType,
)
from jgraph.plan.program.program import Partition, row_type


def check_rows(
    partition: Partition,
    node: LookupNode | RouteNode | CheckNode | MergeNode | SplitNode,
) -> None:
    """Checks the types of a node that looks up or moves rows.

    Raises:
      InvalidProgramError: saying what is wrong.
    """
    types = partition.values
    match node:
        case LookupNode():
            due = [rows_of(partition, rows) for rows in node.rows]
            require_types([types[v] for v in node.outs], due)
        case RouteNode():
            _check_layout(node)
            ids = types[node.ids]
            count = ids.shape[:1]
            outs = [types[v] for v in (node.positions, *node.local)]
            if node.layout.kind == "hash":
                require(
                    (ids.shape[1:], ids.dtype) == ((2,), "uint32"), f"keys of {ids}"
                )
                local = ValueType(count, "int64", ragged=True)
            else:
                require(
                    (ids.shape, ids.dtype) == (count, "int32"), f"ids of type {ids}"
                )
                local = ValueType(count, "int32", ragged=True)
            require(len(count) == 1, f"ids of type {ids}")
            due = [ValueType(count, "int32"), *[local] * node.layout.shards]
            require_types(outs, due)
        case CheckNode():
            values = types[node.values]
            require_types(
                [types[v] for v in node.outs], [values, ValueType((), "int32")]
            )
            known = values.np_dtype.kind in "iu" and not values.ragged
            require(known, f"ids of type {values}")
            require(0 <= node.rows <= MOST_ROWS, "more rows than int32 counts")
            bounds = list(zip(node.starts, node.ends, strict=False))
            require(
                len(values.shape) == len(node.starts) == len(node.ends)
                and all(
                    0 <= start <= end <= size
                    for (start, end), size in zip(bounds, values.shape, strict=False)
                ),
                f"ids beyond the end of {values}",
            )
        case MergeNode():
            _check_shards(partition, node.local, node.values, node.out)
        case SplitNode():
            _check_shards(partition, node.local, node.outs, node.value)


def rows_of(partition: Partition, rows: Rows) -> ValueType:
    """Returns the type of the rows of a variable that ids name.

    Raises:
      InvalidProgramError: it has no rows, or these are no ids.
    """
    stored = partition.variables[rows.variable]
    require(bool(stored.type.shape), f"'{stored.name[:80]}' has no rows")
    _check_ids(partition.values[rows.ids], "int32" if stored.table is None else "int64")
    return row_type(partition, rows)


def require(condition: bool, message: str) -> None:
    """Refuses the program with ``message`` unless the condition holds."""
    if not condition:
        raise InvalidProgramError(message)


def require_types(actual: Sequence[ValueType], due: Sequence[ValueType]) -> None:
    """Refuses the program unless the types are those that are due."""
    same = list(actual) == list(due)
    require(same, f"types {_listed(actual)} where {_listed(due)} are due")


def _check_ids(type_: ValueType, *dtypes: str) -> None:
    same = len(type_.shape) == 1 and type_.dtype in dtypes and type_.ragged
    require(same, f"ids of type {type_}, which no route gives")


def _check_layout(node: RouteNode) -> None:
    sizes, shards = node.layout.sizes, node.layout.shards
    require(
        node.layout.kind in {"div", "mod", "hash"}, f"layout '{node.layout.kind[:40]}'"
    )
    require(all(size >= 0 for size in sizes), "a shard of negative size")
    require(node.layout.rows <= MOST_ROWS, "more rows than int32 counts")
    require(len(node.local) == shards > 0, "another number of shards")
    if node.layout.kind == "mod":
        rows = node.layout.rows
        turns = tuple(len(range(s, rows, shards)) for s in range(shards))
        require(turns == sizes, f"rows that do not go round {shards} shards")


def _check_shards(
    partition: Partition,
    local: Sequence[ValueId],
    parts: Sequence[ValueId],
    whole: ValueId,
) -> None:
    types = partition.values
    type_ = types[whole]
    require(len(local) == len(parts) > 0, "another number of shards")
    require(bool(type_.shape) and not type_.ragged, f"rows of type {type_}")
    for value in local:
        _check_ids(types[value], "int32", "int64")
        require(types[value].shape == type_.shape[:1], "not as many ids as rows")
    plain = [replace(types[v], ragged=False) for v in parts]
    require_types(plain, [type_] * len(parts))


def _listed(types: Sequence[ValueType]) -> str:
    return "[" + ", ".join(map(str, types))[:200] + "]"
