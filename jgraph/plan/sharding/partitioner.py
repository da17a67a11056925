"""Partitioners: into how many shards a variable is cut, with TensorFlow's arithmetic.

A partitioner is a function of (shape, dtype) that returns the number of shards per
axis; at most one may be over 1. TensorFlow 2 has other names for them:

* ``FixedShardsPartitioner(n)``: ``fixed_size_partitioner(n)``
* ``MinSizePartitioner(b, n)``: ``min_max_variable_partitioner(n, min_slice_size=b)``
* ``MaxSizePartitioner(b, n)``: ``variable_axis_size_partitioner(b, max_shards=n)``

Source: tensorflow/python/ops/partitioned_variables.py and
tensorflow/python/distribute/sharded_variable.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from jgraph.errors import ShardingError
from jgraph.graph.sharding import Partitioner, array_nbytes
from jgraph.view import markup

LEAST_SHARD: Final = 256 << 10
"""Bytes that a shard has at least, unless told otherwise."""


@final
@dataclass(frozen=True, slots=True)
class ShardCounter:
    """A partitioner that shows how it was made.

    Attributes:
      call: what made it.
      axis: which axis is cut, a negative one from the end.
      shards: number of shards, given shape and dtype.
    """

    call: str
    axis: int
    shards: Callable[[Sequence[int], Any], int]

    def __call__(self, shape: Sequence[int], dtype: Any) -> list[int]:
        """Returns the number of shards per axis."""
        counts = [1] * len(shape)
        if -len(shape) <= self.axis < len(shape) and shape[self.axis] > 0:
            counts[self.axis] = self.shards(shape, dtype)
        return counts

    def __repr__(self) -> str:
        return self.call

    def _repr_html_(self) -> str:
        return markup.lines(self.call)


def fixed_size_partitioner(num_shards: int, axis: int = 0) -> Partitioner:
    """Returns a partitioner into ``num_shards`` shards, or as many as there are rows.

    Args:
      num_shards: how many.
      axis: which axis is cut, a negative one from the end; a variable without it stays
        whole.

    Raises:
      ShardingError: a number below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> fixed_size_partitioner(2)((10, 3), jnp.float32)
      [2, 1]
    """
    _check(num_shards=num_shards)

    return ShardCounter(
        f"fixed_size_partitioner({num_shards}, axis={axis})",
        axis,
        lambda shape, _: min(num_shards, shape[axis]),
    )


def variable_axis_size_partitioner(
    max_shard_bytes: int, axis: int = 0, max_shards: int | None = None
) -> Partitioner:
    """Returns a partitioner into the fewest shards of at most ``max_shard_bytes``.

    A shard has at least one row, and ``max_shards`` wins over the bytes.

    Args:
      max_shard_bytes: bytes of a shard.
      axis: which axis is cut, a negative one from the end; a variable without it stays
        whole.
      max_shards: how many shards at most; any number if unset.

    Raises:
      ShardingError: a number below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> variable_axis_size_partitioner(4)((6, 1), jnp.float32)
      [6, 1]
      >>> variable_axis_size_partitioner(4, max_shards=2)((6, 1), jnp.float32)
      [2, 1]
    """
    limits = {} if max_shards is None else {"max_shards": max_shards}
    _check(max_shard_bytes=max_shard_bytes, **limits)

    def shards(shape: Sequence[int], dtype: Any) -> int:
        size = shape[axis]
        row = array_nbytes(shape, dtype) // size
        rows = max(1, max_shard_bytes // row) if row else size
        count = math.ceil(size / rows)
        return count if max_shards is None else min(max_shards, count)

    most = "" if max_shards is None else f", max_shards={max_shards}"
    call = f"variable_axis_size_partitioner({max_shard_bytes}, axis={axis}{most})"
    return ShardCounter(call, axis, shards)


def min_max_variable_partitioner(
    max_partitions: int = 1, axis: int = 0, min_slice_size: int = LEAST_SHARD
) -> Partitioner:
    """Returns a partitioner into the most shards of about ``min_slice_size`` bytes.

    Args:
      max_partitions: how many shards at most.
      axis: which axis is cut, a negative one from the end; a variable without it stays
        whole.
      min_slice_size: bytes that a shard should have at least.

    Raises:
      ShardingError: a number below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> min_max_variable_partitioner(8)((1000, 256), jnp.float32)
      [4, 1]
    """
    _check(max_partitions=max_partitions, min_slice_size=min_slice_size)

    def shards(shape: Sequence[int], dtype: Any) -> int:
        wanted = math.ceil(array_nbytes(shape, dtype) / min_slice_size)
        return max(1, min(shape[axis], max_partitions, wanted))

    call = f"min_max_variable_partitioner({max_partitions}, axis={axis}, min_slice_size"
    return ShardCounter(f"{call}={min_slice_size})", axis, shards)


def _check(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ShardingError(f"{name} is {number}; it must be at least 1")
