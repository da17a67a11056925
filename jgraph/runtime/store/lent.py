"""Copy on write: a copy of a variable in the memory of the original, row by row.

The original goes on to be used. Rows that are written there are kept here before, each
once; a function that computes all of it anew does so in other memory, and leaves this
one to the copy.
"""

import threading
from typing import Any, Final, final

import jax
import numpy as np

from jgraph.plan.program.nodes import ValueType
from jgraph.runtime.store.slab import view_of
from jgraph.runtime.store.tables import Table, bits_of, on_cpu

Array = np.ndarray[Any, Any]

LEAST_BYTES: Final = 1 << 20
"""A smaller array is copied whole."""
_KEPT_BYTES: Final = 4 << 20
"""Rows are kept in arrays of this size."""


@final
class LentArray:
    """An array as it was at one moment; safe to read from several threads.

    Args:
      value: an array on a CPU with rows; see ``can_lend``.

    Example:
      >>> import jax.numpy as jnp
      >>> from jgraph.runtime.store.tables import ArrayTable
      >>> value = jnp.zeros((3, 2))
      >>> before = LentArray(value)
      >>> before.update(ArrayTable(value), np.array([1]), np.ones((1, 2)))
      >>> value[1].tolist(), before.rows(1, 2).tolist()
      ([1.0, 1.0], [[0.0, 0.0]])
    """

    __slots__ = ("__weakref__", "_guard", "_is_kept", "_memory", "_old_rows", "_room")

    def __init__(self, value: jax.Array) -> None:
        # This view lets no function take the memory over.
        self._memory = view_of(value)
        self._guard = threading.Lock()
        self._is_kept = np.zeros(len(self._memory), bool)
        self._old_rows: list[tuple[Array, Array]] = []  # ids, and their rows
        self._room = 0  # in the last of them

    @property
    def type(self) -> ValueType:
        """Shape and dtype."""
        return ValueType(self._memory.shape, str(self._memory.dtype))

    def shares(self, view: Array) -> bool:
        """Whether another view is of the same memory."""
        mine = self._memory.__array_interface__["data"]
        return bool(mine[0] == view.__array_interface__["data"][0])

    def update(self, table: Table, ids: Array, rows: Array) -> None:
        """Replaces rows of the original, whose memory this is, and keeps them here.

        Args:
          table: of the original; its user holds its lock.
          ids: each once.
          rows: their new values.

        Raises:
          MalformedMessageError: an id without a row; nothing is changed.
        """
        old = np.empty((len(ids), *self._memory.shape[1:]), self._memory.dtype)
        table.lookup(ids, old)
        with self._guard:
            is_new = ~self._is_kept[ids]
            self._keep(ids[is_new], old[is_new])
            self._is_kept[ids] = True
            table.update(ids, rows)

    def rows(self, start: int, stop: int) -> Array:
        """Returns a copy of rows ``start`` to ``stop``."""
        with self._guard:
            found = self._memory[start:stop].copy()
            if self._is_kept[start:stop].any():
                for ids, rows in self._old_rows:
                    here = np.flatnonzero((ids >= start) & (ids < stop))
                    found[ids[here] - start] = rows[here]
        return found

    def _keep(self, ids: Array, rows: Array) -> None:
        while len(ids):
            if not self._room:
                row_bytes = max(1, self._memory[:1].nbytes)
                self._room = max(1, _KEPT_BYTES // row_bytes)
                # No row has the number -1: what is not filled yet is of none.
                none = np.full(self._room, -1, np.int64)
                shape = self._room, *self._memory.shape[1:]
                self._old_rows.append((none, np.empty(shape, self._memory.dtype)))
            kept_ids, kept_rows = self._old_rows[-1]
            count, first = min(len(ids), self._room), len(kept_ids) - self._room
            kept_ids[first : first + count] = ids[:count]
            kept_rows[first : first + count] = rows[:count]
            ids, rows, self._room = ids[count:], rows[count:], self._room - count


@final
class LentTable:
    """The rows of an array that is lent; a ``Table``.

    Args:
      table: of the array.
      lent: is told of rows before they are written.
    """

    def __init__(self, table: Table, lent: LentArray) -> None:
        self._table, self._lent = table, lent

    def lookup(self, ids: Array, out: Array) -> None:
        """Copies the rows of ``ids`` to ``out``."""
        self._table.lookup(ids, out)

    def update(self, ids: Array, rows: Array) -> None:
        """Replaces the rows of ``ids``."""
        self._lent.update(self._table, ids, rows)


def can_lend(value: jax.Array) -> bool:
    """Whether an array is worth it, and has rows in memory that can be looked at."""
    is_large = value.ndim > 0 and value.nbytes >= LEAST_BYTES
    return is_large and on_cpu(value) and bits_of(value.dtype) >= 8
