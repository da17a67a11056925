"""The ``find_keys`` primitive: positions of keys among the keys of a hash table.

In a process that holds all of a table, ``find_keys`` is a binary search. A trainer that
sees it in a loss knows by it that the rows looked up are those of a hash table, and
asks the table's shards instead.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching, mlir

from jgraph._compat import Primitive
from jgraph.errors import GraphError
from jgraph.graph.rows.hash_spec import TableOptions

Array = jax.Array


def find_keys(known: Array, keys: Array, *, options: TableOptions) -> Array:
    """Returns the row of each key: 0 for an unknown one.

    Args:
      known: uint32[n, 2], the key of each row, but of row 0, which has none. In
        ascending order of their high half, then the low.
      keys: uint32[..., 2].
      options: of the table.

    Returns:
      int32[...].

    Raises:
      GraphError: under ``vmap`` over ``known``.

    Example:
      >>> from jgraph.graph.rows.hash_keys import as_pairs
      >>> known = as_pairs(jnp.array([0, 3, 8]))
      >>> options = TableOptions(4, 1 << 20)
      >>> find_keys(known, as_pairs(jnp.array([[8, 5], [3, 8]])), options=options)
      Array([[2, 0], [1, 2]], dtype=int32)
    """
    rows: Array = find_keys_p.bind(known, keys, options=options)
    return rows


def _find(known: Array, keys: Array, *, options: Any) -> Array:
    del options
    count = known.shape[0]
    low, high = keys[..., 0], keys[..., 1]

    def halve(_: Any, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        begin, end = ends
        middle = (begin + end) // 2
        at = known[middle]
        less = (at[..., 1] < high) | ((at[..., 1] == high) & (at[..., 0] < low))
        return jnp.where(less, middle + 1, begin), jnp.where(less, end, middle)

    # A search that ends before the last place needs no look beyond the end.
    ends = [
        jnp.full(keys.shape[:-1], n, jnp.int32) for n in (min(1, count - 1), count - 1)
    ]
    place, _ = jax.lax.fori_loop(0, count.bit_length(), halve, (ends[0], ends[1]))
    return jnp.where((known[place] == keys).all(axis=-1) & (place > 0), place, 0)


def _find_type(known: Any, keys: Any, *, options: Any) -> Any:
    return keys.update(shape=keys.shape[:-1], dtype=jnp.dtype(jnp.int32))


def _find_many(args: Any, axes: Any, *, options: Any) -> Any:
    known, keys = args
    if axes[0] is not None:
        raise GraphError(
            f"vmap maps over axis {axes[0]} of the keys of a hash table "
            f"(dim={options.dim}), and several tables cannot be stacked into one: each "
            "has rows of its own on parameter servers; map over the ids alone, for "
            "example nnx.vmap(lambda table, ids: table(ids), in_axes=(None, 0))"
        )
    return find_keys_p.bind(known, jnp.moveaxis(keys, axes[1], 0), options=options), 0


find_keys_p = Primitive("find_keys")
find_keys_p.def_impl(jax.jit(_find, static_argnames="options"))
find_keys_p.def_abstract_eval(_find_type)
mlir.register_lowering(find_keys_p, mlir.lower_fun(_find, multiple_results=False))
batching.primitive_batchers[find_keys_p] = _find_many
