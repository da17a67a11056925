"""Memory out of which one task lends to all others: each tensor once, to many.

What several tasks of this machine are sent, as workers are the parameters of a ps, is
copied for the first of them; the others are lent the same block, if nobody can have
changed the tensor since. Nobody writes to such a block until all have given it back.
"""

import asyncio
import itertools
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, final

import numpy as np

from jgraph.rpc.shared_memory.mappings import Bytes
from jgraph.rpc.shared_memory.memory_blocks import (
    PAGE_BYTES,
    Block,
    BlockPool,
    Budget,
)
from jgraph.rpc.shared_memory.memory_files import NONCE_BYTES, MemoryFile

SLAB_BYTES: Final = 16 << 20
LARGE_BYTES: Final = 32 << 20
"""What is free and as large is given back when work is over that comes once."""


@final
@dataclass(eq=False, slots=True)
class Loan:
    """A block that some receivers have.

    Attributes:
      block: which.
      fd: of its slab, in this process.
      slab: number of that.
      start: of the block in that file.
      room: the bytes of the tensor.
      filling: held by who copies the tensor there.
      is_filled: it is there.
      receivers: how many have it.
      is_lost: a receiver is out of reach that may have it for ever.
      tensor: identity of the tensor that is known to lie there, and that nobody
        changes; 0: of none, and there is one receiver at most.
    """

    block: Block
    fd: int
    slab: int
    start: int
    room: Bytes
    filling: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_filled: bool = False
    receivers: int = 0
    is_lost: bool = False
    tensor: int = 0


class Lender(Protocol):
    """Who lends to one receiver."""

    def collect(self) -> int:
        """Takes back what the receiver let go of; returns the number of blocks."""


@final
class Slabs:
    """The memory of a task, from which it lends to others.

    Args:
      budget: the most of it.
      slab_bytes: memory is taken from the system in pieces of this size.

    Attributes:
      nonce: what all its files begin with.
      lenders: who lends of it; memory is taken only when these have none back.
      joins: what this task itself has of it.

    Example:
      >>> slabs = Slabs(Budget(1 << 20))
      >>> loan = slabs.take(4)
      >>> loan.room.size, slabs.taken
      (4, 1048576)
      >>> slabs.give(loan)
      >>> slabs.close()
      >>> slabs.taken
      0
    """

    def __init__(self, budget: Budget, slab_bytes: int = SLAB_BYTES) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.lenders = weakref.WeakSet[Lender]()
        self.joins: Lender | None = None
        self._budget = budget
        self._pool = BlockPool(budget, slab_bytes)
        self._files: dict[int, MemoryFile] = {}
        self._numbers = itertools.count(1)
        # Of tensors that never change, by their identity.
        self._known: dict[int, tuple[weakref.ref[Any], Loan]] = {}

    @property
    def taken(self) -> int:
        """Bytes that are allocated."""
        return self._budget.taken

    def loan_of(self, array: np.ndarray[Any, Any]) -> Loan | None:
        """Returns the block that is to have a tensor; None when all is lent.

        It is one that others have if the tensor cannot have changed since.
        """
        known = self._known.get(id(array))
        if known is not None and known[0]() is array:
            return known[1]
        loan = self.take(array.nbytes)
        if loan is not None and not array.flags.writeable:
            loan.tensor = id(array)
            self._known[loan.tensor] = weakref.ref(array), loan
        return loan

    def take(self, nbytes: int) -> Loan | None:
        """Returns a block that nobody has; None when all is lent."""
        block = self._pool.take(nbytes)
        if block is None:
            self._collect()
            block = self._pool.take(nbytes)
        if block is None and self._grow(nbytes):
            block = self._pool.take(nbytes)
        if block is None:
            return None
        file, start = self._files[block.slab], PAGE_BYTES + block.offset
        room = file.data[start : start + nbytes]
        return Loan(block, file.fd, file.number, start, room)

    def _collect(self) -> None:
        for lender in (*self.lenders, *([] if self.joins is None else [self.joins])):
            lender.collect()

    def give(self, loan: Loan) -> None:
        """Takes a block back that no receiver has any more."""
        if loan.block.slab not in self._files:
            return  # all links ended since it was lent
        known = self._known.get(loan.tensor)
        if known is not None and known[1] is loan:
            del self._known[loan.tensor]
        over = self._pool.lose if loan.is_lost else self._pool.release
        if over(loan.block):
            self._files.pop(loan.block.slab).close()

    def _grow(self, nbytes: int) -> bool:
        size = self._pool.slab_for(nbytes)
        if not size:
            return False
        try:
            file = MemoryFile(PAGE_BYTES + size, self.nonce, next(self._numbers))
        except OSError:
            return False
        self._files[self._pool.add_slab(size)] = file
        return True

    async def give_back(self, least: int = LARGE_BYTES) -> int:
        """Gives the pages of what is not lent to the kernel; returns how many bytes.

        Args:
          least: smaller pieces stay, for the next frames.
        """
        self._collect()
        blocks = self._pool.take_large(least)
        loop = asyncio.get_running_loop()
        emptying = loop.run_in_executor(None, self._empty, blocks)
        # Not before: the thread goes on if whoever waits for it gives up.
        emptying.add_done_callback(lambda _: self._pool.give_large(blocks))
        await asyncio.shield(emptying)
        return sum(block.nbytes for block in blocks)

    def _empty(self, blocks: Sequence[Block]) -> None:
        files = self._files
        for block in blocks:
            file = files.get(block.slab)  # in a thread: a slab may end meanwhile
            if file is not None:
                file.give_back(PAGE_BYTES + block.offset, block.nbytes)

    def close(self) -> None:
        """Lets go of the memory; what is lent stays valid for who has it."""
        self._pool.close()
        for file in self._files.values():
            file.close()
        self._files, self._known = {}, {}
