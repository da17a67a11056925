"""Book of a run's batches: which are dealt, given back or done, and the position.

A batch is not dealt yet, open (dealt and not done) or done. What is open is held by
somebody, whom the dealer knows, or was given back and is dealt before anything new. A
position knows no holders: what is open there is dealt again. A book that is kept from
reports alone is enough to go on without the master that dealt the batches.
"""

import bisect
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, final

from jgraph.coordination.data.batch_order import BatchOrder
from jgraph.coordination.data.slots import DEATHS, Lease, SlotPlan
from jgraph.errors import DataSlotError


@final
class BatchBook:
    """The batches of one run, by their places; see ``BatchOrder``.

    Args:
      plan: the slots.
      position: where the run begins. One of other data or another batch size tells only
        the epoch: the next one is begun. One without slots tells nothing.
      skip: batches to leave out at the beginning, where there is no position.
      budget: batches of this run.
      updates: applied to the model by then, one per batch.

    Example:
      >>> from jgraph.coordination.data.slots import Part
      >>> book = BatchBook(SlotPlan([Part("data", 8)], batch_size=1, seed=0), budget=8)
      >>> book.add([Lease(0, 0, 0, 1), Lease(0, 0, 2, 1)])
      >>> book.position(updates=3)["unfinished"], book.done, book.remaining
      ([[0, 0, 1, 1]], 2, 6)
    """

    def __init__(
        self,
        plan: SlotPlan,
        position: Mapping[str, Any] | None = None,
        *,
        skip: int = 0,
        budget: int = 0,
        updates: int = 0,
    ) -> None:
        self.order = BatchOrder(plan)
        self.end = skip
        """Place of the first batch that was never dealt."""
        self.given_back: list[int] = []
        """Places of what is open and nobody holds, ascending."""
        self.done = 0
        """Batches done, over all runs."""
        self.again = 0
        """Batches dealt again, over all runs; each may have been done twice."""
        self.deaths = Counter[int]()
        """How many who held it were lost, by the place of a batch that is not done."""
        if position is not None and "plan" in position:
            self.end, self.given_back = self.order.restored(position)
            self.done, self.again = int(position["done"]), int(position["again"])
            if plan.is_that_of(position):
                deaths = position.get("deaths", ())
                self.deaths.update({int(place): int(count) for place, count in deaths})
        self._open = set(self.given_back)
        # What is open beside them: rows of which nothing was said yet, by their begin.
        self._rows: dict[int, range] = {}
        self._until = self.done + budget
        self._unknown = updates - self.done

    @property
    def remaining(self) -> int:
        """Batches of this run that are not done."""
        return self._until - self.done

    @property
    def undealt(self) -> int:
        """Those of them that nobody holds."""
        open_ = len(self._open) + sum(map(len, self._rows.values()))
        return self.remaining - open_ + len(self.given_back)

    def position(self, updates: int = 0) -> dict[str, Any]:
        """Returns where the run is, as plain data.

        Args:
          updates: applied to the model by now. Those of batches that nobody told of as
            done come again, and are counted as such.
        """
        again = max(0, updates - self.done - self._unknown)
        open_ = self._open.union(*self._rows.values())
        return {
            **self.order.position(self.end, sorted(open_)),
            "done": self.done,
            "again": self.again + again,
            **({"deaths": [*self.deaths.items()]} if self.deaths else {}),
        }

    # ------------------------------------------------------------ what becomes of one

    def take(self, place: int) -> int:
        """Deals a batch that was given back, or the one at the end; returns it."""
        if place == self.end:
            self.take_new(1)
        else:
            self.given_back.remove(place)
        return place

    def take_new(self, batches: int) -> range:
        """Deals so many from the end on; returns them."""
        new = range(self.end, self.end + batches)
        self._open.update(new)
        self.end = new.stop
        return new

    def take_row(self, batches: int) -> range:
        """Deals so many from the end on that will most often be done together."""
        row = self._rows[self.end] = range(self.end, self.end + batches)
        self.end = row.stop
        return row

    def give_back(self, place: int) -> None:
        """Nobody holds this batch any more, and it is not done."""
        bisect.insort(self.given_back, place)

    def lose(self, places: Iterable[int]) -> DataSlotError | None:
        """Who held these is gone; returns an error if one ended others before, too."""
        lost = list(places)
        for place in lost:
            self.give_back(place)
            self.deaths[place] += 1
        for place in lost:
            if (deaths := self.deaths[place]) >= DEATHS:
                return self.order.plan.deadly(self.order.batch(place), deaths)
        return None

    def finish(self, places: Iterable[int]) -> None:
        """Batches are done; one that was done before counts no more."""
        done: Collection[int] = self._row(places)
        if not done:
            self._open.update(*self._rows.values())
            self._rows.clear()
            done = self._open.intersection(places)
            self._open.difference_update(done)
        self.done += len(done)
        for place in [dead for dead in self.deaths if dead in done]:
            del self.deaths[place]  # it let its holder live

    def _row(self, places: Iterable[int]) -> range:
        """Takes a whole row out of what is open; empty: these places are none."""
        row = self._rows.get(places.start) if isinstance(places, range) else None
        if row is None or row != places:
            return range(0)
        return self._rows.pop(row.start)

    def undo(self, place: int) -> None:
        """A batch that was done is not, after all."""
        self._open.add(place)
        self.give_back(place)
        self.done -= 1

    def add(self, leases: Iterable[Lease]) -> None:
        """Takes batches that others dealt and that are done; again counts no more."""
        for lease in leases:
            for batch in lease.each():
                place = self.order.place(*batch)
                while self.end <= place:  # nobody told who holds those before it
                    self.take(self.end)
                if place in self.given_back:
                    self.take(place)
                self.finish([place])
