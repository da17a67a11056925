"""Row nodes of the runtime (route, merge, split) in numpy, without padding.

Source: the primitives of ``jgraph.graph.rows.rows`` say the same on arrays of fixed
  length.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from jgraph.errors import MalformedMessageError, RowBudgetError, RowIdError
from jgraph.graph.rows.hash_keys import join_keys, route_keys
from jgraph.graph.rows.rows import (
    LEAST_ID,
    NO_ID,
    PAST_THE_END,
    Layout,
    check_row_count,
    have_rows,
    id_text,
    padding_of,
)
from jgraph.plan.program.nodes import (
    CheckNode,
    JoinNode,
    MergeNode,
    RouteNode,
    SegmentNode,
    SplitNode,
    UnpackNode,
    ValueId,
    ValueType,
    packed_starts,
    packed_type,
)
from jgraph.plan.program.program import Partition, row_type

# Size levels of row executables: few sizes, none much larger than needed.
#
# A segment of rows is exported once for any number of them
# (``jgraph.plan.lowering.by_count``) and compiled for a few: each size is about half of
# the one before.


LEAST_ROWS = 32
"""No size is below: fewer rows take no less time."""


def rows_at(level: int, most: int) -> int:
    """Returns how many rows a value of at most ``most`` is padded to at a level.

    An eighth more than a power of two of the whole: ids that are spread evenly over two
    shards are about half of all in each, sometimes a few more.

    Example:
      >>> [rows_at(level, 1000) for level in range(4)]
      [1000, 563, 282, 141]
    """
    return most if level == 0 else min(most, -(-9 * most // (8 << level)))


def at_level(type_: ValueType, level: int) -> ValueType:
    """Returns the type of what an executable takes at a level."""
    if not (type_.ragged and level):
        return type_
    return replace(type_, shape=(rows_at(level, type_.shape[0]), *type_.shape[1:]))


def smaller_sizes(types: Sequence[ValueType]) -> Iterator[list[ValueType]]:
    """Yields what an executable takes at each level but the first.

    Args:
      types: what it takes at most.

    Example:
      >>> rows = ValueType((100, 4), "float32", ragged=True)
      >>> [types[0].shape for types in smaller_sizes([rows])]
      [(57, 4)]
    """
    largest = max((t.shape[0] for t in types if t.ragged), default=0)
    level = 1
    while rows_at(level, largest) >= LEAST_ROWS:
        yield [at_level(type_, level) for type_ in types]
        level += 1


def level_of(
    partition: Partition, node: SegmentNode, values: Mapping[ValueId, Any]
) -> int:
    """Returns the highest level at which all rows that a segment takes have room.

    Args:
      partition: of the node.
      node: the segment.
      values: of this step.
    """
    rows = (*node.row_updates, *node.row_reads)
    counts = [(len(values[r.ids]), row_type(partition, r)) for r in rows]
    counts += [(len(values[v]), t) for v, t in _ragged(partition, node)]
    largest = max((t.shape[0] for _, t in counts if t.ragged), default=0)
    level = 0
    while rows_at(level + 1, largest) >= LEAST_ROWS and all(
        count <= rows_at(level + 1, t.shape[0]) for count, t in counts if t.ragged
    ):
        level += 1
    return level


def _ragged(partition: Partition, node: SegmentNode) -> list[tuple[ValueId, ValueType]]:
    types = [(v, partition.values[v]) for v in node.inputs]
    return [(v, type_) for v, type_ in types if type_.ragged]


Array: TypeAlias = "np.ndarray[Any, Any]"

_ALIGNMENT = 64


def route(
    ids: Array,
    layout: Layout,
    feature: str = "",
    *,
    drop: bool = False,
    most: int = 0,
) -> tuple[Array, list[Array]]:
    """Returns (position of each id in the merged rows, needed rows per shard).

    Args:
      ids: int32[n], ids in the whole table; uint32[n, 2], keys, of a hash table.
      layout: the shards.
      feature: where the ids come from, for the message.
      drop: an id out of range is not an error; its position is ``n``.
      most: how many rows may be needed; 0: any number.

    Returns:
      positions: int32[n].
      local: per shard int32[m]: rows of that shard, each once, ascending; of a hash
        table int64[m]: keys.

    Raises:
      RowIdError: an id is out of range, and not ``NO_ID``.
      RowBudgetError: more rows are needed than there may be.
      GraphError: the table has more rows than int32 counts.

    Example:
      >>> positions, (a, b) = route(np.array([4, 1, 4]), Layout((3, 2)))
      >>> positions.tolist(), a.tolist(), b.tolist()
      ([1, 0, 1], [1], [1])
    """
    ids = np.asarray(ids)
    if layout.kind == "hash":
        positions, local = route_keys(join_keys(ids), layout.shards)
        _check_budget(sum(map(len, local)), most, feature)
        return positions, local
    check_row_count(layout.rows, feature)
    known = None
    if ids.size and (ids.min() < 0 or ids.max() >= layout.rows):
        known = (ids >= 0) & (ids < layout.rows)
        wrong = ~known & (ids != NO_ID)
        if not drop and wrong.any():
            raise _out_of_range(ids, wrong, layout.rows, feature)
    # The number of a row among those of all shards, one shard after the other.
    places = ids if known is None else ids[known]
    starts = np.array([0, *accumulate(layout.sizes)], np.int32)
    is_whole = layout.shards == 1
    if layout.kind == "mod" and not is_whole:
        places = starts[places % layout.shards] + places // layout.shards
    needed, positions = _each_once(places, layout.rows)
    _check_budget(len(needed), most, feature)
    if known is not None:
        all_positions = np.full(ids.shape, len(ids), np.int32)
        all_positions[known] = positions
        positions = all_positions
    if is_whole:
        return positions, [needed]
    cuts = np.searchsorted(needed, starts)
    local = [needed[cuts[s] : cuts[s + 1]] - starts[s] for s in range(layout.shards)]
    return positions, local


def check_ids(ids: Array, rows: int, feature: str = "") -> None:
    """Refuses ids without a row.

    Args:
      ids: integers of any shape.
      rows: of the table.
      feature: where the ids come from, for the message.

    Raises:
      RowIdError: an id is out of range.

    Example:
      >>> check_ids(np.array([[4, 1]]), 5)
    """
    if have_rows(ids, rows):
        return
    wide = ids.ravel().astype(f"{ids.dtype.kind}8")
    numbers = np.minimum(wide, PAST_THE_END).astype(np.int64)
    numbers = np.maximum(numbers, LEAST_ID)
    raise _out_of_range(numbers, (numbers < 0) | (numbers >= rows), rows, feature)


_FEW_ROWS = 4096
"""To mark which of so many rows are needed takes less time than to sort their ids."""


def _each_once(places: Array, rows: int) -> tuple[Array, Array]:
    """Returns numbers below ``rows``, ascending, each once, and where each is there."""
    if rows > _FEW_ROWS:
        needed, found = np.unique(places, return_inverse=True)
        return needed.astype(np.int32), found.astype(np.int32).reshape(-1)
    position = np.zeros(rows, np.int32)
    position[places] = 1
    needed = position.nonzero()[0].astype(np.int32)
    position[needed] = np.arange(len(needed), dtype=np.int32)
    return needed, position[places]


def merge(local: Sequence[Array], rows: Sequence[Array], type_: ValueType) -> Array:
    """Returns the rows of all shards one after the other, then padding.

    Ids are followed by a number past the end of any table: zero would be row 0.

    Args:
      local: from ``route``.
      rows: per shard at least as many rows; more are left out.
      type_: of the result.

    Raises:
      MalformedMessageError: rows that are not what ``local`` names.

    Example:
      >>> ids, rows = np.array([7]), np.array([[1.0, 2.0]])
      >>> merge([ids], [rows], ValueType((2, 2), "float32")).tolist()
      [[1.0, 2.0], [0.0, 0.0]]
    """
    padding = padding_of(type_)
    if len(rows) == 1 and rows[0].dtype == type_.np_dtype:
        whole = rows[0]
        if whole.shape == type_.shape and _is_all(whole[len(local[0]) :], padding):
            return whole
    merged = aligned_empty(type_)
    at = 0
    for ids, part in zip(local, rows, strict=True):
        end = at + len(ids)
        if end > len(merged) or part.shape[1:] != merged.shape[1:]:
            raise _not_the_rows(part, type_)
        if len(part) < len(ids):
            raise _not_the_rows(part, type_)
        merged[at:end] = part[: len(ids)]
        at = end
    merged[at:] = padding
    return merged


def split(values: Array, local: Sequence[Array]) -> list[Array]:
    """Returns the rows of each shard, as views: the reverse of ``merge``.

    Of a single shard that needs nearly all, padding at the end is left on: what takes
    the rows padded would make a copy for it.

    Example:
      >>> a, b = split(np.array([5, 6, 0]), [np.array([2]), np.array([9])])
      >>> a.tolist(), b.tolist()
      ([5], [6])
    """
    if len(local) == 1:
        end = len(local[0])
        whole = nearly(end, len(values))
        is_padded = whole and _is_all(values[end:], padding_of(values))
        return [values] if is_padded else [values[:end]]
    ends = np.cumsum([len(ids) for ids in local])
    return [values[end - len(ids) : end] for ids, end in zip(local, ends, strict=True)]


def moved(
    node: RouteNode | CheckNode | MergeNode | SplitNode | UnpackNode | JoinNode,
    value_of: Callable[[ValueId], Array],
    types: Sequence[ValueType],
) -> list[Array]:
    """Returns the results of a node that moves rows, or values.

    Args:
      node: the node.
      value_of: gives the values that it takes.
      types: of the values of its partition.
    """
    if isinstance(node, RouteNode):
        ids = value_of(node.ids)
        positions, local = route(
            *(ids, node.layout, node.feature), drop=node.drop, most=node.most
        )
        return [positions, *local]
    if isinstance(node, CheckNode):
        values = np.asarray(value_of(node.values))
        check_ids(
            values[tuple(map(slice, node.starts, node.ends))], node.rows, node.feature
        )
        return [values, _LOOKED_AT]
    if isinstance(node, UnpackNode):
        cuts = cuts_of([types[v] for v in node.outs])
        return unpacked(np.asarray(value_of(node.value)), cuts)
    if isinstance(node, JoinNode):
        return [put_together([np.asarray(value_of(v)) for v in node.values])]
    local = [value_of(v) for v in node.local]
    if isinstance(node, SplitNode):
        return split(np.asarray(value_of(node.value)), local)
    rows = [np.asarray(value_of(v)) for v in node.values]
    return [merge(local, rows, types[node.out])]


def put_together(parts: Sequence[Array]) -> Array:
    """Returns arrays one after the other along their first axis, copied.

    Example:
      >>> put_together([np.int32([1, 2]), np.int32([3])]).tolist()
      [1, 2, 3]
    """
    rows = sum(len(part) for part in parts)
    type_ = ValueType((rows, *parts[0].shape[1:]), parts[0].dtype.name)
    return np.concatenate(parts, out=aligned_empty(type_))


_LOOKED_AT = np.zeros((), np.int32)

Cut: TypeAlias = tuple[int, int, tuple[int, ...]]
"""Where a value begins and ends in a flat array, and its shape."""


def cuts_of(types: Sequence[ValueType]) -> tuple[Cut, ...]:
    """Returns where values lie in a flat array, see ``packed_starts``."""
    starts = packed_starts(types)
    return tuple(
        (start, start + math.prod(type_.shape), type_.shape)
        for type_, start in zip(types, starts, strict=False)
    )


def packed(values: Sequence[Array], types: Sequence[ValueType]) -> Array:
    """Returns values as they lie in one flat array, see ``packed_starts``."""
    return joined(values, packed_type(types), cuts_of(types))


def joined(values: Sequence[Array], flat_type: ValueType, cuts: Sequence[Cut]) -> Array:
    """Returns values as they lie in one flat array of which the type is known."""
    flat, end = aligned_empty(flat_type), 0
    for value, (start, stop, _) in zip(values, cuts, strict=True):
        flat[end:start] = 0
        flat[start:stop] = value.ravel()
        end = stop
    flat[end:] = 0
    return flat


def unpacked(flat: Array, cuts: Sequence[Cut]) -> list[Array]:
    """Returns the values that lie in a flat array, as views."""
    return [flat[start:stop].reshape(shape) for start, stop, shape in cuts]


def padded(value: Any, type_: ValueType) -> Any:
    """Returns a ragged value at its full length: what an executable takes.

    Ids are followed by a number past the end of any table, rows by zeros.

    Raises:
      MalformedMessageError: it has more rows than its type, or others.

    Example:
      >>> two = ValueType((2,), "int32", ragged=True)
      >>> padded(np.array([3], np.int32), two).tolist()
      [3, 2147483647]
    """
    if not type_.ragged or value.shape == type_.shape:
        return value
    count = len(value)
    if count > type_.shape[0] or value.shape[1:] != type_.shape[1:]:
        raise _not_the_rows(value, type_)
    full = aligned_empty(type_)
    full[:count] = value
    full[count:] = padding_of(type_)
    return full


def nearly(count: int, most: int) -> bool:
    """Whether padding ``count`` rows to ``most`` costs less than copying them later.

    Example:
      >>> nearly(90, 100), nearly(60, 100)
      (True, False)
    """
    return most - most // 8 <= count <= most


def aligned_empty(type_: ValueType) -> Array:
    """Returns fresh memory for a value; JAX takes it without a copy on a CPU."""
    raw = np.empty(type_.nbytes + _ALIGNMENT, np.uint8)
    offset = -raw.__array_interface__["data"][0] % _ALIGNMENT
    flat = raw[offset : offset + type_.nbytes]
    return flat.view(type_.np_dtype).reshape(type_.shape)


def _is_all(values: Array, number: int) -> bool:
    return not (values.any() if number == 0 else (values != number).any())


def _out_of_range(ids: Array, wrong: Array, rows: int, feature: str) -> RowIdError:
    first = int(np.argmax(wrong))
    where = f"feature '{feature}'" if feature else "a lookup"
    count = int(np.sum(wrong))
    more = f" and {count - 1:,} more" if count > 1 else ""
    return RowIdError(
        f"{where} has the id {id_text(int(ids[first]))} at position {first}{more}, and "
        f"its table has rows 0 to {rows - 1:,}; mend the ids, use a larger table, or "
        "let such ids have no row: jnp.take(table, ids, axis=0, mode='fill', "
        "fill_value=0)",
        feature=feature,
        id=int(ids[first]),
        rows=rows,
    )


def _check_budget(count: int, most: int, feature: str) -> None:
    if most and count > most:
        raise RowBudgetError(
            f"feature '{feature}' needs {count:,} rows in a round, and a worker may "
            f"hold {most:,}; raise LocalSGD(row_budget={count}) or more, or let a "
            "round have fewer steps",
            feature=feature,
            rows=count,
            budget=most,
        )


def _not_the_rows(value: Array, type_: ValueType) -> MalformedMessageError:
    shape = math.prod(value.shape[:1]), *value.shape[1:]
    return MalformedMessageError(
        f"rows of shape {list(shape)} came where {type_} are due; the sender's program "
        "is another one"
    )
