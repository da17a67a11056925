"""Sharding of an array: the axis it is cut along, and the size of every shard."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, final

import jax.numpy as jnp
import numpy as np
from jax import lax

from jgraph.errors import ShardingError
from jgraph.graph.rows.rows import Layout

PAGE_BYTES: Final = 4096
"""Of the memory of all systems that have shared memory files for us."""

_PAGES: Final = 16
"""What must be cut at pages is cut evenly to an eighth of a part."""

Partitioner: TypeAlias = Callable[[Sequence[int], Any], Sequence[int]]
"""Number of shards per axis, given shape and dtype."""


@final
@dataclass(frozen=True, slots=True)
class Sharding:
    """The shards of an array, cut along one axis.

    Attributes:
      layout: how the indices of that axis lie in the shards.
      axis: the axis.

    Example:
      >>> halves = Sharding(Layout((2, 1)))
      >>> [part.tolist() for part in halves.split(jnp.arange(3))]
      [[0, 1], [2]]
      >>> halves.join(halves.split(jnp.arange(3))).tolist()
      [0, 1, 2]
    """

    layout: Layout
    axis: int = 0

    @property
    def shards(self) -> int:
        """Number of shards."""
        return self.layout.shards

    def at(self, axis: int) -> "Sharding":
        """Returns the same shards along another axis, of a value made from these."""
        return replace(self, axis=axis)

    def part_shape(self, shape: Sequence[int], shard: int) -> tuple[int, ...]:
        """Returns the shape of one shard of an array of this shape."""
        sizes = list(shape)
        sizes[self.axis] = self.layout.sizes[shard]
        return tuple(sizes)

    def part(self, value: Any, shard: int) -> Any:
        """Returns one shard of an array."""
        if self.layout.kind == "mod":
            return lax.slice_in_dim(value, shard, None, self.shards, self.axis)
        start = sum(self.layout.sizes[:shard])
        end = start + self.layout.sizes[shard]
        return lax.slice_in_dim(value, start, end, axis=self.axis)

    def split(self, value: Any) -> tuple[Any, ...]:
        """Returns the shards of an array."""
        return tuple(self.part(value, n) for n in range(self.shards))

    def join(self, parts: Sequence[Any]) -> Any:
        """Returns the array that has these shards."""
        if self.layout.kind == "div" or self.shards == 1:
            return lax.concatenate(list(parts), self.axis)
        # Shards of one length, one beside the other: their elements then alternate.
        longest = self.layout.sizes[0]
        padded = [_padded(p, self.axis, longest) for p in parts]
        stacked = jnp.stack(padded, axis=self.axis + 1)
        shape = list(parts[0].shape)
        shape[self.axis] = longest * self.shards
        whole = lax.reshape(stacked, shape)
        return lax.slice_in_dim(whole, 0, self.layout.rows, axis=self.axis)

    def index(self, ndim: int, shard: int) -> tuple[slice, ...]:
        """Returns the index of one shard in a numpy array of ``ndim`` axes."""
        start = sum(self.layout.sizes[:shard])
        mine = slice(start, start + self.layout.sizes[shard])
        if self.layout.kind == "mod":
            mine = slice(shard, None, self.shards)
        return tuple(mine if n == self.axis else slice(None) for n in range(ndim))

    def joined(self, parts: Sequence[Any]) -> Any:
        """Returns the numpy array that has these shards."""
        shape = list(parts[0].shape)
        shape[self.axis] = self.layout.rows
        whole = np.empty(shape, parts[0].dtype)
        for shard, part in enumerate(parts):
            whole[self.index(whole.ndim, shard)] = part
        return whole


def _padded(part: Any, axis: int, length: int) -> Any:
    missing = length - part.shape[axis]
    if not missing:
        return part
    last = lax.slice_in_dim(part, 0, missing, axis=axis)
    return lax.concatenate([part, last], axis)


def even_layout(size: int, shards: int, kind: str = "div") -> Layout:
    """Returns ``shards`` shards that differ by one at most, the larger ones first.

    Source: tensorflow/python/ops/partitioned_variables.py.

    Example:
      >>> even_layout(7, 3).sizes
      (3, 2, 2)
    """
    return Layout(
        tuple(size // shards + (n < size % shards) for n in range(shards)), kind
    )


def at_pages(sharding: Sharding, shape: Sequence[int], dtype: Any) -> Sharding:
    """Returns a sharding whose shards end where pages of memory do, but the last.

    Such shards can be mapped one behind the other as the whole array. Where pages and
    rows do not fit, or shards are too small, it is returned as it is.

    Example:
      >>> halves = Sharding(Layout((50_000, 50_000)))
      >>> at_pages(halves, [100_000], "float32").layout.sizes
      (50176, 49824)
    """
    if sharding.axis or sharding.layout.kind != "div":
        return sharding
    row_bytes = array_nbytes(shape[1:], dtype)
    unit = PAGE_BYTES // math.gcd(PAGE_BYTES, row_bytes)
    if unit == 1 or sharding.layout.sizes[-1] < _PAGES * unit:
        return sharding
    units = even_layout(-(-shape[0] // unit), sharding.shards).sizes
    sizes = [count * unit for count in units]
    sizes[-1] -= sum(sizes) - shape[0]
    return replace(sharding, layout=Layout(tuple(sizes)))


def sharding_of(
    name: str, shape: Sequence[int], partitions: Any, kind: str = "div"
) -> Sharding | None:
    """Returns the sharding that a partitioner's answer means; None for one shard.

    Args:
      name: of the variable, for messages.
      shape: of the variable.
      partitions: number of shards per axis, at most one of them over 1.
      kind: ``"div"`` or ``"mod"``, see ``Layout``.

    Raises:
      ShardingError: not such a list, two axes cut, or more shards than there are rows.
    """
    counts = _counts(name, shape, partitions)
    if kind not in {"div", "mod"}:
        raise ShardingError(
            f"partition_strategy is {kind!r}; it is 'div' (the first rows in the first "
            "shard) or 'mod' (row i in shard i % n)"
        )
    cut = [axis for axis, count in enumerate(counts) if count > 1]
    if not cut:
        return None
    if len(cut) > 1:
        raise ShardingError(
            f"the partitioner wants variable '{name}' cut along the axes {cut}; one "
            "axis can be cut: return 1 for all others",
            variable=name,
        )
    (axis,) = cut
    if counts[axis] > shape[axis]:
        raise ShardingError(
            f"variable '{name}' of shape {list(shape)} cannot have {counts[axis]} "
            f"shards along axis {axis}, which has {shape[axis]} rows; use fewer shards",
            variable=name,
        )
    return Sharding(even_layout(shape[axis], counts[axis], kind), axis)


def _counts(name: str, shape: Sequence[int], partitions: Any) -> list[int]:
    try:
        counts = [int(n) for n in partitions]
    except (TypeError, ValueError):
        counts = []
    if len(counts) != len(shape) or any(n < 1 for n in counts):
        raise ShardingError(
            f"the partitioner returned {partitions!r:.60} for variable '{name}' of "
            f"shape {list(shape)}; return a number of shards for each axis, at least "
            "1, for example [4, 1]",
            variable=name,
        )
    return counts


def check_devices(
    name: str, sharding: Sharding | None, devices: Sequence[object]
) -> None:
    """Raises ``ShardingError`` unless there is one device per shard, or none."""
    shards = 0 if sharding is None else sharding.shards
    if devices and len(devices) != shards:
        raise ShardingError(
            f"variable '{name}' has {shards} shards and {len(devices)} shard_devices; "
            "give one device for each",
            variable=name,
        )


def array_nbytes(shape: Sequence[int], dtype: Any) -> int:
    """Returns the bytes of an array.

    Example:
      >>> array_nbytes((2, 3), jnp.float32)
      24
    """
    kind = dtype if hasattr(dtype, "itemsize") else jnp.dtype(dtype)
    return math.prod(shape) * int(kind.itemsize)
