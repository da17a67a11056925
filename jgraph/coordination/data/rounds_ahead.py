"""Batches of rounds ahead: a row for each round, with one batch for each replica.

A row is a range of places that were never dealt, in the order of the replicas. Who asks
takes its batches of the next rows: a column, which is a range as long as nothing else
was dealt between the rows. So what many replicas are dealt costs as their asks do, and
not as their batches.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import final

from jgraph.coordination.data.batch_book import BatchBook


@final
class RoundsAhead:
    """What is dealt ahead to some replicas, in rows.

    Args:
      replicas: their numbers, in the order of a row.

    Example:
      >>> from jgraph.coordination.data.slots import Part, SlotPlan
      >>> book = BatchBook(SlotPlan([Part("data", 90)], batch_size=1, seed=0))
      >>> rows = RoundsAhead([0, 1, 2])
      >>> rows.take(1, 2, book), rows.take(0, 1, book)
      (range(1, 5, 3), range(0, 1, 3))
      >>> {replica: [*places] for replica, places in rows.left()}
      {0: [3], 1: [], 2: [2, 5]}
    """

    def __init__(self, replicas: Iterable[int]) -> None:
        self._column = {replica: place for place, replica in enumerate(replicas)}
        self._taken = dict.fromkeys(self._column, 0)
        self._begin()

    def _begin(self) -> None:
        self._rows: list[int] = []  # the first place of each that not all have taken
        self._before = 0  # rows that all have taken
        self._look_at = 64  # so many rows, for some that all have taken

    def take(self, replica: int, rows: int, book: BatchBook) -> Sequence[int]:
        """Takes the batches of a replica in the next rows; returns their places."""
        width, first = len(self._column), self._taken[replica]
        last = self._taken[replica] = first + rows
        while self._before + len(self._rows) < last:
            self._rows.append(book.take_new(width).start)
        found = self._rows[first - self._before : last - self._before]
        if len(self._rows) > self._look_at:
            self._forget()
        begin, end = found[0], found[-1]
        column = self._column[replica]
        if end - begin == width * (rows - 1):
            return range(begin + column, end + column + 1, width)
        return [row + column for row in found]

    def _forget(self) -> None:
        over = min(self._taken.values())
        del self._rows[: over - self._before]
        self._before = over
        self._look_at = 64 + 2 * len(self._rows)

    def left(self) -> Iterator[tuple[int, list[int]]]:
        """Yields what replicas have not taken, and forgets it."""
        if not self._rows:
            return
        rows, before = self._rows, self._before
        taken, self._taken = self._taken, dict.fromkeys(self._column, 0)
        self._begin()
        for replica, column in self._column.items():
            yield replica, [row + column for row in rows[taken[replica] - before :]]
