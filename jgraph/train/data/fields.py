"""Fields of a batch: arrays of the types that JAX computes with; equal parts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.errors import DataError, FeedError
from jgraph.runtime.data.batches import Array
from jgraph.train.model.trees import Tree


def as_array(
    value: Any, field: str, *, finite: bool = False, single: bool = False
) -> Array:
    """Returns what a user gave as an array of the type that JAX makes of it.

    Args:
      value: an array of any library in the memory of this process, or numbers.
      field: what to call it in messages.
      finite: refuse NaN and infinity.
      single: it may be a single value: it is a field of one example.

    Raises:
      DataError: no array, of an object or string dtype, with integers too large for
        JAX's type, or with NaN where it is forbidden.
    """
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(
            f"{field} is not an array: {error}; pad it to one shape", field=field
        ) from error
    if array.ndim == 0 and not single:
        raise DataError(
            f"{field} is a single value, not an array; examples lie along axis 0",
            field=field,
        )
    if not _is_numeric(array.dtype):
        raise DataError(
            f"{field} has dtype {array.dtype}, which XLA does not know; give numbers "
            "(for text: ids; for ragged rows: padded arrays)",
            field=field,
            dtype=str(array.dtype),
        )
    if finite and array.dtype.kind in "fcV" and not np.isfinite(array).all():
        where = f", first at example {_first_bad(array)}" if array.ndim else ""
        raise DataError(
            f"{field} contains NaN or infinity{where}; clean the data or set "
            "check_finite=False",
            field=field,
        )
    return _as_jax_dtype(array, field)


def _is_numeric(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biufc" or (dtype.kind == "V" and dtype.names is None)


def _first_bad(array: Array) -> int:
    rows = np.isfinite(array).reshape(len(array), -1).all(axis=1)
    return int(np.argmin(rows))


def _as_jax_dtype(array: Array, field: str) -> Array:
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype == array.dtype:
        return array
    if array.dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        low, high = int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            raise DataError(
                f"{field} has values from {low} to {high}, too large for JAX's "
                f"{dtype}; for a jg.HashTable give jg.split_keys(ids), else smaller "
                "numbers, or switch 64-bit types on: "
                "jax.config.update('jax_enable_x64', True)",
                field=field,
            )
    return array.astype(dtype)


def split_batch(batch: Tree, count: int, what: str) -> list[Tree]:
    """Returns the parts of a batch, in order.

    Args:
      batch: arrays with the examples as first dimension.
      count: of the parts.
      what: the batch, for the message.

    Raises:
      FeedError: the arrays have different sizes, or ``count`` does not divide
        them.

    Example:
      >>> [part.tolist() for part in split_batch(jnp.arange(4), 2, "x")]
      [[0, 1], [2, 3]]
    """
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    sizes = sorted({shape[0] if shape else 0 for shape in shapes})
    if len(sizes) != 1 or not sizes[0] or sizes[0] % count:
        found = " and ".join(map(str, sizes)) or "no"
        raise FeedError(
            f"{what} has {found} examples, which cannot be cut into {count} equal "
            f"parts; give a batch of a multiple of {count}",
            feed=what,
        )
    each = sizes[0] // count
    return [
        jax.tree.map(lambda leaf, n=n: leaf[n * each : (n + 1) * each], batch)
        for n in range(count)
    ]
