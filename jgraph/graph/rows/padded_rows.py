"""Padded rows: rows of a table cut by shard, as they travel to its shards and back.

Where an optimizer changes rows that a step did not look up, the gradient of the rows is
spread over the whole table, shard by shard, where the shards are.

In synchronous training a worker hands in the rows that it has gradients of, and their
mean is applied later, by another graph, where the table's shards are. Between the two
they lie in variables: ids and rows of shard 0, then those of shard 1, and so on; of
each shard as many as there can be of all.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jgraph.graph.rows.hash_keys import is_key
from jgraph.graph.rows.rows import (
    Layout,
    merge_rows,
    needs_ps,
    numbers_of,
    primitive,
    route_rows,
)

Array = jax.Array


def cut_rows(unique: Array, rows: Array, *, layout: Layout) -> tuple[Array, Array]:
    """Returns (ids, rows) by shard: in each shard's part its rows, then padding.

    Args:
      unique: int32[n], ids in the whole table, from ``unique_rows``.
      rows: ``[n, …]``, their rows.
      layout: the table's shards, ``s`` of them.

    Returns:
      ids: int32[s * n]: rows of the shard, ascending, padded with its size.
      rows: ``[s * n, …]``, padded with zeros.

    Example:
      >>> ids, rows = cut_rows(
      ...     jnp.array([1, 4, 5]), jnp.array([7.0, 8.0, 0.0]), layout=Layout((3, 2))
      ... )
      >>> ids.tolist(), rows.tolist()
      ([1, 3, 3, 1, 2, 2], [7.0, 0.0, 0.0, 8.0, 0.0, 0.0])
    """
    ids, cut = cut_rows_p.bind(unique, rows, layout=layout)
    return ids, cut


def join_rows(ids: Array, rows: Array, *, layout: Layout) -> tuple[Array, Array]:
    """Returns (ids in the whole table, rows), one shard after the other.

    Args:
      ids: int32[s * n], as ``cut_rows`` gives them; ``n`` or fewer are there. Of a hash
        table uint32[s * n, 2], keys and ``NO_KEY``.
      rows: ``[s * n, …]``.
      layout: the table's shards, ``s`` of them.

    Returns:
      unique: int32[n], each once, padded with the number of the table's rows. Of a
        hash table they stand for keys: 0 where one is.
      rows: ``[n, …]``, padded with zeros.

    Example:
      >>> ids, rows = jnp.array([1, 3, 1, 2]), jnp.array([7.0, 0.0, 8.0, 0.0])
      >>> unique, joined = join_rows(ids, rows, layout=Layout((3, 2)))
      >>> unique.tolist(), joined.tolist()
      ([1, 4], [7.0, 8.0])
    """
    unique, joined = join_rows_p.bind(ids, rows, layout=layout)
    return unique, joined


def joined_ids(local: Sequence[Array], ids: Sequence[Array], layout: Layout) -> Array:
    """Returns the ids in the whole table of the rows of all shards, then padding.

    Args:
      local: the rows of each shard.
      ids: of each shard, as ``whole_ids`` gives them.
      layout: the table's shards.
    """
    return jnp.minimum(merge_rows(local, ids, layout=layout), layout.rows)


def spread_rows(unique: Array, rows: Array, *, layout: Layout) -> Array:
    """Returns the whole table that has these rows, and zeros elsewhere.

    Args:
      unique: int32[n], ids in the whole table, from ``unique_rows`` or ``join_rows``.
      rows: ``[n, …]``, their rows.
      layout: the table's shards.

    Example:
      >>> ids, rows = jnp.array([0, 4, 5]), jnp.array([7.0, 8.0, 9.0])
      >>> spread_rows(ids, rows, layout=Layout((3, 2))).tolist()
      [7.0, 0.0, 0.0, 0.0, 8.0]
    """
    spread: list[Array] = spread_rows_p.bind(unique, rows, layout=layout)
    return spread[0]


def spread_over(ids: Array, rows: Array, size: int) -> Array:
    """Returns an array of ``size`` rows: these at their ids, and zeros elsewhere."""
    whole = jnp.zeros((size, *rows.shape[1:]), rows.dtype)
    return whole.at[ids].set(rows, mode="drop")


def whole_ids(ids: Array, shard: int, layout: Layout) -> Array:
    """Returns, as int32[n], ids of a shard's rows as those in the whole table.

    Args:
      ids: int32[n], padded with the shard's size; of a hash table keys, as pairs.
      shard: whose rows these are.
      layout: the table's shards.
    """
    if layout.kind == "hash":
        return jnp.where(is_key(ids), 0, layout.rows)
    there = ids < layout.sizes[shard]
    return jnp.where(there, layout.ids(shard, ids), layout.rows)


def _cut(unique: Array, rows: Array, *, layout: Layout) -> list[Array]:
    _, local = route_rows(unique, layout=layout, drop=True)
    parts = []
    for shard, (part, size) in enumerate(zip(local, layout.sizes, strict=True)):
        there = part < size
        ids = jnp.where(there, layout.ids(shard, part), layout.rows)
        found = rows.at[jnp.searchsorted(unique, ids)].get(mode="clip")
        parts.append(jnp.where(there.reshape(-1, *[1] * (rows.ndim - 1)), found, 0))
    return [jnp.concatenate(local), jnp.concatenate(parts)]


def _join(ids: Array, rows: Array, *, layout: Layout) -> list[Array]:
    if layout.kind == "hash":
        raise needs_ps("")
    local = jnp.split(ids, layout.shards)
    whole = [whole_ids(part, shard, layout) for shard, part in enumerate(local)]
    return [
        joined_ids(local, whole, layout),
        merge_rows(local, jnp.split(rows, layout.shards), layout=layout),
    ]


def _times(avals: Sequence[Any], numerator: int, denominator: int) -> list[Any]:
    return [
        aval.update(
            shape=(aval.shape[0] * numerator // denominator, *aval.shape[1:]),
            weak_type=False,
        )
        for aval in avals
    ]


def _joined(ids: Any, rows: Any, *, layout: Layout) -> list[Any]:
    return _times([numbers_of(ids), rows], 1, layout.shards)


def _spread(unique: Array, rows: Array, *, layout: Layout) -> list[Array]:
    return [spread_over(unique, rows, layout.rows)]


def _spread_type(ids: Any, rows: Any, *, layout: Layout) -> list[Any]:
    return [rows.update(shape=(layout.rows, *rows.shape[1:]), weak_type=False)]


spread_rows_p = primitive("spread_rows", _spread, _spread_type)
cut_rows_p = primitive(
    "cut_rows", _cut, lambda *avals, layout: _times(avals, layout.shards, 1)
)
join_rows_p = primitive("join_rows", _join, _joined)
