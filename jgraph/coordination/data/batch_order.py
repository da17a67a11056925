"""Batch order: all batches of a plan in one endless sequence, epoch after epoch."""

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

from jgraph.coordination.data.slots import Lease, SlotPlan

_EPOCHS = 4  # whose orders are kept


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
        self._known: dict[int, tuple[list[int], list[int], dict[int, int]]] = {}

    def batch(self, place: int) -> Lease:
        """Returns the batch at a place."""
        epoch, within = divmod(place, self.plan.batches_per_epoch)
        slots, firsts, _ = self._epoch(epoch)
        index = bisect.bisect_right(firsts, within) - 1
        return Lease(epoch, slots[index], within - firsts[index], 1)

    def place(self, epoch: int, slot: int, index: int) -> int:
        """Returns the place of a slot's batch in an epoch."""
        _, firsts, at = self._epoch(epoch)
        return epoch * self.plan.batches_per_epoch + firsts[at[slot]] + index

    def number(self, place: int) -> int:
        """Returns the number of the batch at a place, see ``SlotPlan.number``."""
        lease = self.batch(place)
        return self.plan.number(lease.epoch, lease.slot, lease.first)

    def leases(self, places: Iterable[int]) -> list[Lease]:
        """Returns batches as leases, neighbours in one slot as one."""
        leases: list[Lease] = []
        for lease in map(self.batch, places):
            last = leases[-1] if leases else None
            follows = last is not None and lease == Lease(
                last.epoch, last.slot, last.first + last.batches, 1
            )
            if last is not None and follows:
                leases[-1] = Lease(last.epoch, last.slot, last.first, last.batches + 1)
            else:
                leases.append(lease)
        return leases

    # ------------------------------------------------------------ positions

    def position(self, end: int, unfinished: Sequence[int]) -> dict[str, Any]:
        """Returns where a run is, as in ``Dispatch.state``.

        Args:
          end: place of the first batch that was never dealt.
          unfinished: places before it, ascending, that are not done.
        """
        open_ = list(unfinished)
        while open_ and open_[-1] == end - 1:
            end = open_.pop()
        lease = self.batch(end)
        return {
            "plan": self.plan.to_dict(),
            "epoch": lease.epoch,
            "index": self._epoch(lease.epoch)[2][lease.slot],
            "first": lease.first,
            "unfinished": [
                [lease.epoch, lease.slot, lease.first, lease.batches]
                for lease in self.leases(open_)
            ],
        }

    def restored(self, position: Mapping[str, Any]) -> tuple[int, list[int]]:
        """Returns (end, unfinished) of a position.

        One of another plan tells only the epoch: the next one is begun.
        """
        epoch = int(position["epoch"])
        if not self.plan.is_that_of(position):
            return (epoch + 1) * self.plan.batches_per_epoch, []
        firsts = self._epoch(epoch)[1]
        within = firsts[int(position["index"])] + int(position["first"])
        unfinished = [
            self.place(int(epoch), int(slot), int(first) + batch)
            for epoch, slot, first, batches in position["unfinished"]
            for batch in range(int(batches))
        ]
        return epoch * self.plan.batches_per_epoch + within, sorted(unfinished)

    def _epoch(self, epoch: int) -> tuple[list[int], list[int], dict[int, int]]:
        """Returns slots in order, the first batch of each, and where each slot is."""
        key = epoch if self.plan.shuffle == "slots" else 0
        if key not in self._known:
            if len(self._known) == _EPOCHS:
                del self._known[next(iter(self._known))]
            slots = [int(slot) for slot in self.plan.order(key)]
            sizes = (self.plan.span(slot).batches for slot in slots)
            at = {slot: index for index, slot in enumerate(slots)}
            self._known[key] = slots, [0, *itertools.accumulate(sizes)], at
        return self._known[key]
