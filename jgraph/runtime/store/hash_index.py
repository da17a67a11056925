"""Hash index from keys to rows: open addressing in numpy, whole batches at once.

Keys are any int64. A batch of thousands is looked up in a few vectorised rounds: round
``k`` looks at one more slot of every key that is not decided yet (triangular probing,
which visits every slot of a table of a power of two). Several keys that want one free
slot all write it; the one that is read back has it, the others go on.

A slot is the number of a row, and the key is found at the row: four bytes per slot,
and one place that says which key a row has. A removed key leaves a mark in its slot, so
that probing goes on behind it; marks go when the slots are built anew.
"""

from typing import Any, TypeAlias, final

import numpy as np

from jgraph.graph.rows.hash_keys import Keys, hash_keys

Rows: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]
Flags: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]

ABSENT = -1
"""In place of the row of a key that has none."""

_FREE, _GONE = -1, -2
_LEAST_SLOTS = 64


@final
class HashIndex:
    """Keys and their rows, at most ``capacity`` of them; rows of removed keys return.

    Args:
      capacity: most rows. Memory of the keys is taken as rows are used.

    Example:
      >>> index = HashIndex(capacity=10)
      >>> index.insert(np.array([7, -3, 2**60])).tolist()
      [0, 1, 2]
      >>> index.remove(np.array([1], np.int32))
      >>> index.find(np.array([2**60, -3])).tolist(), len(index)
      ([2, -1], 2)
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # A mark in a slot reads a key from the end; that it is no row is seen first.
        self._keys: Keys = np.empty(max(capacity, 2), np.int64)
        self._slots: Rows = np.full(_LEAST_SLOTS, _FREE, np.int32)
        self._used = 0  # slots that are not free; a mark taken again counts twice
        self._returned: Rows = np.empty(0, np.int32)
        self._size = 0
        self.high = 0
        """Rows from here on were never used."""

    def __len__(self) -> int:
        return self._size

    @property
    def room(self) -> int:
        """How many keys can be added."""
        return self.capacity - self._size

    @staticmethod
    def nbytes_for(size: int) -> int:
        """Most bytes that an index of ``size`` keys takes, also while it grows."""
        listed = 8  # the rows listed while slots are built, and those that returned
        return size * (8 + listed) + 4 * _slots_for(size)

    def keys_of(self, rows: Rows) -> Keys:
        """Returns the key of each row."""
        return self._keys[rows]

    def find(self, keys: Keys) -> Rows:
        """Returns the row of each key, or ``ABSENT``.

        Args:
          keys: int64[n], in any order, also more than once.
        """
        return self._probe(keys)[0]

    def insert(self, keys: Keys) -> Rows:
        """Gives each key a row, and returns the rows.

        Args:
          keys: int64[n], each once, none of them there yet, at most ``room``.
        """
        assert len(keys) <= self.room  # the caller makes room first
        rows = self._new_rows(len(keys))
        self._keys[rows] = keys
        self._size += len(keys)
        if 3 * (self._used + len(keys)) > 2 * len(self._slots):
            self._rebuild(rows)
        else:
            self._place(rows)
        return rows

    def remove(self, rows: Rows) -> None:
        """Forgets the keys of these rows, each of which has one."""
        _, slots = self._probe(self._keys[rows])
        self._slots[slots] = _GONE
        self._size -= len(rows)
        self._returned = np.concatenate([rows.astype(np.int32), self._returned])

    def follow(self, rows: Rows, keys: Keys, there: Flags, before: Flags) -> None:
        """Gives rows the keys that they have in another index, of which this is a copy.

        Until all rows are as they are there a key may have two of them: nothing is to
        be looked up before ``end``.

        Args:
          rows: int32[n], each once.
          keys: of these rows.
          there: which of them have their key in the other index.
          before: which of them have one here.
        """
        self._leave(rows[before])
        self._keys[rows] = keys
        new = rows[there]
        self._size += len(new)
        if 3 * (self._used + len(new)) > 2 * len(self._slots):
            self._rebuild(new)
        else:
            self._place(new)

    def end(self, high: int, returned: Rows) -> None:
        """Takes from the other index which rows are used next; all keys are there."""
        self.high, self._returned = high, returned.astype(np.int32)

    @property
    def returned(self) -> Rows:
        """Rows of removed keys, those that are used again first at the front."""
        return self._returned

    def _leave(self, rows: Rows) -> None:
        """Forgets the keys of these rows, of which others may have the same."""
        mask = len(self._slots) - 1
        slots = (hash_keys(self._keys[rows]) & np.uint64(mask)).view(np.int64)
        step = 0
        self._size -= len(rows)
        while len(rows):
            found = self._slots[slots] == rows
            self._slots[slots[found]] = _GONE
            step += 1
            rows, slots = rows[~found], (slots[~found] + step) & mask

    def _probe(self, keys: Keys) -> tuple[Rows, np.ndarray[Any, Any]]:
        """Returns (row or ABSENT, slot where probing ended) of each key."""
        mask = len(self._slots) - 1
        slots = (hash_keys(keys) & np.uint64(mask)).view(np.int64)
        rows = self._slots[slots]
        wrong = (rows < 0) | (self._keys[rows] != keys)
        rest = np.flatnonzero(wrong & (rows != _FREE))
        rows[wrong] = ABSENT
        step = 0
        while len(rest):
            step += 1
            slots[rest] = at = (slots[rest] + step) & mask
            found = self._slots[at]
            right = (found >= 0) & (self._keys[found] == keys[rest])
            rows[rest[right]] = found[right]
            rest = rest[~right & (found != _FREE)]
        return rows, slots

    def _new_rows(self, count: int) -> Rows:
        again, self._returned = self._returned[:count], self._returned[count:]
        end = self.high + count - len(again)
        new = np.arange(self.high, end, dtype=np.int32)
        self.high = end
        return np.concatenate([again, new])

    def _place(self, rows: Rows) -> None:
        self._used += len(rows)
        mask = len(self._slots) - 1
        slots = (hash_keys(self._keys[rows]) & np.uint64(mask)).view(np.int64)
        step = 0
        while len(rows):
            free = self._slots[slots] < 0
            self._slots[slots[free]] = rows[free]
            lost = self._slots[slots] != rows
            step += 1
            rows, slots = rows[lost], (slots[lost] + step) & mask

    def _rebuild(self, more: Rows) -> None:
        """Builds the slots anew, of the size that all keys need, without marks."""
        rows = np.concatenate([self._slots[self._slots >= 0], more])
        if len(self._slots) == _slots_for(self._size):
            self._slots.fill(_FREE)
        else:
            del self._slots  # the old ones go before the new ones come
            self._slots = np.full(_slots_for(self._size), _FREE, np.int32)
        self._used = 0
        self._place(rows)


def _slots_for(size: int) -> int:
    """Returns a power of two that ``size`` keys fill at most by half."""
    return max(_LEAST_SLOTS, 1 << (2 * size - 1).bit_length()) if size else _LEAST_SLOTS
