"""Limits of a hash-table shard: byte budget, admission and eviction policies."""

from bisect import bisect_right
from typing import Any, TypeAlias, final

import numpy as np

from jgraph.errors import ConfigError
from jgraph.graph.rows.hash_keys import Keys, hash_keys
from jgraph.graph.rows.hash_spec import Admission, Eviction, HashSpec
from jgraph.runtime.store.hash_index import HashIndex, Rows
from jgraph.runtime.store.hash_rows import np_dtype

_MOST_ROWS = 2**31 - 1


def rows_within(spec: HashSpec) -> int:
    """Returns how many rows the budget of a shard is good for.

    Counted is all that the shard keeps: the columns, the keys, the slots of the index
    (also while it grows), and what the policies remember.

    Raises:
      ConfigError: not even one.
    """
    least = nbytes_for(spec, 1)
    if spec.capacity_bytes < least:
        name = f" '{spec.name}'" if spec.name else ""
        raise ConfigError(
            f"hash table{name} has {spec.capacity_bytes} bytes for a shard, "
            f"and one row with its optimizer state takes {least}; raise capacity_bytes",
            table=spec.name,
            needed_bytes=least,
        )
    sizes = range(2, _MOST_ROWS)
    return 1 + bisect_right(
        sizes, spec.capacity_bytes, key=lambda rows: nbytes_for(spec, rows)
    )


def nbytes_for(spec: HashSpec, rows: int) -> int:
    """Returns the bytes that a shard of ``rows`` rows keeps, also while it grows."""
    values = sum(np_dtype(c).itemsize * max(c.width, 1) for c in spec.columns)
    remembered = 8 + 4 * (spec.eviction == "lfu")
    sketch = 0
    if spec.admission.sightings > 1:
        sketch = CountSketch.nbytes_for(sketch_width(rows))
    return rows * (values + remembered) + HashIndex.nbytes_for(rows) + sketch


def sketch_width(rows: int) -> int:
    """Returns the width of the sketch that counts keys for so many rows."""
    return 1 << (rows - 1).bit_length()


Counts: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

_DEPTH = 4
_WINDOW = 8
_SEEDS = (0x5EED_0001, 0x5EED_0002)


@final
class CountSketch:
    """How often keys were seen lately, roughly, in a fixed amount of memory.

    A count-min sketch (Cormode, Muthukrishnan 2005) with conservative update: a count
    is never too small. After ``8 * width`` sightings all counts are halved, as TinyLFU
    does (Einziger, Friedman, Manes 2017), so that rare keys are forgotten.

    Args:
      width: cells per row, a power of two; as many as keys of interest.

    Example:
      >>> sketch = CountSketch(64)
      >>> sketch.add(np.array([5, 6])).tolist(), sketch.add(np.array([5])).tolist()
      ([1, 1], [2])
    """

    def __init__(self, width: int) -> None:
        self._cells = np.zeros((_DEPTH, width), np.uint8)
        self._added = 0

    @staticmethod
    def nbytes_for(width: int) -> int:
        """Bytes of a sketch."""
        return _DEPTH * width

    @property
    def state(self) -> tuple[Counts, int]:
        """The cells, and how many keys were counted since these were halved."""
        return self._cells, self._added

    def restore(self, cells: Counts, added: int) -> None:
        """Takes the counts of another sketch of this width."""
        self._cells[...] = cells
        self._added = added

    def add(self, keys: Keys) -> Counts:
        """Counts each key once more, and returns the counts; 255 stays 255.

        Args:
          keys: int64[n], each once.
        """
        cells = self._cells
        first, second = (hash_keys(keys, seed) for seed in _SEEDS)
        mask = np.uint64(cells.shape[1] - 1)
        lines = np.arange(_DEPTH)[:, None]
        places = (first + lines.astype(np.uint64) * (second | np.uint64(1))) & mask
        count: Counts = cells[lines, places].min(axis=0)
        count += count < 255
        # Not an assignment: keys of one cell would overwrite the greater count.
        np.maximum.at(cells, (lines, places), count)
        self._added += len(keys)
        if self._added >= _WINDOW * cells.shape[1]:
            cells >>= 1
            self._added //= 2
        return count


@final
class Gate:
    """Decides which unknown keys get a row."""

    def __init__(self, admission: Admission, width: int) -> None:
        self._admission = admission
        self.sketch = CountSketch(width) if admission.sightings > 1 else None
        """Of keys without a row; None: they come in at their first lookup."""

    def admits(self, keys: Keys, now: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Counts these keys, each given once, and says which of them come in."""
        admitted = np.ones(len(keys), np.bool_)
        if self.sketch is not None:
            admitted = self.sketch.add(keys) >= self._admission.sightings
        if self._admission.probability < 1:
            # Another version is another draw; the draw is the key's own.
            draw = hash_keys(keys, 1 + now) >> np.uint64(11)
            admitted &= draw < np.uint64(self._admission.probability * 2.0**53)
        return admitted


def victims(
    used: np.ndarray[Any, np.dtype[np.int64]],
    uses: np.ndarray[Any, np.dtype[np.uint32]],
    now: int,
    count: int,
    eviction: Eviction,
) -> Rows:
    """Returns the rows to evict, at most ``count``.

    A row looked up at version ``now`` stays: no update has come since.

    Args:
      used: int64[rows], the version of the last lookup; 0: no row.
      uses: uint32[rows], the number of lookups; of no length unless ``"lfu"``.
      now: the version.
      count: how many rows are wanted.
      eviction: ``"lru"`` or ``"lfu"``; of equally frequent rows the older one goes.
    """
    rows = np.flatnonzero((used > 0) & (used < now))
    if len(rows) > count:
        score = used[rows]
        if eviction == "lfu":
            often = np.minimum(uses[rows], 2**23 - 1).astype(np.int64)
            score = (often << 40) | np.minimum(score, 2**40 - 1)
        rows = rows[np.argpartition(score, count - 1)[:count]]
    return rows.astype(np.int32)
