"""Shared-memory tensors between tasks of one machine: copied once, mapped by all.

The sender of an Exchange owns the memory (``SendMemory``) and announces it in its
Hello. A receiver that finds the announced nonce there (``ReceiveMemory``) takes handles
instead of bytes. A received array lies in a block that is the receiver's, or that many
read, until the last array on it is gone; then the receiver writes 0 to its slot in the
control memory, and the sender may use the block again, once all who were lent it have
done so. That needs no message.

When the stream ends, the sender reuses nothing of what it lent over it: arrays of a
receiver that lives keep their pages, and the kernel frees the rest.
"""

import logging
import os
from typing import Any, Final, final

import numpy as np

from jgraph.errors import MalformedMessageError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.shared_memory.mappings import Bytes
from jgraph.rpc.shared_memory.memory_blocks import PAGE_BYTES, Budget, Slots
from jgraph.rpc.shared_memory.memory_files import (
    MemoryFile,
    is_over,
    map_foreign,
)
from jgraph.rpc.shared_memory.slabs import Loan, Slabs

_logger = logging.getLogger(__name__)
FIRST_SLOT: Final = 64
SLOTS: Final = 4 * PAGE_BYTES - FIRST_SLOT
"""Blocks that can be lent to one receiver at once."""
MAX_SHARED_BYTES: Final = 8 << 30
ALIGNMENT: Final = 64


def default_limit() -> int:
    """Returns 8 GiB, or half of the memory that is available now if that is less."""
    return min(MAX_SHARED_BYTES, available_memory() // 2)


def available_memory() -> int:
    """Returns the bytes that this machine, or this container, can still give."""
    found = []
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            table = dict(line.split(":", 1) for line in lines)
        found.append(int(table["MemAvailable"].split()[0]) << 10)
    except (OSError, KeyError, ValueError):
        pass
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit:
            found.append(int(limit.read()))
    except (OSError, ValueError):
        pass
    return min(found, default=0)


@final
class SendMemory:
    """What one task lends to one other.

    Args:
      slabs: where it lies, with what others are lent.

    Raises:
      OSError: this process cannot make memory files.

    Example:
      >>> sender = SendMemory(Slabs(Budget(1 << 20)))
      >>> receiver = ReceiveMemory(sender.announcement())
      >>> handle, loan = sender.lend(np.full(4, 7, np.uint8))
      >>> loan.room[:] = 7
      >>> array = receiver.array(handle, 4)
      >>> array.tolist(), sender.collect()
      ([7, 7, 7, 7], 0)
      >>> del array
      >>> sender.collect()
      1
      >>> sender.close()
    """

    def __init__(self, slabs: Slabs) -> None:
        self._slabs = slabs
        self._control = MemoryFile(FIRST_SLOT + SLOTS, slabs.nonce)
        self._is_lent = self._control.data[FIRST_SLOT:]
        self._slots = Slots(SLOTS)
        self._loans: dict[int, Loan] = {}
        slabs.lenders.add(self)

    def announcement(self) -> pb.SharedMemory:
        """Returns what the receiver must know to map it."""
        return pb.SharedMemory(
            pid=os.getpid(), fd=self._control.fd, nonce=self._slabs.nonce
        )

    def lend(self, array: np.ndarray[Any, Any]) -> tuple[pb.SharedBlock, Loan] | None:
        """Returns a handle and the block for a tensor; None when all is lent.

        Who is first to be lent the block copies the tensor there.
        """
        slot = self._slots.take()
        if slot is None:
            return None
        loan = self._slabs.loan_of(array)
        if loan is None:
            self._slots.give(slot)
            return None
        loan.receivers += 1
        self._loans[slot] = loan
        self._is_lent[slot] = 1
        handle = pb.SharedBlock(
            fd=loan.fd,
            slab=loan.slab,
            offset=loan.start,
            slot=slot,
            read_only=loan.tensor != 0,
        )
        return handle, loan

    def collect(self) -> int:
        """Takes back what the receiver let go of; returns the number of blocks."""
        given_back = np.flatnonzero(self._is_lent[: self._slots.used] == 0).tolist()
        returned = [slot for slot in given_back if slot in self._loans]
        for slot in returned:
            self._slots.give(slot)
            self._end(self._loans.pop(slot))
        return len(returned)

    def _end(self, loan: Loan) -> None:
        loan.receivers -= 1
        if not loan.receivers:
            self._slabs.give(loan)

    def close(self) -> None:
        """Lets go of the memory; what is lent stays valid for the receiver."""
        self.collect()
        self._slabs.lenders.discard(self)
        if not self._slabs.lenders:
            self._slabs.close()
        else:
            for loan in self._loans.values():
                loan.is_lost = True
                self._end(loan)
        self._loans = {}
        self._control.close()


@final
class SendMemories:
    """Gives each link of a process what it lends from the memory of all.

    Args:
      most_bytes: of all together; None: see ``default_limit``.
      near: there are peers that can map it.

    Attributes:
      slabs: the memory.
      is_near: it can be had; not where the process could allocate none.
    """

    def __init__(self, most_bytes: int | None, *, near: bool) -> None:
        most = default_limit() if most_bytes is None else most_bytes
        self.slabs = Slabs(Budget(most))
        self.is_near = near

    @property
    def taken(self) -> int:
        """Bytes that are allocated."""
        return self.slabs.taken

    def new(self) -> SendMemory | None:
        """Returns the memory of a link; None: its tensors travel in the stream."""
        if not self.is_near:
            return None
        try:
            return SendMemory(self.slabs)
        except OSError as error:
            _logger.info(
                "Tensors go through streams, not through shared memory: this process "
                "cannot allocate any (%s).",
                error.strerror or error,
            )
            self.is_near = False
            return None

    async def give_back(self) -> None:
        """Gives large blocks back that nobody has borrowed."""
        await self.slabs.give_back()

    def close(self) -> None:
        """Lets go of memory that no link has any more."""
        if not self.slabs.lenders:
            self.slabs.close()


@final
class ReceiveMemory:
    """The memory of one sender, as its receiver sees it.

    Args:
      announced: what the sender's Hello says.

    Raises:
      MalformedMessageError: that memory is out of reach from here.
    """

    def __init__(self, announced: pb.SharedMemory) -> None:
        self._pid = announced.pid
        self._nonce = announced.nonce
        control = map_foreign(announced.pid, announced.fd, announced.nonce)
        self._is_lent = control[FIRST_SLOT:]
        self._slabs: dict[tuple[int, int], Bytes] = {}  # by fd and number

    def array(self, handle: pb.SharedBlock, nbytes: int) -> Bytes:
        """Returns the bytes of a block; it is given back when the last view is gone.

        They are read-only where others may be looking at them.

        Raises:
          MalformedMessageError: the handle does not name ``nbytes`` of that memory.
        """
        slab = self._slab(handle.fd, handle.slab)
        end = handle.offset + nbytes
        if handle.offset % ALIGNMENT or handle.offset < ALIGNMENT or end > slab.size:
            raise MalformedMessageError(
                f"a tensor of {nbytes:,} bytes at {handle.offset:,} of shared memory "
                f"{handle.fd}, which has {slab.size:,} bytes"
            )
        if handle.slot >= self._is_lent.size:
            raise MalformedMessageError(
                f"slot {handle.slot:,} of shared memory; there are "
                f"{self._is_lent.size:,}"
            )
        return np.asarray(_Lease(slab, handle, nbytes, self._is_lent))

    def _slab(self, fd: int, number: int) -> Bytes:
        slab = self._slabs.get((fd, number))
        if slab is None:
            slab = map_foreign(self._pid, fd, self._nonce, number)
            # Of what is over nothing comes any more, and it is memory of this machine.
            known = self._slabs.items()
            self._slabs = {key: data for key, data in known if not is_over(data)}
            self._slabs[fd, number] = slab
        return slab


def is_received(array: np.ndarray[Any, Any]) -> bool:
    """Whether an array lies in shared memory that another task has lent."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, _Lease)


class _Lease:
    """What all views of a block keep alive; its end gives the block back.

    That may happen in any thread and in the middle of anything (garbage collection), so
    it writes one byte and takes no lock.
    """

    __slots__ = ("__array_interface__", "_is_lent", "_slab", "_slot")

    def __init__(
        self, slab: Bytes, handle: pb.SharedBlock, nbytes: int, is_lent: Bytes
    ) -> None:
        self._slab = slab
        self._is_lent = is_lent
        self._slot = handle.slot
        address = slab.__array_interface__["data"][0] + handle.offset
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, handle.read_only),
        }

    def __del__(self) -> None:
        self._is_lent[self._slot] = 0
