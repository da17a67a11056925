"""Contributions to one update that all ps have, as columns where many come at once.

An update of thousands of replicas that came together is a few operations. What comes
one by one is kept so. Each is known by its data slot.
"""

from collections.abc import Sequence
from typing import final

import numpy as np

from jgraph.coordination.data.sync_data import MANY
from jgraph.coordination.sync.roster import Column, Step, Steps


@final
class Collected:
    """Contributions of one version.

    Example:
      >>> from jgraph.coordination.sync.roster import Roster
      >>> collected = Collected()
      >>> collected.add_together(Roster(["a", "b"]).steps([("a", 1), ("b", 4)]), (9, 8))
      >>> len(collected), collected.first(2)
      (2, ((('b', 4), ('a', 1)), [8, 9]))
    """

    def __init__(self) -> None:
        self._each: dict[int, Step] = {}
        self._together: tuple[Steps, Column] | None = None  # else nothing came so

    def __len__(self) -> int:
        return len(self._each) if self._together is None else len(self._together[1])

    @property
    def each(self) -> dict[int, Step]:
        """The steps by their slots, in the order in which they came."""
        if self._together is not None:
            steps, slots = self._together
            self._together = None
            self._each = dict(zip(slots.tolist(), steps, strict=True))
        return self._each

    def add(self, slot: int, step: Step) -> None:
        """Takes a contribution; the first for a slot is the one that counts."""
        self.each.setdefault(slot, step)

    def add_together(self, steps: Steps, slots: Sequence[int]) -> None:
        """Takes contributions of as many replicas."""
        if len(slots) >= MANY and not len(self):
            column = np.asarray(slots, np.int64)
            if _are_distinct(column):
                self._together = steps, column
                return
        for slot, step in zip(slots, steps, strict=True):
            self.add(slot, step)

    def first(self, count: int) -> tuple[Sequence[Step], Sequence[int]]:
        """Returns steps and slots of those that came first, in the order of slots."""
        if self._together is not None and count == len(self):
            return _in_order(*self._together)
        first = sorted(list(self.each.items())[:count])
        return tuple(step for _, step in first), [slot for slot, _ in first]


def _are_distinct(slots: Column) -> bool:
    from_0 = slots - slots.min()
    if int(from_0.max()) < 2 * len(slots):  # neighbours, most often
        return int(np.bincount(from_0).max()) == 1
    return len(np.unique(slots)) == len(slots)


def _in_order(steps: Steps, slots: Column) -> tuple[Steps, Sequence[int]]:
    begin, end = int(slots.min()), int(slots.max()) + 1
    if end - begin != len(slots):
        order = np.argsort(slots, kind="stable")
        return steps.at(order), slots[order].tolist()
    order = np.empty(len(slots), np.int64)  # of neighbours each says where it comes
    order[slots - begin] = np.arange(len(slots))
    return steps.at(order), range(begin, end)
