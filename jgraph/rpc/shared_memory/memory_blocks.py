"""Allocator of shared-memory blocks: pure bookkeeping, no memory in sight.

Memory comes in slabs. A block is a piece of a slab that is lent to the receiver of one
tensor, together with a slot: the number under which the receiver gives it back. Blocks
are lent as far to the front as they fit, so that the same warm pages serve again.
"""

import bisect
import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, final

PAGE_BYTES: Final = 4096
"""Blocks begin and end at pages: no two receivers share one."""


@final
@dataclass(frozen=True, slots=True)
class Block:
    """A piece of slab number ``slab``, lent under ``slot``; sizes in bytes."""

    slab: int
    offset: int
    nbytes: int
    slot: int


class Budget:
    """Bytes that several pools may take together.

    Args:
      limit: the most, in bytes.

    Example:
      >>> budget = Budget(100)
      >>> budget.take(70), budget.take(70), budget.remaining
      (True, False, 30)
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0

    @property
    def remaining(self) -> int:
        """Bytes that can still be taken."""
        return self.limit - self.taken

    def take(self, nbytes: int) -> bool:
        """Takes ``nbytes`` unless that is over the limit; returns whether it did."""
        if nbytes > self.remaining:
            return False
        self.taken += nbytes
        return True

    def give(self, nbytes: int) -> None:
        """Gives back what was taken."""
        self.taken -= nbytes


class FreeList:
    """The free ranges of ``size`` bytes.

    Example:
      >>> free = FreeList(100)
      >>> free.take(60), free.take(60), free.take(40)
      (0, None, 60)
      >>> free.give(0, 60)
      >>> free.take(10)
      0
    """

    def __init__(self, size: int) -> None:
        self._starts = [0]
        self._sizes = [size]

    def take(self, nbytes: int) -> int | None:
        """Returns the offset of the best fitting range, or None if there is none."""
        fits = [(size, at) for at, size in enumerate(self._sizes) if size >= nbytes]
        if not fits:
            return None
        size, at = min(fits)
        start = self._starts[at]
        if size == nbytes:
            del self._starts[at], self._sizes[at]
        else:
            self._starts[at], self._sizes[at] = start + nbytes, size - nbytes
        return start

    def take_large(self, least: int) -> list[tuple[int, int]]:
        """Takes all ranges of at least so many bytes; returns (offset, bytes) of each.

        Example:
          >>> FreeList(100).take_large(60)
          [(0, 100)]
        """
        found = list(zip(self._starts, self._sizes, strict=True))
        small = [(start, size) for start, size in found if size < least]
        self._starts = [start for start, _ in small]
        self._sizes = [size for _, size in small]
        return [(start, size) for start, size in found if size >= least]

    def give(self, start: int, nbytes: int) -> None:
        """Makes a range free again that was taken; joins it with its neighbours."""
        at = bisect.bisect(self._starts, start)
        if at < len(self._starts) and start + nbytes == self._starts[at]:
            nbytes += self._sizes[at]
            del self._starts[at], self._sizes[at]
        if at and self._starts[at - 1] + self._sizes[at - 1] == start:
            self._sizes[at - 1] += nbytes
        else:
            self._starts.insert(at, start)
            self._sizes.insert(at, nbytes)

    @property
    def nbytes(self) -> int:
        """Free bytes."""
        return sum(self._sizes)


class BlockPool:
    """Lends blocks of slabs; the owner adds slabs, within a budget.

    Args:
      slots: how many blocks can be lent at once.
      budget: shared with other pools.
      slab_bytes: size of a slab, unless a larger one is needed.

    Example:
      >>> pool = BlockPool(slots=8, budget=Budget(1 << 20), slab_bytes=1 << 16)
      >>> pool.take(5000) is None  # no slab yet
      True
      >>> pool.add_slab(pool.slab_for(5000))
      >>> pool.take(5000)
      Block(slab=0, offset=0, nbytes=8192, slot=0)
      >>> pool.release([0])
      1
    """

    def __init__(self, slots: int, budget: Budget, slab_bytes: int) -> None:
        self._budget = budget
        self._slab_bytes = slab_bytes
        self._slabs: list[FreeList] = []
        # Those that were lent before; few ever are, and a task has a pool per peer.
        self._free_slots: list[int] = []
        self._new_slots = iter(range(slots))
        self._next_slot = next(self._new_slots, None)
        self._lent: dict[int, Block] = {}
        self.slab_bytes_taken = 0

    @property
    def lent(self) -> dict[int, Block]:
        """The blocks that are out, by slot."""
        return dict(self._lent)

    def take(self, nbytes: int) -> Block | None:
        """Lends a block of at least ``nbytes``; None when nothing fits."""
        if not self._has_slot:
            return None
        nbytes = _whole_pages(nbytes)
        for slab, free in enumerate(self._slabs):
            offset = free.take(nbytes)
            if offset is not None:
                slot = self._free_slot()
                block = self._lent[slot] = Block(slab, offset, nbytes, slot)
                return block
        return None

    @property
    def _has_slot(self) -> bool:
        return bool(self._free_slots) or self._next_slot is not None

    def _free_slot(self) -> int:
        """Returns the least number that is free."""
        if self._free_slots:
            return heapq.heappop(self._free_slots)
        slot, self._next_slot = self._next_slot, next(self._new_slots, None)
        assert slot is not None  # there is one
        return slot

    def release(self, slots: Iterable[int]) -> int:
        """Takes blocks back; slots that are not lent count for nothing.

        Returns:
          How many blocks came back.
        """
        returned = 0
        for slot in slots:
            block = self._lent.pop(slot, None)
            if block is not None:
                self._slabs[block.slab].give(block.offset, block.nbytes)
                heapq.heappush(self._free_slots, slot)
                returned += 1
        return returned

    def take_large(self, least: int) -> list[Block]:
        """Takes all free ranges of at least so many bytes, under no slot."""
        return [
            Block(slab, offset, nbytes, slot=-1)
            for slab, free in enumerate(self._slabs)
            for offset, nbytes in free.take_large(least)
        ]

    def give_large(self, blocks: Iterable[Block]) -> None:
        """Makes ranges free again that ``take_large`` gave."""
        for block in blocks if self._slabs else ():  # else closed meanwhile
            self._slabs[block.slab].give(block.offset, block.nbytes)

    def slab_for(self, nbytes: int) -> int:
        """Returns the size of a new slab that fits ``nbytes``; 0: not allowed."""
        nbytes = _whole_pages(nbytes)
        if not self._has_slot or nbytes > self._budget.remaining:
            return 0
        return max(nbytes, min(self._slab_bytes, _floor_pages(self._budget.remaining)))

    def add_slab(self, size: int) -> None:
        """Adds a slab of a size that ``slab_for`` allowed.

        Raises:
          ValueError: it is over the budget.
        """
        if not self._budget.take(size):
            raise ValueError(f"a slab of {size} bytes is over the budget")
        self._slabs.append(FreeList(size))
        self.slab_bytes_taken += size

    def close(self) -> None:
        """Gives the budget back; nothing can be lent any more."""
        self._budget.give(self.slab_bytes_taken)
        self._slabs, self._lent, self._free_slots = [], {}, []
        self._next_slot = None
        self.slab_bytes_taken = 0


def _whole_pages(nbytes: int) -> int:
    return max(-(-nbytes // PAGE_BYTES), 1) * PAGE_BYTES


def _floor_pages(nbytes: int) -> int:
    return nbytes // PAGE_BYTES * PAGE_BYTES
