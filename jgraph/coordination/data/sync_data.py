"""Data ledger of synchronous training: batches dealt, given back and counted.

A batch is not dealt yet, held by one replica, given back, or counted. It counts when
the update that its contribution is part of is decided, and never twice. A contribution
that comes too late gives its batch back, and so does a replica that is lost; what was
given back is dealt before anything new, to another replica if there is one. So each
batch of each epoch counts exactly once.

As long as every update needs all replicas, batches are dealt in rounds, one for each
replica in turn. An update is then of neighbours in the order of the epoch, whoever asks
first: that of one process with batches as large as those of all replicas together. As
none can get ahead of the others, whoever asks is dealt those of many rounds. With
backup workers a batch goes to who asks, and a slow replica gets fewer.

With ``shares`` a replica computes several neighbours in one step, as many as its share
of the update is: they are dealt, counted and given back together.

What a lost replica held is suspected of ending it and dealt alone, one batch at a time,
so that a third death has one cause only, whose name the run then ends with. Where each
replica has data of its own, a number says nothing of what it trains on, and nothing is
suspected.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, TypeAlias, final

from jgraph.coordination.data.batch_book import BatchBook
from jgraph.coordination.data.shares import Shares
from jgraph.coordination.data.slots import Lease, SlotPlan
from jgraph.errors import DataSlotError

Places: TypeAlias = tuple[int, ...]
"""Those of the batches of one step."""

ROUNDS: Final = 16
"""For so many updates a run deals batches to a replica at once."""


@final
class SyncData:
    """The ledger of the batches of one run.

    Batches are known by their numbers, see ``SlotPlan.number``; those of one step by
    that of the first.

    Args:
      plan: the slots.
      replicas: who takes part, in the order in which a round is dealt.
      position: where to begin, see ``BatchBook``.
      shares: how many batches a step of each replica is of; None: of one.
      own: each replica has data of its own.
      rounds: for how many updates a replica is dealt at once, where each needs all.

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
        shares: Shares | None = None,
        *,
        own: bool = False,
        rounds: int = 1,
    ) -> None:
        self._book = BatchBook(plan, position)
        self._shares, self._own, self._rounds = shares, own, rounds
        # Of a round: the steps that replicas will get when they ask.
        self._reserved: dict[str, deque[Places]] = {name: deque() for name in replicas}
        # What replicas hold: the places of each step, by the number of the first.
        self._held: dict[str, dict[int, Places]] = {name: {} for name in self._reserved}
        self._holder: dict[int, str] = {}  # of each, however many replicas there are
        self._late_with: dict[int, str] = {}

    @property
    def done(self) -> int:
        """Batches that count, over all runs."""
        return self._book.done

    def state(self) -> dict[str, Any]:
        """Returns the position as plain data; what is held counts as not done."""
        return self._book.position()

    # ------------------------------------------------------------ dealing

    def deal(
        self, replica: str, batches: int, *, together: bool, idle: bool = False
    ) -> tuple[Lease, ...]:
        """Deals to a replica that asks; at least one batch if it holds none.

        Args:
          replica: one that takes part and is not lost.
          batches: how many it would like; with shares it gets those of one step.
          together: every update needs all replicas; it gets those of many.
          idle: it holds nothing, whatever is known here of its last contribution.
        """
        order, held = self._book.order, self._held[replica]
        alone = idle or not held
        batches_dealt: list[int] = []
        for _ in range(self._steps(batches, together=together)):
            places = self._take(
                replica, alone=alone and not batches_dealt, together=together
            )
            if not places:
                break
            batches_dealt += places
            number = order.number(places[0])
            held[number], self._holder[number] = places, replica
        return tuple(order.leases(batches_dealt))

    def _steps(self, batches: int, *, together: bool) -> int:
        """Returns for how many steps to deal to one who would like so many."""
        if self._shares is not None:
            return 1
        per_epoch = self._book.order.plan.batches_per_epoch
        share = per_epoch // (2 * len(self._reserved))
        return min(max(batches, self._rounds if together else 1), max(1, share))

    def learn(self, replica: str, piece_s: float) -> None:
        """Learns how long a replica takes for a batch; with shares these follow it."""
        if self._shares is not None:
            self._shares.learn(replica, piece_s)

    def _take(self, replica: str, *, alone: bool, together: bool) -> Places:
        """Deals the batches of one step; none: not now."""
        if deaths := self._book.deaths:
            suspects = (place for place in self._book.given_back if place in deaths)
            suspect = next(suspects, None)
            holds = (place for step in self._held[replica].values() for place in step)
            has_one = any(place in deaths for place in holds)
            if not alone and (suspect is not None or has_one):
                return ()
            if suspect is not None:
                return (self._book.take(suspect),)
        reserved = self._reserved[replica]
        if together and not reserved:
            self._reserve()
        return reserved.popleft() if reserved else self._next(replica, 1)

    def _reserve(self) -> None:
        """Takes the batches of the next update for all replicas."""
        if self._shares is None and not self._book.given_back:
            steps = self._reserved.values()
            new = self._book.take_new(len(steps))
            for step, place in zip(steps, new, strict=True):
                step.append((place,))
            return
        each: Mapping[str, int] = dict.fromkeys(self._reserved, 1)
        if self._shares is not None:
            each = self._shares.next(self._reserved)
        for name, count in each.items():
            self._reserved[name].append(self._next(name, count))

    def _next(self, replica: str, count: int) -> Places:
        return tuple(self._next_one(replica) for _ in range(count))

    def _next_one(self, replica: str) -> int:
        others = len(self._reserved) > 1
        for place in self._book.given_back:
            if not (others and self._late_with.get(place) == replica):
                return self._book.take(place)
        return self._book.take(self._book.end)

    # ------------------------------------------------------------ what becomes of it

    def holds(self, replica: str, number: int) -> bool:
        """Whether a replica holds the batch of this number."""
        return self._holder.get(number) == replica

    def held(self, replica: str) -> tuple[Lease, ...]:
        """Returns what a replica holds."""
        held = self._held.get(replica, {})
        return tuple(self._book.order.leases(p for each in held.values() for p in each))

    def release(self, replica: str) -> None:
        """A replica has forgotten what it held; it is dealt again."""
        self._give_back([*self._held.get(replica, ())])

    def _give_back(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            for place in self._let_go(number)[1]:
                self._book.give_back(place)

    def counted(self, *numbers: int) -> Places:
        """The batches of these steps are part of an update; returns their places."""
        let_go, held, every = self._holder.pop, self._held, list[int]()
        for number in numbers:
            every += held[let_go(number)].pop(number)
        places = tuple(every)
        if self._late_with:
            for place in places:
                self._late_with.pop(place, None)
        self._book.finish(places)
        return places

    def take_back(self, places: Iterable[int]) -> None:
        """Batches that were counted are part of no update after all."""
        for place in places:
            self._book.undo(place)

    def late(self, number: int) -> None:
        """The batches of a step were computed too late and are dealt again."""
        replica, places = self._let_go(number)
        for place in places:
            self._late_with[place] = replica
            self._book.deaths.pop(place, None)  # it let its replica live
            self._book.give_back(place)

    def lost(self, replica: str, computed: Collection[int]) -> DataSlotError | None:
        """A replica is gone; returns an error if its data ended it, and others before.

        Args:
          replica: who.
          computed: numbers of its steps whose contributions are here and may count.
        """
        for step in self._reserved.pop(replica, ()):
            for place in step:
                self._book.give_back(place)
        held = self._held.get(replica, {})
        lost = [number for number in held if number not in computed]
        if self._own:
            self._give_back(lost)
            return None
        return self._book.lose([p for number in lost for p in self._let_go(number)[1]])

    def _let_go(self, number: int) -> tuple[str, Places]:
        replica = self._holder.pop(number)
        return replica, self._held[replica].pop(number)
