"""Rows of tables that are served: where they are, and a cache of the last ones."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, final

import numpy as np

from jgraph.graph.rows.hash_keys import NO_KEY, hash_keys, padded_pairs, shard_of
from jgraph.graph.rows.rows import NO_ID, Layout
from jgraph.graph.variable import Variable

Array: TypeAlias = np.ndarray[Any, Any]


@final
@dataclass(frozen=True, slots=True)
class LiveTable:
    """A parameter of which rows are looked up.

    Attributes:
      variable: on parameter servers.
      counts: ids of one lookup at most, for each size that programs are made for.
    """

    variable: Variable
    counts: tuple[int, ...]

    @property
    def is_hashed(self) -> bool:
        """Whether it is a hash table: ids are then its keys, int64."""
        return self.variable.spec.table is not None

    @property
    def layout(self) -> Layout:
        """How its rows lie on parameter servers."""
        sharding = self.variable.spec.sharding
        if sharding is None:
            return Layout((self.variable.shape[0],))
        return sharding.layout

    @property
    def is_by_rows(self) -> bool:
        """Whether its shards have whole rows."""
        sharding = self.variable.spec.sharding
        return sharding is None or sharding.axis == 0

    def asked(self, rows: Array, count: int) -> Array:
        """Returns rows of a shard, or keys, as a lookup of ``count`` takes them."""
        if self.is_hashed:
            return padded_pairs(rows, count)
        padded = np.full(count, NO_ID, np.int32)
        padded[: len(rows)] = rows
        return padded

    def cache(self, places: int) -> "RowCache":
        """Returns an empty cache of its rows."""
        count = None if self.is_hashed else self.variable.shape[0]
        shape = tuple(self.variable.shape[1:])
        return RowCache(count, places, shape, np.dtype(self.variable.dtype))


@final
@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows of a table.

    Attributes:
      rows: ``[n, …]``, of the ids that were asked for; zeros where there are none.
      is_there: which of them there are.
      from_cache: some of them are as they were, not as they are.
    """

    rows: Array
    is_there: Array
    from_cache: bool


@final
class RowCache:
    """Rows of one table by id; of two ids of one place the newer stays.

    Args:
      rows: of the table; a table that has no more than ``places`` is held whole. None:
        ids are keys of a hash table.
      places: rows that are held at most.
      shape: of a row.
      dtype: of a row.

    Example:
      >>> cache = RowCache(10, 4, (2,), np.dtype("float32"))
      >>> cache.put(np.array([1, 6]), np.array([[1, 1], [6, 6]], "float32"))
      >>> rows, found = cache.get(np.array([1, 2, 6]))
      >>> rows.tolist(), found.tolist()
      ([[1.0, 1.0], [0.0, 0.0], [6.0, 6.0]], [True, False, True])
    """

    def __init__(
        self,
        rows: int | None,
        places: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> None:
        self._hashes = rows is None
        self._places = max(1, places if rows is None else min(rows, places))
        self._ids = np.full(self._places, NO_KEY, np.int64)
        self._rows = np.zeros((self._places, *shape), dtype)

    def put(self, ids: Array, rows: Array) -> None:
        """Takes the rows of ids, int[n], each of which is there once."""
        places = self._places_of(ids)
        self._ids[places] = ids
        self._rows[places] = rows
        # Of ids of one place numpy writes one, and the same one both times.

    def get(self, ids: Array) -> tuple[Array, Array]:
        """Returns ``[n, …]`` rows, and which of them are those of their ids."""
        places = self._places_of(ids)
        found: Array = self._ids[places] == ids
        rows: Array = self._rows[places]
        rows[~found] = 0
        return rows, found

    def _places_of(self, ids: Array) -> Array:
        if not self._hashes:
            return ids % self._places
        # Keys may be multiples of anything, and negative.
        return (hash_keys(ids) % np.uint64(self._places)).astype(np.int64)


def split_ids(layout: Layout, ids: Array) -> list[tuple[Array, Array]]:
    """Returns, for each shard, the positions of its ids, and its rows or keys.

    Example:
      >>> parts = split_ids(Layout((3, 2)), np.array([1, 4]))
      >>> [(places.tolist(), rows.tolist()) for places, rows in parts]
      [([0], [1]), ([1], [1])]
      >>> split_ids(Layout((3, 2), "mod"), np.array([1, 4]))[0]
      (array([1]), array([2]))
    """
    if layout.shards == 1:
        return [(np.arange(len(ids)), ids)]
    if layout.kind == "hash":
        shard, rows = shard_of(ids, layout.shards), ids
    elif layout.kind == "mod":
        shard, rows = ids % layout.shards, ids // layout.shards
    else:
        starts, ends = _bounds(layout.sizes)
        shard = ends.searchsorted(ids, "right")
        rows = ids - starts[shard]
    where = [(shard == number).nonzero()[0] for number in range(layout.shards)]
    return [(places, rows[places]) for places in where]


@lru_cache(256)
def _bounds(sizes: tuple[int, ...]) -> tuple[Array, Array]:
    """Returns where shards of so many rows begin, and where they end."""
    ends = np.cumsum(sizes)
    return ends - sizes, ends
