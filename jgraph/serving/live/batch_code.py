"""Code of a live model for one number of rows: ids of its tables, and its outputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np

from jgraph.graph.rows.hash_keys import NO_KEY, join_keys
from jgraph.graph.rows.rows import NO_ID, have_rows
from jgraph.serving.signature import Array

SHORT_S: Final = 0.002
"""What computes for less time does so on the event loop."""
FEW: Final = 64
"""Ids that Python puts in order sooner than NumPy."""


@final
@dataclass(frozen=True, slots=True)
class LookedUp:
    """A table of which a batch looks rows up.

    Attributes:
      name: of the parameter.
      feature: the inputs that its ids come from, for messages.
      rows: that it has; of a hash table without meaning.
      count: ids of a batch.
      hashed: it is a hash table, and ids are its keys.
      shape: of a row.
      dtype: of a row.
      inputs: numbers of the inputs of which its ids are all elements, one after the
        other; none: its ids are computed.
    """

    name: str
    feature: str
    rows: int
    count: int
    hashed: bool
    shape: tuple[int, ...]
    dtype: str
    inputs: tuple[int, ...] = ()

    def numbers(self, ids: Any) -> Array:
        """Returns ids that code gave as numbers: int32[n], or keys, int64[n]."""
        return join_keys(ids) if self.hashed else np.asarray(ids)


@final
@dataclass(slots=True)
class BatchCode:
    """What is compiled for a number of rows.

    Attributes:
      tables: those that are looked up.
      ids: of the inputs: the ids of each table, int32[n]; of a hash table its keys,
        uint32[n, 2]. None: no table is looked up.
      outputs: of the dense parameters, then of each table the rows, then of each the
        positions of ids among them, then the inputs.
      took_s: how long the last ``outputs`` was.
    """

    tables: Sequence[LookedUp]
    ids: Callable[..., Sequence[Any]] | None
    outputs: Callable[..., Sequence[Any]]
    took_s: float = SHORT_S


@final
@dataclass(frozen=True, slots=True)
class BatchIds:
    """Ids of one table in a batch.

    Attributes:
      unique: each once, ascending.
      positions: which of them each id is, int32[n]; n where it has no row.
      bad: ids that are out of range.

    Example:
      >>> table = LookedUp("t", "user", 5, 4, False, (2,), "float32")
      >>> ids = BatchIds.of(np.array([3, 9, 1, 3], np.int32), table)
      >>> ids.unique.tolist(), ids.positions.tolist(), ids.bad.tolist()
      ([1, 3], [1, 4, 0, 1], [9])
    """

    unique: Array
    positions: Array
    bad: Array

    @classmethod
    def fed(cls, inputs: Sequence[Array], table: LookedUp) -> "BatchIds | None":
        """Returns the ids that inputs are; None: ``BatchCode.ids`` has to say.

        It has for ids that are computed, and for those out of range: what becomes of
        these depends on the lookup.

        Example:
          >>> table = LookedUp("t", "user", 5, 4, False, (2,), "float32", (1,))
          >>> dense = np.zeros((2, 1), np.float32)
          >>> ids = BatchIds.fed([dense, np.array([[3, 2], [1, 3]])], table)
          >>> ids.unique.tolist(), ids.positions.tolist(), ids.bad.tolist()
          ([1, 2, 3], [2, 1, 0, 2], [])
          >>> BatchIds.fed([dense, np.array([[3, 2], [1, -3]])], table)
        """
        if not table.inputs:
            return None
        ids = inputs[table.inputs[0]].ravel()
        if len(table.inputs) > 1:
            ids = np.concatenate([inputs[number].ravel() for number in table.inputs])
        if len(ids) != table.count or not have_rows(ids, table.rows):
            return None
        narrow = ids.astype(np.int32, copy=False)
        unique, positions = _each_once(narrow)
        return cls(unique, positions, narrow[:0])

    @classmethod
    def of(cls, ids: Array, table: LookedUp) -> "BatchIds":
        """Returns ids, as ``LookedUp.numbers`` gives them, put in order."""
        if table.hashed:
            here, is_none = ids != NO_KEY, ids == NO_KEY
        else:
            here, is_none = (ids >= 0) & (ids < table.rows), ids == NO_ID
        if here.all():
            unique, positions = _each_once(ids)
            return cls(unique, positions, ids[:0])
        unique, places = _each_once(ids[here])
        positions = np.full(len(ids), len(ids), np.int32)
        positions[here] = places
        return cls(unique, positions, np.unique(ids[~here & ~is_none]))


def _each_once(ids: Array) -> tuple[Array, Array]:
    """Returns ids, each once and ascending, and which of them each id is, int32[n]."""
    if len(ids) > FEW:
        unique, places = np.unique(ids, return_inverse=True)
        return unique, places.astype(np.int32)
    numbers = ids.tolist()
    place = {number: n for n, number in enumerate(sorted(set(numbers)))}
    positions = np.array([place[number] for number in numbers], np.int32)
    return np.array([*place], ids.dtype), positions
