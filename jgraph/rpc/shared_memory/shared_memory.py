"""Shared-memory tensors between tasks of one machine: copied once, mapped by both.

The sender of an Exchange owns the memory (``SendMemory``) and announces it in its
Hello. A receiver that finds the announced nonce there (``ReceiveMemory``) takes handles
instead of bytes. A received array lies in a block that is the receiver's alone until
the last array on it is gone; then the receiver writes 0 to the slot of the block in the
control memory, and the sender may lend the block again. That needs no message.

When the stream ends, the sender lets go of everything and reuses nothing: arrays of a
receiver that lives keep their pages, and the kernel frees the rest.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Sequence
from typing import Any, Final, final
from weakref import WeakSet

import numpy as np

from jgraph.errors import MalformedMessageError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.shared_memory.memory_blocks import (
    PAGE_BYTES,
    Block,
    BlockPool,
    Budget,
)
from jgraph.rpc.shared_memory.memory_files import (
    NONCE_BYTES,
    Bytes,
    MemoryFile,
    map_foreign,
)

_logger = logging.getLogger(__name__)
FIRST_SLOT: Final = 64
SLOTS: Final = 4 * PAGE_BYTES - FIRST_SLOT
"""Blocks that can be lent to one receiver at once."""
SLAB_BYTES: Final = 16 << 20
MAX_SHARED_BYTES: Final = 8 << 30
ALIGNMENT: Final = 64
LARGE_BYTES: Final = 32 << 20
"""What is free and as large is given back when work is over that comes once."""


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
    """The memory in which one task lends tensors to one other.

    Args:
      budget: shared by all receivers of a task.
      slab_bytes: memory is taken from the system in pieces of this size.

    Raises:
      OSError: this process cannot make memory files.

    Example:
      >>> sender = SendMemory(Budget(1 << 20))
      >>> receiver = ReceiveMemory(sender.announcement())
      >>> handle, room = sender.lend(4)
      >>> room[:] = 7
      >>> array = receiver.array(handle, 4)
      >>> array.tolist(), sender.collect()
      ([7, 7, 7, 7], 0)
      >>> del array
      >>> sender.collect()
      1
      >>> sender.close()
    """

    def __init__(self, budget: Budget, slab_bytes: int = SLAB_BYTES) -> None:
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._control = MemoryFile(FIRST_SLOT + SLOTS, self._nonce)
        self._is_lent = self._control.data[FIRST_SLOT:]
        self._pool = BlockPool(SLOTS, budget, slab_bytes)
        self._slabs: list[MemoryFile] = []
        self._slots_used = 0

    def announcement(self) -> pb.SharedMemory:
        """Returns what the receiver must know to map it."""
        return pb.SharedMemory(pid=os.getpid(), fd=self._control.fd, nonce=self._nonce)

    def lend(self, nbytes: int) -> tuple[pb.SharedBlock, Bytes] | None:
        """Returns a handle and the room for ``nbytes``; None when all is lent."""
        block = self._pool.take(nbytes)
        if block is None and self._grow(nbytes):
            block = self._pool.take(nbytes)
        if block is None:
            return None
        slab = self._slabs[block.slab]
        start = PAGE_BYTES + block.offset
        self._is_lent[block.slot] = 1
        self._slots_used = max(self._slots_used, block.slot + 1)
        handle = pb.SharedBlock(fd=slab.fd, offset=start, slot=block.slot)
        return handle, slab.data[start : start + nbytes]

    def collect(self) -> int:
        """Takes back what the receiver let go of; returns the number of blocks."""
        given_back = np.flatnonzero(self._is_lent[: self._slots_used] == 0)
        return self._pool.release(given_back.tolist())

    async def give_back(self, least: int = LARGE_BYTES) -> int:
        """Gives the pages of what is not lent to the kernel; returns how many bytes.

        Args:
          least: smaller pieces stay, for the next frames.
        """
        self.collect()
        blocks = self._pool.take_large(least)
        try:
            await asyncio.to_thread(self._empty, blocks)
        finally:
            self._pool.give_large(blocks)
        return sum(block.nbytes for block in blocks)

    def _empty(self, blocks: Sequence[Block]) -> None:
        slabs = self._slabs
        for block in blocks if slabs else ():
            slabs[block.slab].give_back(PAGE_BYTES + block.offset, block.nbytes)

    def _grow(self, nbytes: int) -> bool:
        size = self._pool.slab_for(nbytes)
        if not size:
            return False
        try:
            slab = MemoryFile(PAGE_BYTES + size, self._nonce)
        except OSError:
            return False
        self._slabs.append(slab)
        self._pool.add_slab(size)
        return True

    def close(self) -> None:
        """Lets go of the memory; what is lent stays valid for the receiver."""
        self._pool.close()
        for file in (self._control, *self._slabs):
            file.close()
        self._slabs = []


@final
class SendMemories:
    """Gives each link of a process memory to lend from, all out of one budget.

    Args:
      most_bytes: of all together; None: see ``default_limit``.
      near: there are peers that can map it.

    Attributes:
      is_near: it can be had; not where the process could allocate none.
    """

    def __init__(self, most_bytes: int | None, *, near: bool) -> None:
        self._budget = Budget(default_limit() if most_bytes is None else most_bytes)
        self._memories = WeakSet[SendMemory]()
        self.is_near = near

    @property
    def taken(self) -> int:
        """Bytes that are allocated."""
        return self._budget.taken

    def new(self) -> SendMemory | None:
        """Returns the memory of a link; None: its tensors travel in the stream."""
        if not self.is_near:
            return None
        try:
            memory = SendMemory(self._budget)
        except OSError as error:
            _logger.info(
                "Tensors go through streams, not through shared memory: this process "
                "cannot allocate any (%s).",
                error.strerror or error,
            )
            self.is_near = False
            return None
        self._memories.add(memory)
        return memory

    async def give_back(self) -> None:
        """Gives large blocks back that nobody has borrowed."""
        for memory in list(self._memories):
            await memory.give_back()


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
        self._slabs: dict[int, Bytes] = {}

    def array(self, handle: pb.SharedBlock, nbytes: int) -> Bytes:
        """Returns the bytes of a block; it is given back when the last view is gone.

        Raises:
          MalformedMessageError: the handle does not name ``nbytes`` of that memory.
        """
        slab = self._slab(handle.fd)
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
        return np.asarray(
            _Lease(slab, handle.offset, nbytes, self._is_lent, handle.slot)
        )

    def _slab(self, fd: int) -> Bytes:
        slab = self._slabs.get(fd)
        if slab is None:
            slab = self._slabs[fd] = map_foreign(self._pid, fd, self._nonce)
        return slab


class _Lease:
    """What all views of a block keep alive; its end gives the block back.

    That may happen in any thread and in the middle of anything (garbage collection), so
    it writes one byte and takes no lock.
    """

    __slots__ = ("__array_interface__", "_is_lent", "_slab", "_slot")

    def __init__(
        self, slab: Bytes, offset: int, nbytes: int, is_lent: Bytes, slot: int
    ) -> None:
        self._slab = slab
        self._is_lent = is_lent
        self._slot = slot
        address = slab.__array_interface__["data"][0] + offset
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }

    def __del__(self) -> None:
        self._is_lent[self._slot] = 0
