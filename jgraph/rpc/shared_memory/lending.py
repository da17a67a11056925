"""Lending of a frame's large tensors: copied to shared memory before it is sent."""

import asyncio
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.shared_memory.mappings import Bytes
from jgraph.rpc.shared_memory.shared_memory import SendMemory
from jgraph.rpc.shared_memory.slabs import Loan
from jgraph.rpc.wire.codec import Prepared, flat_bytes

SHARED_FRAME_BYTES: Final = 128 << 10
SHARED_TENSOR_BYTES: Final = 16 << 10
"""Smaller frames, and smaller tensors of larger ones, are cheaper in the stream."""
COPY_BYTES: Final = 24 << 20
"""The event loop serves others between copies of this size, up to twice as large.

Larger than what memcpy writes past the caches (20 MB and less, by their size): what is
written through them is read into them first, which takes 1.6 times as long.
"""


@final
@dataclass(slots=True)
class _Copying:
    seconds: float = 0.0


_copying = _Copying()  # of the process's one event loop


async def lend(prepared: Prepared, memory: SendMemory) -> Mapping[int, pb.SharedBlock]:
    """Copies the large tensors of a large frame into blocks of shared memory.

    Tensors for which there is no room are left to the stream.

    Returns:
      Where the copied tensors are, by index.
    """
    lent: dict[int, pb.SharedBlock] = {}
    memory.collect()
    for at, array in enumerate(prepared.arrays):
        if array.nbytes < SHARED_TENSOR_BYTES:
            continue
        room = memory.lend(array)
        if room is not None:
            lent[at] = room[0]
            await fill(room[1], flat_bytes(array))
    return lent


async def fill(loan: Loan, source: Bytes) -> None:
    """Copies a tensor to its block, unless others have been lent it there."""
    async with loan.filling:
        if not loan.is_filled:
            await _copy(loan.room, source)
            loan.is_filled = True


async def _copy(target: Bytes, source: Bytes) -> None:
    pieces = max(source.size // COPY_BYTES, 1)
    ends = [source.size * n // pieces for n in range(pieces + 1)]
    for start, end in itertools.pairwise(ends):
        if start:
            await asyncio.sleep(0)
        began = time.thread_time()
        target[start:end] = source[start:end]
        _copying.seconds += time.thread_time() - began


def copy_seconds() -> float:
    """Returns the CPU seconds that copying took in this process so far."""
    return _copying.seconds
