"""Gathering of examples from arrays that lie in pieces, by one copy of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import final

import numpy as np

from jgraph.coordination.data.slots import Rows
from jgraph.runtime.data.batches import Array


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """Arrays of examples that follow each other.

    Attributes:
      first: number of the first example.
      arrays: fields by name, examples along axis 0.
    """

    first: int
    arrays: Mapping[str, Array]

    @property
    def end(self) -> int:
        """Number of the example after the last one."""
        return self.first + len(next(iter(self.arrays.values())))


def size_of(pieces: Sequence[Piece]) -> int:
    """Returns the bytes of all arrays."""
    return sum(array.nbytes for piece in pieces for array in piece.arrays.values())


def part_of(pieces: Sequence[Piece], first: int, end: int) -> list[Piece]:
    """Returns pieces of the examples from ``first`` to before ``end``, without a copy.

    Example:
      >>> pieces = [Piece(0, {"x": np.arange(3)}), Piece(3, {"x": np.arange(3, 6)})]
      >>> [piece.arrays["x"].tolist() for piece in part_of(pieces, 2, 4)]
      [[2], [3]]
    """
    found = []
    for piece in pieces:
        low, high = max(first, piece.first), min(end, piece.end)
        if low < high:
            of = slice(low - piece.first, high - piece.first)
            found.append(Piece(int(low), {n: a[of] for n, a in piece.arrays.items()}))
    return found


def joined(pieces: Sequence[Piece]) -> Mapping[str, Array]:
    """Returns the arrays of pieces that follow each other; of one those it has."""
    if len(pieces) == 1:
        return pieces[0].arrays
    return {
        name: np.concatenate([piece.arrays[name] for piece in pieces])
        for name in pieces[0].arrays
    }


def gathered(pieces: Sequence[Piece], rows: Rows) -> dict[str, Array]:
    """Returns examples by their numbers, in this order; fresh arrays.

    Args:
      pieces: have all of them, none twice; each row of an array in C order.
      rows: their numbers.

    Example:
      >>> pieces = [Piece(0, {"x": np.arange(3)}), Piece(3, {"x": np.arange(3, 6)})]
      >>> gathered(pieces, np.array([5, 0, 4, 5]))["x"].tolist()
      [5, 0, 4, 5]
    """
    if len(pieces) == 1 and all(
        a.flags.c_contiguous for a in pieces[0].arrays.values()
    ):
        taken = rows - pieces[0].first
        return {name: a.take(taken, axis=0) for name, a in pieces[0].arrays.items()}
    # In ascending order, what a piece has is a range, and mostly all of it: then each
    # example goes from where it lies to its place.
    ascending, order, are_all = _sorted(rows)
    read: dict[str, Array] = {}
    for piece in pieces:
        begins, ends = np.searchsorted(ascending, (piece.first, piece.end)).tolist()
        if begins == ends:
            continue
        taken, places = ascending[begins:ends] - piece.first, order[begins:ends]
        for name, array in piece.arrays.items():
            if name not in read:
                read[name] = np.empty((len(rows), *array.shape[1:]), array.dtype)
            items = _items(array)
            of = items[taken[0] : taken[-1] + 1] if are_all else items[taken]
            _items(read[name])[places] = of
    return read


def _sorted(rows: Rows) -> tuple[Rows, Rows, bool]:
    """Returns numbers in ascending order, where each is, and if they are a range."""
    first, count = int(rows.min()), len(rows)
    if int(rows.max()) - first == count - 1:
        order = np.full(count, -1)
        order[rows - first] = np.arange(count)
        if order.min() >= 0:
            return np.arange(first, first + count), order, True
    order = np.argsort(rows)
    return rows[order], order, False


def _items(array: Array) -> Array:
    """Returns an example of an array as one item, which NumPy copies as a whole."""
    if array.ndim == 1:
        return array
    nbytes = array.dtype.itemsize * prod(array.shape[1:])
    if not nbytes:
        return array
    items: Array = array.reshape(len(array), -1).view(np.dtype((np.void, nbytes)))
    return items[:, 0]
