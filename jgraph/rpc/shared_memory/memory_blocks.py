"""Allocator of shared-memory blocks: pure bookkeeping, no memory in sight.

Memory comes in slabs. A block is a piece of a slab that is lent to the receivers of one
tensor, and a slot is the number under which one of them gives it back. Blocks are lent
as far to the front as they fit, so that the same warm pages serve again.
"""

import bisect
import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, final

_SHARE: Final = 4
"""A new slab has so much of what there is, if that is more than the least."""
PAGE_BYTES: Final = 4096
"""Blocks begin and end at pages: no two receivers share one."""


@final
@dataclass(frozen=True, slots=True)
class Block:
    """A piece of slab number ``slab``; sizes in bytes."""

    slab: int
    offset: int
    nbytes: int


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


@final
class Slots:
    """Numbers from 0 on, the least free one first.

    Args:
      count: how many there are.

    Example:
      >>> slots = Slots(2)
      >>> slots.take(), slots.take(), slots.take()
      (0, 1, None)
      >>> slots.give(0)
      >>> slots.take()
      0
    """

    def __init__(self, count: int) -> None:
        # Those that were taken before; few ever are, and a task has many slots.
        self._free: list[int] = []
        self._count = count
        self.used = 0

    def take(self) -> int | None:
        """Returns the least number that is free; None if none is."""
        if self._free:
            return heapq.heappop(self._free)
        if self.used == self._count:
            return None
        self.used += 1
        return self.used - 1

    def give(self, slot: int) -> None:
        """Makes a number free again that was taken."""
        heapq.heappush(self._free, slot)


class BlockPool:
    """Lends blocks of slabs; the owner adds slabs, within a budget.

    A slab lends nothing any more once a block of it is lost, and is over when the
    others are back: who has the lost one may look at it for ever.

    Args:
      budget: shared with other pools.
      slab_bytes: size of a slab, unless a larger one is needed, or there is much.

    Example:
      >>> pool = BlockPool(budget=Budget(1 << 20), slab_bytes=1 << 16)
      >>> pool.take(5000) is None  # no slab yet
      True
      >>> pool.add_slab(pool.slab_for(5000))
      0
      >>> block, other = pool.take(5000), pool.take(1)
      >>> block
      Block(slab=0, offset=0, nbytes=8192)
      >>> pool.lose(block), pool.take(1)
      (False, None)
      >>> pool.release(other)  # the slab is over
      True
    """

    def __init__(self, budget: Budget, slab_bytes: int) -> None:
        self._budget = budget
        self._slab_bytes = slab_bytes
        self._slabs: dict[int, FreeList] = {}
        self._sizes: dict[int, int] = {}
        self._lent: dict[int, set[Block]] = {}
        self._next_slab = 0

    @property
    def lent(self) -> set[Block]:
        """The blocks that are out, and not lost."""
        return set[Block]().union(*self._lent.values())

    @property
    def slab_bytes_taken(self) -> int:
        """Bytes of all slabs."""
        return sum(self._sizes.values())

    def take(self, nbytes: int) -> Block | None:
        """Lends a block of at least ``nbytes``; None when nothing fits."""
        nbytes = _whole_pages(nbytes)
        for slab, free in self._slabs.items():
            offset = free.take(nbytes)
            if offset is not None:
                block = Block(slab, offset, nbytes)
                self._lent[slab].add(block)
                return block
        return None

    def release(self, block: Block) -> bool:
        """Takes a block back; returns whether its slab is over."""
        self._lent[block.slab].remove(block)
        if block.slab in self._slabs:
            self._slabs[block.slab].give(block.offset, block.nbytes)
        return self._is_over(block.slab)

    def lose(self, block: Block) -> bool:
        """Gives a block up; returns whether its slab is over."""
        self._lent[block.slab].remove(block)
        self._slabs.pop(block.slab, None)
        return self._is_over(block.slab)

    def _is_over(self, slab: int) -> bool:
        if slab in self._slabs or self._lent[slab]:
            return False
        self._budget.give(self._sizes.pop(slab))
        del self._lent[slab]
        return True

    def take_large(self, least: int) -> list[Block]:
        """Takes all free ranges of at least so many bytes; they count as not lent."""
        return [
            Block(slab, offset, nbytes)
            for slab, free in self._slabs.items()
            for offset, nbytes in free.take_large(least)
        ]

    def give_large(self, blocks: Iterable[Block]) -> None:
        """Makes ranges free again that ``take_large`` gave."""
        for block in blocks:
            if block.slab in self._slabs:  # else it is over, or will be
                self._slabs[block.slab].give(block.offset, block.nbytes)

    def slab_for(self, nbytes: int) -> int:
        """Returns the size of a new slab that fits ``nbytes``; 0: not allowed.

        The more there is, the larger: each slab takes files of its owner and of all who
        are lent of it, and of these a process may have a thousand.
        """
        nbytes = _whole_pages(nbytes)
        if nbytes > self._budget.remaining:
            return 0
        size = max(self._slab_bytes, self.slab_bytes_taken // _SHARE)
        return max(nbytes, _floor_pages(min(size, self._budget.remaining)))

    def add_slab(self, size: int) -> int:
        """Adds a slab of a size that ``slab_for`` allowed; returns its number.

        Raises:
          ValueError: it is over the budget.
        """
        if not self._budget.take(size):
            raise ValueError(f"a slab of {size} bytes is over the budget")
        slab, self._next_slab = self._next_slab, self._next_slab + 1
        self._slabs[slab], self._sizes[slab] = FreeList(size), size
        self._lent[slab] = set()
        return slab

    def close(self) -> None:
        """Gives the budget back, and forgets all slabs."""
        self._budget.give(self.slab_bytes_taken)
        self._slabs, self._sizes, self._lent = {}, {}, {}


def _whole_pages(nbytes: int) -> int:
    return max(-(-nbytes // PAGE_BYTES), 1) * PAGE_BYTES


def _floor_pages(nbytes: int) -> int:
    return nbytes // PAGE_BYTES * PAGE_BYTES
