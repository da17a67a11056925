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

from array import array
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias, final

import numpy as np

from jgraph.coordination.data.batch_book import BatchBook
from jgraph.coordination.data.batch_order import Leases
from jgraph.coordination.data.rounds_ahead import RoundsAhead
from jgraph.coordination.data.shares import Shares
from jgraph.coordination.data.slots import Lease, Rows, SlotPlan
from jgraph.errors import DataSlotError

Places: TypeAlias = tuple[int, ...]
"""Those of the batches of one step."""

MANY: Final = 64
"""Of fewer it costs less to keep what each holds, or contributed, one by one."""

_ROUNDS: Final = 16


def rounds_for(replicas: int) -> int:
    """Returns for how many updates a run deals batches to a replica at once.

    Of many it is more, so that fewer ask for each update; of few, less is to be
    dealt again when one of them is lost.

    Example:
      >>> rounds_for(4), rounds_for(1_000)
      (16, 32)
    """
    return _ROUNDS if replicas < MANY else 2 * _ROUNDS


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
      many: of so many replicas, what they hold of rounds is kept as rows.

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
        many: int = MANY,
    ) -> None:
        self._book = BatchBook(plan, position)
        self._shares, self._own, self._rounds = shares, own, rounds
        self.replicas = tuple(replicas)
        """Who takes part; the number of each is its place here."""
        self._numbers = {name: number for number, name in enumerate(self.replicas)}
        # Steps that replicas will get when they ask, before those of rows.
        self._reserved: dict[str, deque[Places]] = {n: deque() for n in self.replicas}
        self._many = many
        self._rows = self._rounds_of(self._numbers.values())
        # What replicas hold that is not known of rows: by the number of a step's first
        # batch who does, and the places, if these are not just that number.
        self._holder: dict[int, int] = {}
        self._places: dict[int, Places] = {}
        self._held = array("q", bytes(8 * len(self.replicas)))  # steps of each
        self._late_with: dict[int, int] = {}

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
    ) -> Sequence[Lease]:
        """Deals to a replica that asks; at least one batch if it holds none.

        Args:
          replica: one that takes part and is not lost.
          batches: how many it would like; with shares it gets those of one step.
          together: every update needs all replicas; it gets those of many.
          idle: it holds nothing, whatever is known here of its last contribution.
        """
        steps, number = self._steps(batches, together=together), self._numbers[replica]
        if together and not self._reserved[replica] and self._is_even:
            return self._deal_row(number, steps)
        alone = idle or not self._held[number]
        batches_dealt: list[int] = []
        for _ in range(steps):
            places = self._take(
                replica, alone=alone and not batches_dealt, together=together
            )
            if not places:
                break
            batches_dealt += places
            self._hold(number, places)
        return Leases(self._book.order, batches_dealt)

    def _deal_row(self, replica: int, steps: int) -> Leases:
        """Deals to a replica what it gets of the next rounds."""
        order, rows = self._book.order, self._rows
        row = rows.take(replica, steps, self._book)
        self._held[replica] += steps
        if rows.knows and not rows.apart:  # most often, of many
            return Leases(order, row)
        numbers = row if order.is_numbered else [*map(order.number, row)]
        if not order.is_numbered:
            each = zip(numbers, row, strict=True)
            self._places.update((first, (place,)) for first, place in each)
        if unknown := rows.unknown(replica, steps):
            self._holder.update(dict.fromkeys(numbers[:unknown], replica))
        return Leases(order, row)

    def _rounds_of(self, replicas: Collection[int]) -> RoundsAhead:
        knows = len(replicas) >= self._many and self._book.order.is_numbered
        return RoundsAhead(replicas, knows=knows)

    @property
    def _is_even(self) -> bool:
        """Whether a round is of neighbours that were never dealt, one for each."""
        book = self._book
        return self._shares is None and not book.given_back and not book.deaths

    def _hold(self, replica: int, places: Places) -> None:
        first = self._book.order.number(places[0])
        if places != (first,):
            self._places[first] = places
        self._holder[first] = replica
        self._held[replica] += 1

    def _steps(self, batches: int, *, together: bool) -> int:
        """Returns for how many steps to deal to one who would like so many."""
        if self._shares is not None:
            return 1
        per_epoch = self._book.order.plan.batches_per_epoch
        most = per_epoch // (2 * len(self._reserved)) or 1
        return min(most, max(batches, self._rounds if together else 1))

    def learn(self, replica: str, piece_s: float) -> None:
        """Learns how long a replica takes for a batch; with shares these follow it."""
        if self._shares is not None:
            self._shares.learn(replica, piece_s)

    def _take(self, replica: str, *, alone: bool, together: bool) -> Places:
        """Deals the batches of one step; none: not now."""
        if deaths := self._book.deaths:
            suspects = (place for place in self._book.given_back if place in deaths)
            suspect = next(suspects, None)
            if suspect is not None:
                return (self._book.take(suspect),) if alone else ()
            if not alone and self._holds_one_of(deaths, replica):
                return ()
        reserved = self._reserved[replica]
        if not reserved:
            self._reserve_rows()
        if together and not reserved:
            self._reserve()
        return reserved.popleft() if reserved else self._next(replica, 1)

    def _holds_one_of(self, suspects: Iterable[int], replica: str) -> bool:
        """Whether a replica holds one of these, each of which is dealt as one step."""
        numbers = map(self._book.order.number, suspects)
        return any(self.holds(replica, number) for number in numbers)

    def _reserve_rows(self) -> None:
        """Makes of what is left of rows steps that are reserved."""
        self._take_apart()
        for number, places in self._rows.left():
            reserved = self._reserved[self.replicas[number]]
            reserved.extend((place,) for place in places)

    def _reserve(self) -> None:
        """Takes the batches of the next update for all replicas."""
        each: Mapping[str, int] = dict.fromkeys(self._reserved, 1)
        if self._shares is not None:
            each = self._shares.next(self._reserved)
        for name, count in each.items():
            self._reserved[name].append(self._next(name, count))

    def _next(self, replica: str, count: int) -> Places:
        return tuple(self._next_one(replica) for _ in range(count))

    def _next_one(self, replica: str) -> int:
        others, mine = len(self._reserved) > 1, self._numbers[replica]
        for place in self._book.given_back:
            if not (others and self._late_with.get(place) == mine):
                return self._book.take(place)
        return self._book.take(self._book.end)

    # ------------------------------------------------------------ what becomes of it

    def holds(self, replica: str, number: int) -> bool:
        """Whether a replica holds the batch of this number."""
        self._take_apart()
        return self._holder.get(number, -1) == self._numbers.get(replica)

    def all_hold(self, replicas: Rows, numbers: Sequence[int]) -> bool:
        """Whether each of these, by its place in ``replicas``, holds its batch."""
        if self._rows.knows:
            if self._rows.hold(replicas, np.asarray(numbers, np.int64)):
                return True
            self._take_apart()
        holders: list[int | None] = replicas.tolist()
        return list(map(self._holder.get, numbers)) == holders

    def _take_apart(self) -> None:
        """Keeps all that is held of rows one by one."""
        if self._rows.knows:
            self._holder.update(self._rows.take_apart())

    def is_idle(self, replica: str) -> bool:
        """Whether a replica holds nothing."""
        number = self._numbers.get(replica)
        return number is None or self._held[number] == 0

    def held(self, replica: str) -> Sequence[Lease]:
        """Returns what a replica holds."""
        steps = (self._places.get(n) or (n,) for n in self._numbers_of(replica))
        return Leases(self._book.order, [place for step in steps for place in step])

    def _numbers_of(self, replica: str) -> list[int]:
        """Returns the numbers of the steps that a replica holds."""
        if self.is_idle(replica):
            return []
        self._take_apart()
        mine = self._numbers[replica]
        return [number for number, who in self._holder.items() if who == mine]

    def release(self, replica: str) -> None:
        """A replica has forgotten what it held; it is dealt again."""
        self._give_back(self._numbers_of(replica))

    def _give_back(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            for place in self._let_go(number)[1]:
                self._book.give_back(place)

    def counted(self, numbers: Sequence[int]) -> Sequence[int]:
        """The batches of these steps are part of an update; returns their places."""
        if self._rows.count(numbers):  # most often, where there are thousands
            np.frombuffer(self._held, np.int64)[self._rows.members] -= 1
            places = numbers
        else:
            places = self._each_counted(numbers)
        if self._late_with:
            for place in places:
                self._late_with.pop(place, None)
        self._book.finish(places)
        return places

    def _each_counted(self, numbers: Sequence[int]) -> Sequence[int]:
        self._take_apart()
        if self._places:
            return [p for n in numbers for p in self._let_go(n)[1]]
        held = self._held
        for replica in map(self._holder.pop, numbers):
            held[replica] -= 1
        return numbers

    def take_back(self, places: Iterable[int]) -> None:
        """Batches that were counted are part of no update after all."""
        for place in places:
            self._book.undo(place)

    def late(self, number: int) -> None:
        """The batches of a step were computed too late and are dealt again."""
        self._take_apart()
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
        self._reserve_rows()
        for step in self._reserved.pop(replica, ()):
            for place in step:
                self._book.give_back(place)
        self._rows = self._rounds_of([self._numbers[name] for name in self._reserved])
        lost = [n for n in self._numbers_of(replica) if n not in computed]
        if self._own:
            self._give_back(lost)
            return None
        return self._book.lose([p for number in lost for p in self._let_go(number)[1]])

    def _let_go(self, number: int) -> tuple[int, Places]:
        replica = self._holder.pop(number)
        self._held[replica] -= 1
        return replica, self._places.pop(number, None) or (number,)
