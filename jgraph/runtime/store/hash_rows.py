"""Initial rows of a hash table: counter-based random numbers, keyed by id."""

from typing import Any

import ml_dtypes
import numpy as np

from jgraph.graph.rows.hash_keys import Keys, hash_keys
from jgraph.graph.rows.hash_spec import Column, Initial


def np_dtype(column: Column) -> np.dtype[Any]:
    """Returns the dtype of a column as numpy knows it (ml_dtypes included)."""
    return np.dtype(getattr(ml_dtypes, column.dtype, column.dtype))


def shape_of(column: Column, rows: int) -> tuple[int, ...]:
    """Returns the shape of ``rows`` rows of a column."""
    return (rows, column.width) if column.width else (rows,)


def initial_rows(keys: Keys, column: Column) -> np.ndarray[Any, Any]:
    """Returns the values that these keys start with.

    Equal keys of columns with equal ``initial`` get equal values, whichever shard makes
    them and however often.

    Args:
      keys: int64[n].
      column: says what is drawn.

    Returns:
      ``[n, width]``, or ``[n]`` for a width of 0.

    Example:
      >>> column = Column("rows", 3, initial=Initial("normal", 0.05))
      >>> row = initial_rows(np.array([7]), column)
      >>> bool((row == initial_rows(np.array([1, 7]), column)[1]).all())
      True
    """
    shape, dtype = shape_of(column, len(keys)), np_dtype(column)
    initial = column.initial
    if initial.kind == "constant":
        return np.full(shape, initial.scale, dtype)
    draw = _uniform if initial.kind == "uniform" else _normal
    values: np.ndarray[Any, Any] = draw(keys, max(column.width, 1), initial)
    return values.reshape(shape).astype(dtype, copy=False)


def _bits(keys: Keys, count: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Returns uint64[n, count]: streams of SplitMix64, one per key."""
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return hash_keys(hash_keys(keys, seed)[:, None] + steps)


def _halves(keys: Keys, count: int, seed: int) -> tuple[Any, Any]:
    """Returns two arrays float32[n, count] of numbers over 0 and at most 1."""
    bits = _bits(keys, count, seed)
    unit = np.float32(2.0**-24)
    high = (bits >> np.uint64(40)).astype(np.float32)
    low = (bits & np.uint64(0xFFFFFF)).astype(np.float32)
    return (high + 1) * unit, (low + 1) * unit


def _uniform(keys: Keys, width: int, initial: Initial) -> Any:
    pair = _halves(keys, (width + 1) // 2, initial.seed)
    both = np.concatenate(pair, axis=1)[:, :width]
    return (2 * both - 1) * np.float32(initial.scale)


def _normal(keys: Keys, width: int, initial: Initial) -> Any:
    # Box and Muller: two normal numbers from two uniform ones.
    first, second = _halves(keys, (width + 1) // 2, initial.seed)
    radius = np.sqrt(-2 * np.log(first)) * np.float32(initial.scale)
    angle = second * np.float32(2 * np.pi)
    both = [radius * np.cos(angle), radius * np.sin(angle)]
    return np.concatenate(both, axis=1)[:, :width]
