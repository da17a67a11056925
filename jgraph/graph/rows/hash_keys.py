"""Keys of hash tables: any int64, and their hashes.

Between runtime nodes keys are int64. In a graph they are pairs of uint32, the low half
first, because JAX has no 64-bit integers unless they are switched on; on most hosts
both are the same bytes.
"""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.errors import GraphError

Keys: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Pairs: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]
Hashes: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
Positions: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]

NO_KEY = -(2**63)
"""Stands for no key among int64 keys: it never has a row, as in a bag not full."""


def split_keys(keys: Any) -> Pairs:
    """Returns whole numbers of up to 64 bits as pairs of uint32, for a batch.

    Args:
      keys: numpy integers, any shape; uint64 is taken as int64 of the same bits.

    Returns:
      ``uint32[..., 2]``: low half, high half.

    Raises:
      GraphError: keys that are not whole numbers.

    Example:
      >>> split_keys(np.array([7, -1, 2**40])).tolist()
      [[7, 0], [4294967295, 4294967295], [0, 256]]
    """
    array = np.asarray(keys)
    if not array.size and not isinstance(keys, np.ndarray):
        array = array.astype(np.int64)  # NumPy has floats in an empty list
    _check_whole(array.dtype)
    wide = array if array.dtype.itemsize == 8 else array.astype(np.int64)
    little = np.ascontiguousarray(wide).astype("<i8", copy=False)
    return little.view("<u4").reshape(*array.shape, 2).astype(np.uint32, copy=False)


def join_keys(pairs: Any) -> Keys:
    """Returns int64 keys of pairs: the reverse of ``split_keys``.

    Example:
      >>> join_keys(split_keys(np.array([7, -1, 2**40]))).tolist()
      [7, -1, 1099511627776]
    """
    array = np.ascontiguousarray(pairs).astype("<u4", copy=False)
    return array.view("<i8").reshape(array.shape[:-1]).astype(np.int64, copy=False)


def padded_pairs(keys: Keys, count: int) -> Pairs:
    """Returns keys as pairs, and then ``NO_KEY`` up to ``count`` of them.

    Example:
      >>> padded_pairs(np.array([7]), 2).tolist()
      [[7, 0], [0, 2147483648]]
    """
    missing = np.full(count - len(keys), NO_KEY)
    return split_keys(np.concatenate([keys, missing]))


def is_key(pairs: Any) -> jax.Array:
    """Returns which pairs, ``uint32[…, 2]``, are keys: not ``NO_KEY``.

    Example:
      >>> is_key(jnp.asarray(padded_pairs(np.array([7]), 2))).tolist()
      [True, False]
    """
    low, high = (jnp.asarray(pairs)[..., n] for n in (0, 1))
    there: jax.Array = (low != 0) | (high != jnp.uint32(1 << 31))
    return there


def as_pairs(ids: Any) -> jax.Array:
    """Returns ids of a model as pairs.

    Args:
      ids: integers; ``uint32[..., 2]`` is taken for pairs, as ``split_keys`` makes
        them. Signed numbers keep their sign, so that 5 is one key whatever its dtype.

    Raises:
      GraphError: ids that are not whole numbers, or uint32 that are no pairs.

    Example:
      >>> as_pairs(jnp.array([-1, 5])).tolist()
      [[4294967295, 4294967295], [5, 0]]
    """
    if isinstance(ids, np.ndarray) and ids.dtype != np.uint32:
        return jnp.asarray(split_keys(ids))
    array = jnp.asarray(ids)
    _check_whole(array.dtype)
    if array.dtype == jnp.uint32:
        if array.shape[-1:] != (2,):
            raise GraphError(
                f"ids of a hash table are uint32{list(array.shape)}; unsigned ids are "
                "given as pairs, uint32[..., 2]: use jg.split_keys(ids) on the data, "
                "or signed ids"
            )
        return array
    if array.dtype.itemsize < 8:
        array = array.astype(jnp.int32)
        low = jax.lax.bitcast_convert_type(array, jnp.uint32)
        high = jax.lax.bitcast_convert_type(array >> 31, jnp.uint32)
        return jnp.stack([low, high], axis=-1)
    halves = [array, array >> 32]
    return jnp.stack([half.astype(jnp.uint32) for half in halves], axis=-1)


def _check_whole(dtype: Any) -> None:
    if not jnp.issubdtype(dtype, jnp.integer):
        raise GraphError(
            f"ids of a hash table are {dtype}, and a key is a whole number; give "
            "integers, for example ids.astype('int64') in the data"
        )


def hash_keys(keys: Keys, seed: int = 0) -> Hashes:
    """Returns 64 well mixed bits of each key: a bijection for each seed.

    The finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom
    number generators, OOPSLA 2014).

    Args:
      keys: int64 or uint64, any shape.
      seed: another seed is another function.

    Example:
      >>> [hex(h) for h in hash_keys(np.array([0, 1])).tolist()]
      ['0x0', '0x5692161d100b05e5']
    """
    bits = keys.view(np.uint64) + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits


def shard_of(keys: Keys, shards: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns the shard that each key belongs to, below ``shards``.

    Example:
      >>> shard_of(np.array([0, 1, 2, 3, -1]), 2).tolist()
      [0, 0, 1, 0, 0]
    """
    # The high bits: the low ones choose the slot inside a shard.
    return ((hash_keys(keys) >> np.uint64(33)) % np.uint64(shards)).astype(np.int64)


def route_keys(keys: Keys, shards: int) -> tuple[Positions, list[Keys]]:
    """Returns (position of each key in the merged rows, needed keys per shard).

    Args:
      keys: int64[n].
      shards: how many there are.

    Returns:
      positions: int32[n]: the place of each key's row among the rows of all shards,
        one shard after the other; ``n`` for ``NO_KEY``.
      local: per shard int64[m]: its keys, each once, ascending.

    Example:
      >>> positions, local = route_keys(np.array([2, 1, 2, NO_KEY]), 2)
      >>> positions.tolist(), [part.tolist() for part in local]
      ([1, 0, 1, 4], [[1], [2]])
    """
    needed, found = np.unique(keys, return_inverse=True)
    none = int(len(needed) > 0 and needed[0] == NO_KEY)  # the least of all
    homes = shard_of(needed[none:], shards)
    order = np.argsort(homes, kind="stable")
    place = np.full(len(needed), len(keys), np.int32)
    place[none + order] = np.arange(len(order), dtype=np.int32)
    ends = np.cumsum(np.bincount(homes, minlength=shards))
    return place[found], np.split(needed[none:][order], ends[:-1])
