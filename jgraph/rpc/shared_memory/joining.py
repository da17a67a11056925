"""Arrays that lie in shared memory as parts, mapped one behind the other as one array.

A task that takes a variable of which others send it parts needs the whole. Nothing is
copied here: the pages of all parts are mapped once more, into one range of addresses.
What lies elsewhere, as the task's own part may, is copied to shared memory first: to
the block that others are lent of it.

It needs Linux, where ``mremap`` of no bytes maps shared memory again, and parts that
are contiguous, begin at a page, and end where one does, but the last. Elsewhere there
is no such array, and who wants one makes a copy.
"""

import mmap
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np

from jgraph.rpc.shared_memory.lending import fill
from jgraph.rpc.shared_memory.mappings import Bytes, address_of, map_again
from jgraph.rpc.shared_memory.memory_blocks import PAGE_BYTES
from jgraph.rpc.shared_memory.shared_memory import is_received
from jgraph.rpc.shared_memory.slabs import Loan, Slabs
from jgraph.rpc.wire.codec import flat_bytes

Array = np.ndarray[Any, Any]

_POPULATE_READ: Final = 22  # MADV_POPULATE_READ, of Linux 5.14


@final
@dataclass(slots=True)
class _Held:
    """What a joined array has: what came, and blocks of this task's own memory."""

    parts: Sequence[Array]
    loans: list[Loan]


@final
class Joins:
    """Joins arrays by mapping them; its arrays are read-only.

    Args:
      slabs: where what is copied lies; takes back what its arrays had.

    Example:
      >>> import asyncio
      >>> from jgraph.rpc.shared_memory.memory_blocks import Budget
      >>> slabs = Slabs(Budget(1 << 20))
      >>> parts = np.zeros((2, 1024), np.float32), np.ones((1, 1024), np.float32)
      >>> whole = asyncio.run(Joins(slabs).join(parts))
      >>> whole.shape, whole[:, 7].tolist()
      ((3, 1024), [0.0, 0.0, 1.0])
      >>> slabs.close()
    """

    def __init__(self, slabs: Slabs) -> None:
        self._slabs = slabs
        self._returned: deque[Loan] = deque()
        slabs.joins = self

    async def join(self, parts: Sequence[Array]) -> Array | None:
        """Returns arrays one after the other along their first axis.

        None where they cannot be mapped so.
        """
        self.collect()
        if not _fit(parts):
            return None
        loans: list[Loan] = []
        try:
            lie_at = [await self._address(part, loans) for part in parts]
            data = _mapped(lie_at, [part.nbytes for part in parts])
            if data is None:
                return None
            joined = _Joined(data, _Held(parts, loans), self._returned)
            loans = []
        finally:
            self._returned.extend(loans)
        rows = sum(len(part) for part in parts)
        whole = np.asarray(joined).view(parts[0].dtype)
        return whole.reshape(rows, *parts[0].shape[1:])

    async def _address(self, array: Array, loans: list[Loan]) -> int:
        """Returns where an array lies in shared memory; 0 if there is no room."""
        if is_received(array):
            return address_of(array)
        loan = self._slabs.loan_of(array)
        if loan is None:
            return 0
        loan.receivers += 1
        loans.append(loan)
        await fill(loan, flat_bytes(array))
        return address_of(loan.room)

    def collect(self) -> int:
        """Takes back what arrays that are gone had; returns the number of blocks."""
        count = len(self._returned)
        for _ in range(count):
            loan = self._returned.popleft()
            loan.receivers -= 1
            if not loan.receivers:
                self._slabs.give(loan)
        return count


def _fit(parts: Sequence[Array]) -> bool:
    """Whether arrays are such that pages of them lie one behind the other."""
    first = parts[0]
    alike = all(
        part.flags.c_contiguous
        and part.dtype == first.dtype
        and part.shape[1:] == first.shape[1:]
        for part in parts
    )
    return alike and all(part.nbytes % PAGE_BYTES == 0 for part in parts[:-1])


def _mapped(lie_at: Sequence[int], sizes: Sequence[int]) -> Bytes | None:
    """Returns shared memory of several places as one range, for reading."""
    if any(place == 0 or place % PAGE_BYTES for place in lie_at):
        return None
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:  # ends with the last array on it, and all that is mapped there
        mapped = mmap.mmap(-1, sum(sizes), flags=private, prot=mmap.PROT_READ)
    except OSError:
        return None
    data: Bytes = np.frombuffer(mapped, np.uint8)
    start = 0
    for place, size in zip(lie_at, sizes, strict=True):
        if not map_again(place, size, address_of(data) + start):
            return None
        start += size
    with suppress(OSError, ValueError):  # an older kernel does so page by page
        mapped.madvise(_POPULATE_READ)
    return data


class _Joined:
    """What all views of a joined array keep alive.

    Its end may come in any thread and in the middle of anything, so it takes no lock.
    """

    __slots__ = ("__array_interface__", "_data", "_held", "_returned")

    def __init__(self, data: Bytes, held: _Held, returned: deque[Loan]) -> None:
        self._data, self._held, self._returned = data, held, returned
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": data.shape,
            "typestr": "|u1",
            "data": (address_of(data), True),
        }

    def __del__(self) -> None:
        self._returned.extend(self._held.loans)
