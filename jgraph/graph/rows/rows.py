"""Primitives for rows of sharded tables: unique ids, routing, merging, splitting.

A graph states them on arrays of fixed length, padded at the end, so that
``eval_graph`` can run it anywhere. The runtime moves only the rows that are there.

* ``unique_rows`` is what a step says: these ids, each once, in ascending order.
* ``route_rows`` replaces it when the table's shards are known.
* ``merge_rows`` and ``split_rows`` go between one array of rows and one per shard.
* ``checked_ids`` are ids of a table that is read whole: one without a row is an error.

Padding of ids is a number past the last row, never one that could be an id: reads of
it give anything, writes to it change nothing. Padding of rows is zeros, which are
nobody's: ``padding_of`` says which of the two a value has. Row ``n`` of merged rows
belongs to the id of position ``n``; an id out of range has position ``len(ids)``, past
the end. ``NO_ID`` among the ids is out of range and never an error: a place without an
id, as in a bag that is not full.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from jgraph._compat import Primitive
from jgraph.errors import GraphError
from jgraph.graph.rows.hash_keys import NO_KEY

Array = jax.Array
Part: TypeAlias = tuple[tuple[int, int], ...]
"""Where a part of an array begins and ends along each axis."""

NO_ID = -(2**31)
"""Stands for no id among int32 ids: it has no row, and is no error."""

LEAST_ID = NO_ID + 1
"""The least int32 id, and what a wrong id is that would be no id."""

PAST_THE_END = 2**31 - 1
"""Follows int32 ids of rows: no table has such a row."""

MOST_ROWS = PAST_THE_END
"""A table of more rows has ids that int32 has no number for."""


def id_text(number: int) -> str:
    """Returns an id for people: in a graph it is int32, whatever it was in the data.

    Example:
      >>> id_text(7), id_text(-3), id_text(2**31 - 1)
      ('7', '-3 (4294967293 if unsigned)', '2147483647 (or more)')
      >>> id_text(LEAST_ID)
      '-2147483647 or -2147483648 (2147483649 or 2147483648 if unsigned)'
    """
    if number == LEAST_ID:
        most = 2**32 + LEAST_ID
        return f"{number} or {NO_ID} ({most} or {most - 1} if unsigned)"
    if number < 0:
        return f"{number} ({number + 2**32} if unsigned)"
    return f"{number} (or more)" if number == 2**31 - 1 else str(number)


def have_rows(ids: np.ndarray[Any, Any], rows: int) -> bool:
    """Whether each of some integers is the number of a row.

    Example:
      >>> have_rows(np.array([3, 4]), 5), have_rows(np.array([3, -1]), 5)
      (True, False)
      >>> have_rows(np.array([200], np.uint8), 256)
      True
    """
    # As unsigned ones negative numbers are large: one look at each is enough.
    unsigned = ids.view(np.dtype(f"u{ids.itemsize}"))
    most = 1 << 8 * ids.itemsize - (ids.dtype.kind == "i")
    return ids.size == 0 or bool(unsigned.max() < min(rows, most))


def may_be_ids(type_: Any) -> bool:
    """Whether values of this shape and dtype may be ids of rows.

    Padding of rows may be anything: taking single numbers for ids does no harm.
    """
    return len(type_.shape) == 1 and type_.dtype == "int32"


def padding_of(type_: Any) -> int:
    """Returns what follows the rows, ids or keys that are there of a value.

    Example:
      >>> padding_of(jnp.zeros(3, "int32")), padding_of(jnp.zeros((3, 1), "int32"))
      (2147483647, 0)
    """
    if may_be_ids(type_):
        return PAST_THE_END
    may_be_keys = len(type_.shape) == 1 and type_.dtype == "int64"
    return NO_KEY if may_be_keys else 0


def check_row_count(rows: int, feature: str = "") -> None:
    """Refuses a table of which some rows have no int32 id.

    Raises:
      GraphError: it has more than ``MOST_ROWS``.
    """
    if rows > MOST_ROWS:
        raise GraphError(
            f"{feature or 'a table'} has {rows:,} rows, and row numbers are int32: at "
            f"most {MOST_ROWS:,} rows; use several tables, or a hash table "
            "(jg.HashTable), whose keys are int64"
        )


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """How the rows of a table lie in its shards.

    Attributes:
      sizes: rows of each shard.
      kind: ``"div"``: shard 0 has the first ``sizes[0]`` ids, and so on; ``"mod"``: id
        ``i`` is row ``i // n`` of shard ``i % n``, for ``n`` shards; ``"hash"``: ids
        are keys of a hash table, which belong to a shard by their hash, and sizes
        are 1 and mean nothing.

    Example:
      >>> Layout((3, 2)).rows, Layout((3, 2), "mod").shards
      (5, 2)
    """

    sizes: tuple[int, ...]
    kind: str = "div"

    @property
    def rows(self) -> int:
        """Rows of the whole table."""
        return sum(self.sizes)

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.sizes)

    def split(self, ids: Any) -> tuple[Any, Any]:
        """Returns (shard, row in that shard) of each id that is in range."""
        if self.kind == "mod":
            return ids % self.shards, ids // self.shards
        ends = jnp.cumsum(jnp.asarray(self.sizes, ids.dtype))
        shard = jnp.searchsorted(ends, ids, side="right").astype(ids.dtype)
        return shard, ids - jnp.where(shard > 0, ends[shard - 1], 0)

    def ids(self, shard: int, rows: Any) -> Any:
        """Returns the ids of rows of one shard; the reverse of ``split``."""
        if self.kind == "mod":
            return rows * self.shards + shard
        return rows + sum(self.sizes[:shard])


def unique_rows(
    ids: Array, *, rows: int, feature: str = "", drop: bool = False, most: int = 0
) -> tuple[Array, Array]:
    """Returns (unique ids, position of each id among them).

    Args:
      ids: int32[n]; uint32[n, 2], keys, of a hash table: then servers only know which
        rows these are.
      rows: rows of the table; the padding of the unique ids.
      feature: where the ids come from, for the message about one out of range.
      drop: ids out of range are not an error; they have no row.
      most: more rows than that are an error of the runtime; 0: any number.

    Returns:
      unique: int32[n], ascending, padded with ``rows``.
      positions: int32[n]; ``n`` for an id out of range.

    Example:
      >>> unique, positions = unique_rows(jnp.array([4, 1, 4]), rows=5)
      >>> unique.tolist(), positions.tolist()
      ([1, 4, 5], [1, 0, 1])

    Raises:
      GraphError: the table has more than ``MOST_ROWS`` rows.
    """
    check_row_count(rows, feature)
    unique, positions = unique_rows_p.bind(
        ids, rows=rows, feature=feature, drop=drop, most=most
    )
    return unique, positions


def route_rows(
    ids: Array,
    *,
    layout: Layout,
    feature: str = "",
    drop: bool = False,
    most: int = 0,
) -> tuple[Array, tuple[Array, ...]]:
    """Returns (position of each id in the merged rows, unique rows per shard).

    Args:
      ids: int32[n], ids in the whole table; uint32[n, 2], keys, of a hash table.
      layout: the shards.
      feature: as for ``unique_rows``.
      drop: as for ``unique_rows``.
      most: as for ``unique_rows``.

    Returns:
      positions: int32[n].
      local: per shard int32[n]: rows of that shard, ascending, padded with its size.
        Of a hash table they stand for keys, which only servers look at.

    Example:
      >>> positions, (a, b) = route_rows(jnp.array([4, 1, 4]), layout=Layout((3, 2)))
      >>> positions.tolist(), a.tolist(), b.tolist()
      ([1, 0, 1], [1, 3, 3], [1, 2, 2])
    """
    check_row_count(layout.rows, feature)
    positions, *local = route_rows_p.bind(
        ids, layout=layout, feature=feature, drop=drop, most=most
    )
    return positions, tuple(local)


def merge_rows(
    local: Sequence[Array], rows: Sequence[Array], *, layout: Layout
) -> Array:
    """Returns the rows of all shards one after the other, without their padding.

    Args:
      local: from ``route_rows``.
      rows: per shard ``[n, …]``, the rows that ``local`` names.
      layout: the shards.

    Returns:
      ``[n, …]``, padded as ``padding_of`` says.
    """
    merged: list[Array] = merge_rows_p.bind(*local, *rows, layout=layout)
    return merged[0]


def split_rows(
    values: Array, local: Sequence[Array], *, layout: Layout
) -> tuple[Array, ...]:
    """Returns the rows of each shard, padded with zeros: the reverse of merging."""
    return tuple(split_rows_p.bind(values, *local, layout=layout))


def checked_ids(values: Array, *, rows: int, part: Part, feature: str = "") -> Array:
    """Returns values as they are; the runtime refuses those with an id without a row.

    Args:
      values: integers.
      rows: of the table.
      part: of the values, which are ids; others may be anything.
      feature: where the ids come from, for the message.

    Example:
      >>> checked_ids(jnp.array([4, 1, 9]), rows=5, part=((0, 2),)).tolist()
      [4, 1, 9]
    """
    checked: list[Array] = checked_ids_p.bind(
        values, rows=rows, part=part, feature=feature
    )
    return checked[0]


def _unique(
    ids: Array, *, rows: int, feature: str, drop: bool, most: int
) -> list[Array]:
    del drop, most  # of which only servers say what is wrong
    if ids.ndim == 2:
        raise needs_ps(feature)
    known = jnp.where((ids >= 0) & (ids < rows), ids, rows)
    unique = jnp.unique(known, size=ids.shape[0], fill_value=rows)
    positions = jnp.searchsorted(unique, known).astype(jnp.int32)
    return [unique, jnp.where(known == rows, ids.shape[0], positions)]


def _route(
    ids: Array, *, layout: Layout, feature: str, drop: bool, most: int
) -> list[Array]:
    del drop, most  # as above
    if layout.kind == "hash":
        raise needs_ps(feature)
    count, rows = ids.shape[0], layout.rows
    known = (ids >= 0) & (ids < rows)
    shard, row = layout.split(jnp.where(known, ids, 0))
    positions = jnp.full(count, count, jnp.int32)
    parts = []
    offset = jnp.zeros((), jnp.int32)
    for number, size in enumerate(layout.sizes):
        here = known & (shard == number)
        wanted = jnp.where(here, row, size).astype(jnp.int32)
        part = jnp.unique(wanted, size=count, fill_value=size)
        place = jnp.searchsorted(part, wanted).astype(jnp.int32) + offset
        positions = jnp.where(here, place, positions)
        offset += jnp.sum(part < size, dtype=jnp.int32)
        parts.append(part)
    return [positions, *parts]


def needs_ps(feature: str) -> GraphError:
    """Returns the error of a hash table where no server has it."""
    return GraphError(
        f"{feature or 'a hash table'}: a hash table lives on parameter servers; "
        "train with a cluster of one ps or more, for example "
        "jg.Trainer(…, cluster=jg.LocalCluster(ps=1, workers=1))"
    )


def _places(local: Sequence[Array], layout: Layout) -> list[tuple[Array, Array]]:
    """Returns, per shard, (places of its rows in the merged ones, which are there)."""
    found = []
    offset = jnp.zeros((), jnp.int32)
    for part, size in zip(local, layout.sizes, strict=True):
        there = part < size
        found.append((offset + jnp.arange(part.shape[0], dtype=jnp.int32), there))
        offset += jnp.sum(there, dtype=jnp.int32)
    return found


def _merge(*arrays: Array, layout: Layout) -> list[Array]:
    local, rows = arrays[: layout.shards], arrays[layout.shards :]
    merged = jnp.full_like(rows[0], padding_of(rows[0]))
    for (place, there), part in zip(_places(local, layout), rows, strict=True):
        merged = merged.at[jnp.where(there, place, len(place))].set(part, mode="drop")
    return [merged]


def _split(values: Array, *local: Array, layout: Layout) -> list[Array]:
    parts = []
    for place, there in _places(local, layout):
        part = values.at[place].get(mode="fill", fill_value=0)
        shape = (-1, *(1,) * (values.ndim - 1))
        parts.append(jnp.where(there.reshape(shape), part, 0))
    return parts


def _checked(values: Array, **_: Any) -> list[Array]:
    # A number follows too, for what waits elsewhere for the look at the ids.
    return [values, jnp.zeros((), jnp.int32)]


def primitive(name: str, fn: Any, results: Any) -> Primitive:
    """Returns a primitive that means ``fn``; ``results`` gives the results' types."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(fn)
    primitive.def_abstract_eval(results)
    mlir.register_lowering(primitive, mlir.lower_fun(fn, multiple_results=True))
    return primitive


def numbers_of(ids: Any) -> Any:
    """Returns the type of positions of ids, and of what stands for keys."""
    if ids.ndim == 1:
        return ids.update(weak_type=False)
    return ids.update(shape=ids.shape[:1], dtype=jnp.dtype(jnp.int32), weak_type=False)


def _routed(ids: Any, *, layout: Layout, **_: Any) -> list[Any]:
    return [numbers_of(ids)] * (1 + layout.shards)


def _checked_types(values: Any, **_: Any) -> list[Any]:
    values = values.update(weak_type=False)
    return [values, values.update(shape=(), dtype=jnp.dtype(jnp.int32))]


def _same(count: Any) -> Any:
    """Abstract evaluation: ``count(operands, params)`` results like the first."""

    def results(*avals: Any, **params: Any) -> list[Any]:
        aval = avals[0]
        return [aval.update(weak_type=False)] * count(avals, params)

    return results


checked_ids_p = primitive("checked_ids", _checked, _checked_types)
unique_rows_p = primitive(
    "unique_rows", _unique, lambda ids, **_: [numbers_of(ids)] * 2
)
route_rows_p = primitive("route_rows", _route, _routed)
merge_rows_p = primitive(
    "merge_rows", _merge, lambda *avals, layout: [avals[-1].update(weak_type=False)]
)
split_rows_p = primitive(
    "split_rows", _split, _same(lambda avals, params: params["layout"].shards)
)
