"""Batches of rounds ahead: a row for each round, with one batch for each replica.

A row is a range of places that were never dealt, in the order of the replicas. Who asks
takes its batches of the next rows: a column, which is a range as long as nothing else
was dealt between the rows. So what many replicas are dealt costs as their asks do, and
not as their batches.

Who holds what of a row is known by where it is, until it is taken apart or counted. So
what thousands of replicas contribute is a few operations, and not one for each.
"""

import bisect
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, final

import numpy as np

from jgraph.coordination.data.batch_book import BatchBook
from jgraph.coordination.data.slots import Rows

_NO_COLUMN: Final = -(2**63)


@final
class RoundsAhead:
    """What is dealt ahead to some replicas, in rows.

    Args:
      replicas: their numbers, in the order of a row.
      knows: keep who holds what, as long as nothing but whole rows is counted.

    Example:
      >>> from jgraph.coordination.data.slots import Part, SlotPlan
      >>> book = BatchBook(SlotPlan([Part("data", 90)], batch_size=1, seed=0))
      >>> rows = RoundsAhead([0, 1, 2])
      >>> rows.take(1, 2, book), rows.take(0, 1, book)
      (range(1, 5, 3), range(0, 1, 3))
      >>> {replica: [*places] for replica, places in rows.left()}
      {0: [3], 1: [], 2: [2, 5]}
    """

    def __init__(self, replicas: Iterable[int], *, knows: bool = False) -> None:
        self.members = np.fromiter(replicas, np.int64)
        """The replicas, in their order."""
        self._column = {n: place for place, n in enumerate(self.members.tolist())}
        self._columns = np.full(self.members.max(initial=-1) + 1, _NO_COLUMN)
        self._columns[self.members] = np.arange(len(self.members))
        self.knows = knows
        """Whether it is kept here who holds what of rows that are not apart."""
        self._begin()

    def _begin(self) -> None:
        self._taken = array("q", bytes(8 * len(self._column)))  # rows, of each column
        self._rows: list[int] = []  # the first place of each that not all have taken
        self._before = 0  # rows that all have taken
        self._look_at = 64  # so many rows, for some that all have taken
        # Where those rows begin of which it is known who holds what, and which each is.
        self._begins: list[int] = []
        self._whole: dict[int, int] = {}
        self.apart = 0
        """Of how many rows, all before those, it is not known here."""

    def take(self, replica: int, rows: int, book: BatchBook) -> Sequence[int]:
        """Takes the batches of a replica in the next rows; returns their places."""
        width, column = len(self._column), self._column[replica]
        first = self._taken[column]
        last = self._taken[column] = first + rows
        while self._before + len(self._rows) < last:
            self._rows.append(self._new_row(width, book))
        found = self._rows[first - self._before : last - self._before]
        if len(self._rows) > self._look_at:
            self._forget()
        begin, end = found[0], found[-1]
        if end - begin == width * (rows - 1):
            return range(begin + column, end + column + 1, width)
        return [row + column for row in found]

    def _new_row(self, width: int, book: BatchBook) -> int:
        if not self.knows:
            self.apart += 1
            return book.take_new(width).start
        begin = book.take_row(width).start
        self._whole[begin] = self._before + len(self._rows)
        self._begins.append(begin)
        return begin

    def _forget(self) -> None:
        over = min(self._taken)
        del self._rows[: over - self._before]
        self._before = over
        self._look_at = 64 + 2 * len(self._rows)

    def left(self) -> Iterator[tuple[int, list[int]]]:
        """Yields what replicas have not taken, and forgets it."""
        if not self._rows:
            return
        assert not self._whole  # they are taken apart first
        rows, before, taken = self._rows, self._before, self._taken
        self._begin()
        for replica, column in self._column.items():
            of_it = rows[taken[column] - before :]
            yield replica, [row + column for row in of_it]

    # ------------------------------------------------------------ who holds what

    def unknown(self, replica: int, rows: int) -> int:
        """Of the last rows that a replica took: of how many it is not known here."""
        return max(0, self.apart - self._taken[self._column[replica]] + rows)

    def hold(self, replicas: Rows, places: Rows) -> bool:
        """Whether each of these holds its batch, all of one row."""
        if not self._begins or not len(places):
            return False
        at = bisect.bisect_right(self._begins, int(places[0])) - 1
        begin = self._begins[max(0, at)]
        columns = self._columns[replicas]
        if not np.array_equal(columns, places - begin):
            return False
        taken = np.frombuffer(self._taken, np.int64)
        return bool((taken[columns] > self._whole[begin]).all())

    def count(self, places: Sequence[int]) -> bool:
        """Forgets a row of which each batch is held; returns whether this is one."""
        if not isinstance(places, range) or places.start not in self._whole:
            return False
        if len(places) != len(self._column) or places.step != 1:
            return False
        self._begins.remove(places.start)
        del self._whole[places.start]
        return True

    def take_apart(self) -> Iterator[tuple[int, int]]:
        """Yields (place, replica) of all that is held, which is kept elsewhere then."""
        whole, taken = self._whole, np.frombuffer(self._taken, np.int64)
        self.apart = self._before + len(self._rows)
        self._whole, self._begins = {}, []
        for begin, row in whole.items():
            (columns,) = np.nonzero(taken > row)
            places = (columns + begin).tolist()
            yield from zip(places, self.members[columns].tolist(), strict=True)
