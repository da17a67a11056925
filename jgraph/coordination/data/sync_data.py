"""Data ledger of synchronous training: batches dealt, given back and counted.

A batch is not dealt yet, held by one replica, given back, or counted. It counts when
the update that its contribution is part of is decided, and never twice. A contribution
that comes too late gives its batch back, and so does a replica that is lost; what was
given back is dealt before anything new, to another replica if there is one. So each
batch of each epoch counts exactly once.

As long as every update needs all replicas, batches are dealt in rounds, one for each
replica in turn. An update is then of neighbours in the order of the epoch, whoever asks
first: that of one process with batches as large as those of all replicas together. With
backup workers a batch goes to who asks, and a slow replica gets fewer.

What a lost replica held is suspected of ending it and dealt alone, one batch at a time,
so that a third death has one cause only, whose name the run then ends with.
"""

import bisect
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any, final

from jgraph.coordination.data.batch_order import BatchOrder
from jgraph.coordination.data.slots import DEATHS, Lease, SlotPlan
from jgraph.errors import DataSlotError


@final
class SyncData:
    """The ledger of the batches of one run.

    Batches are known by their numbers, see ``SlotPlan.number``.

    Args:
      plan: the slots.
      replicas: who takes part, in the order in which a round is dealt.
      position: where to begin, see ``Dispatch.state``.

    Example:
      >>> from jgraph.coordination.data.slots import Part
      >>> plan = SlotPlan([Part("data", 8)], batch_size=2, seed=0)
      >>> data = SyncData(plan, ["w0", "w1"])
      >>> data.deal("w1", 1, together=True)
      (Lease(epoch=0, slot=0, first=1, batches=1),)
      >>> data.late(1), data.deal("w0", 2, together=False)
      (None, (Lease(epoch=0, slot=0, first=0, batches=1),))
    """

    def __init__(
        self,
        plan: SlotPlan,
        replicas: Iterable[str],
        position: Mapping[str, Any] | None = None,
    ) -> None:
        self._order = BatchOrder(plan)
        self._end = 0  # place of the first batch that is nobody's yet
        self._given_back: list[int] = []
        self.done = self._again = 0
        deaths: Iterable[tuple[int, int]] = ()
        if position is not None:
            self._end, self._given_back = self._order.restored(position)
            self.done, self._again = int(position["done"]), int(position["again"])
            if plan.is_that_of(position):
                deaths = position.get("deaths", ())
        # Of a round: batches that replicas will get when they ask.
        self._reserved: dict[str, deque[int]] = {name: deque() for name in replicas}
        self._held: dict[str, list[int]] = {name: [] for name in self._reserved}
        self._holder: dict[int, tuple[str, int]] = {}  # by number
        self._late_with: dict[int, str] = {}
        self._deaths = Counter({int(place): int(count) for place, count in deaths})

    def state(self) -> dict[str, Any]:
        """Returns the position as plain data; what is held counts as not done."""
        places = [*self._given_back]
        for group in (self._held, self._reserved):
            for taken in group.values():
                places.extend(taken)
        position = self._order.position(self._end, sorted(places))
        told = {**position, "done": self.done, "again": self._again}
        return {**told, "deaths": [*self._deaths.items()]} if self._deaths else told

    # ------------------------------------------------------------ dealing

    def deal(
        self, replica: str, batches: int, *, together: bool, idle: bool = False
    ) -> tuple[Lease, ...]:
        """Deals to a replica that asks; at least one batch if it holds none.

        Args:
          replica: one that takes part and is not lost.
          batches: how many it would like.
          together: every update needs all replicas.
          idle: it holds nothing, whatever is known here of its last contribution.
        """
        alone = idle or not self._held[replica]
        share = self._order.plan.batches_per_epoch // (2 * len(self._reserved))
        dealt: list[int] = []
        while len(dealt) < min(batches, max(1, share)):
            place = self._take(replica, alone=alone and not dealt, together=together)
            if place is None:
                break
            dealt.append(place)
            self._held[replica].append(place)
            self._holder[self._order.number(place)] = replica, place
        return tuple(self._order.leases(dealt))

    def _take(self, replica: str, *, alone: bool, together: bool) -> int | None:
        if self._deaths:
            suspects = (place for place in self._given_back if place in self._deaths)
            suspect = next(suspects, None)
            if not alone and (suspect is not None or self._holds_a_suspect(replica)):
                return None
            if suspect is not None:
                self._given_back.remove(suspect)
                return suspect
        reserved = self._reserved[replica]
        if together and not reserved:
            for name, batches in self._reserved.items():
                batches.append(self._next(name))
        return reserved.popleft() if reserved else self._next(replica)

    def _holds_a_suspect(self, replica: str) -> bool:
        return any(place in self._deaths for place in self._held[replica])

    def _next(self, replica: str) -> int:
        others = len(self._reserved) > 1
        for place in self._given_back:
            if not (others and self._late_with.get(place) == replica):
                self._given_back.remove(place)
                return place
        self._end += 1
        return self._end - 1

    # ------------------------------------------------------------ what becomes of it

    def holds(self, replica: str, number: int) -> bool:
        """Whether a replica holds the batch of this number."""
        return self._holder.get(number, ("",))[0] == replica

    def counted(self, number: int) -> int:
        """A batch is part of an update; returns its place."""
        _, place = self._let_go(number)
        self._late_with.pop(place, None)
        self._deaths.pop(place, None)
        self.done += 1
        return place

    def take_back(self, places: Iterable[int]) -> None:
        """Batches that were counted are part of no update after all."""
        for place in places:
            bisect.insort(self._given_back, place)
            self.done -= 1

    def late(self, number: int) -> None:
        """A batch was computed too late and is dealt again."""
        replica, place = self._let_go(number)
        self._late_with[place] = replica
        self._deaths.pop(place, None)  # it let its replica live
        bisect.insort(self._given_back, place)

    def lost(self, replica: str, computed: Collection[int]) -> DataSlotError | None:
        """A replica is gone; returns an error if its data ended it, and others before.

        Args:
          replica: who.
          computed: numbers of its batches whose contributions are here and may count.
        """
        for place in self._reserved.pop(replica, ()):
            bisect.insort(self._given_back, place)
        for place in list(self._held.get(replica, ())):
            number = self._order.number(place)
            if number in computed:
                continue
            self._let_go(number)
            bisect.insort(self._given_back, place)
            self._deaths[place] += 1
        for place, deaths in self._deaths.items():
            if deaths >= DEATHS:
                return self._order.plan.deadly(self._order.batch(place), deaths)
        return None

    def _let_go(self, number: int) -> tuple[str, int]:
        replica, place = self._holder.pop(number)
        self._held[replica].remove(place)
        return replica, place
