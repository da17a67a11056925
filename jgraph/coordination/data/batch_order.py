"""Batch order: all batches of a plan in one endless sequence, epoch after epoch."""

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, final, overload

import numpy as np

from jgraph.coordination.data.slots import Lease, Rows, SlotPlan

_EPOCHS = 4  # whose orders are kept


@final
class Leases(Sequence[Lease]):
    """Leases of the batches at some places, made when they are looked at.

    Args:
      order: where the places are.
      places: of the batches, each once.

    Example:
      >>> from jgraph.coordination.data.slots import Part
      >>> order = BatchOrder(SlotPlan([Part("data", 6)], batch_size=1, seed=0))
      >>> Leases(order, range(0, 6, 3))
      (Lease(epoch=0, slot=0, first=0, batches=1), \
Lease(epoch=0, slot=0, first=3, batches=1))
    """

    def __init__(self, order: "BatchOrder", places: Sequence[int]) -> None:
        self.places = places
        self._order = order
        self._leases: tuple[Lease, ...] | None = None

    @property
    def leases(self) -> tuple[Lease, ...]:
        """All of them."""
        if self._leases is None:
            self._leases = tuple(self._order.leases(self.places))
        return self._leases

    def __bool__(self) -> bool:
        return bool(self.places)

    def __len__(self) -> int:
        return len(self.leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self.leases)

    @overload
    def __getitem__(self, index: int) -> Lease: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Lease, ...]: ...

    def __getitem__(self, index: int | slice) -> Lease | tuple[Lease, ...]:
        return self.leases[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self.leases == tuple(other)

    def __hash__(self) -> int:
        return hash(self.leases)

    def __repr__(self) -> str:
        return repr(self.leases)


@final
class BatchOrder:
    """Places of batches in that row, and what lies there.

    Args:
      plan: the slots.

    Example:
      >>> from jgraph.coordination.data.slots import Part
      >>> order = BatchOrder(SlotPlan([Part("data", 6)], 2, seed=0, slot_batches=2))
      >>> order.batch(4), order.place(1, 0, 1)
      (Lease(epoch=1, slot=0, first=1, batches=1), 4)
    """

    def __init__(self, plan: SlotPlan) -> None:
        self.plan = plan
        self._known: dict[int, tuple[Rows, Rows]] = {}
        # Of the last slot, wherever it comes in an epoch; all others are full.
        self._missing = len(plan) * plan.slot_batches - plan.batches_per_epoch
        self._is_mixed = plan.shuffle == "slots"

    @property
    def is_numbered(self) -> bool:
        """Whether the number of each batch is its place."""
        return not self._is_mixed

    def batch(self, place: int) -> Lease:
        """Returns the batch at a place."""
        return Lease(*self._at(place), 1)

    def _at(self, place: int) -> tuple[int, int, int]:
        """Returns the epoch, the slot, and which of its batches is at a place."""
        epoch, within = divmod(place, self.plan.batches_per_epoch)
        if not self._is_mixed:  # most often, and no array is looked at
            return epoch, *divmod(within, self.plan.slot_batches)
        slots, at = self._epoch(epoch)
        if within >= (int(at[-1]) + 1) * self.plan.slot_batches - self._missing:
            within += self._missing
        index, first = divmod(within, self.plan.slot_batches)
        return epoch, int(slots[index]), first

    def place(self, epoch: int, slot: int, index: int) -> int:
        """Returns the place of a slot's batch in an epoch."""
        return self._first(epoch, int(self._epoch(epoch)[1][slot])) + index

    def _first(self, epoch: int, index: int) -> int:
        """Returns where the slot begins that comes as this one in its epoch."""
        before = index * self.plan.slot_batches
        if index > self._epoch(epoch)[1][-1]:
            before -= self._missing
        return epoch * self.plan.batches_per_epoch + before

    def number(self, place: int) -> int:
        """Returns the number of the batch at a place, see ``SlotPlan.number``."""
        return self.plan.number(*self._at(place)) if self._is_mixed else place

    def leases(self, places: Iterable[int]) -> list[Lease]:
        """Returns batches as leases, neighbours in one slot as one."""
        leases: list[Lease] = []
        at, first = (0, 0, 0), -1  # of the lease that grows
        following = ends = -1
        for place in places:
            if place == following < ends:
                following += 1
                continue
            if first >= 0:
                leases.append(Lease(*at, following - first))
            at, first, following = self._at(place), place, place + 1
            ends = place - at[2] + self.plan.span(at[1]).batches
        if first >= 0:
            leases.append(Lease(*at, following - first))
        return leases

    # ------------------------------------------------------------ positions

    def position(self, end: int, unfinished: Sequence[int]) -> dict[str, Any]:
        """Returns where a run is, as in ``BatchBook.position``.

        Args:
          end: place of the first batch that was never dealt.
          unfinished: places before it, ascending, that are not done.
        """
        # What is dealt at the end and not done, most often all, is found by halves.
        last = end - len(unfinished)
        gaps = range(len(unfinished))
        count = bisect.bisect_left(gaps, last, key=lambda n: unfinished[n] - n)
        open_, end = unfinished[:count], last + count
        lease = self.batch(end)
        return {
            "plan": self.plan.to_dict(),
            "epoch": lease.epoch,
            "index": int(self._epoch(lease.epoch)[1][lease.slot]),
            "first": lease.first,
            "unfinished": [
                [lease.epoch, lease.slot, lease.first, lease.batches]
                for lease in self.leases(open_)
            ],
        }

    def restored(self, position: Mapping[str, Any]) -> tuple[int, list[int]]:
        """Returns (end, unfinished) of a position.

        One of another plan tells only the epoch: the first that was not begun is begun.
        """
        epoch, index, first = (int(position[k]) for k in ("epoch", "index", "first"))
        if not self.plan.is_that_of(position):
            is_begun = index > 0 or first > 0
            return (epoch + is_begun) * self.plan.batches_per_epoch, []
        unfinished = [
            self.place(of, slot, batch)
            for of, slot, at, batches in (map(int, u) for u in position["unfinished"])
            # A message may say anything; no lease is of more than its slot.
            for batch in range(self.plan.span(slot).batches)[at : at + batches]
        ]
        return self._first(epoch, index) + first, sorted(unfinished)

    def _epoch(self, epoch: int) -> tuple[Rows, Rows]:
        """Returns the slots in their order, and where in it each of them is."""
        key = epoch if self.plan.shuffle == "slots" else 0
        if key not in self._known:
            if len(self._known) == _EPOCHS:
                del self._known[next(iter(self._known))]
            slots = self.plan.order(key)
            self._known[key] = slots, np.argsort(slots)
        return self._known[key]
