"""Buffer pool for received tensors: memory is reused when its arrays are gone.

Fresh memory costs a page fault per page, more than copying into it. Buffers that come
back are kept, up to a limit, and given to the next tensor of about their size.
"""

from collections import deque
from typing import Any, Final, final

import numpy as np

from jgraph.rpc.shared_memory.mappings import Bytes
from jgraph.rpc.wire.codec import aligned_empty

KEPT_FROM_BYTES: Final = 256 << 10
"""Smaller memory is kept by the allocator already."""
KEPT_BYTES: Final = 32 << 20


@final
class BufferPool:
    """Gives 64-byte aligned memory, preferably memory that was used before.

    Args:
      limit: most bytes of unused memory to keep; larger buffers are never kept.

    Example:
      >>> buffers = BufferPool()
      >>> array = buffers.take(1 << 20)
      >>> address = array.ctypes.data
      >>> del array
      >>> buffers.take(1 << 20).ctypes.data == address
      True
    """

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._limit = limit
        self._free: dict[int, list[Bytes]] = {}
        self._returned: deque[Bytes] = deque()
        self.kept_bytes = 0

    def take(self, nbytes: int) -> Bytes:
        """Returns writable memory that is the caller's until its last view is gone.

        Raises:
          MessageTooLargeError: there is no memory.
        """
        if not KEPT_FROM_BYTES <= nbytes <= self._limit:
            return aligned_empty(nbytes)
        self._collect()
        size = _size_class(nbytes)
        free = self._free.get(size)
        if free:
            self.kept_bytes -= size
            buffer = free.pop()
        else:
            buffer = aligned_empty(size)
        return np.asarray(_Loan(buffer, nbytes, self._returned))

    def _collect(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            if self.kept_bytes + buffer.size > self._limit:
                continue
            self._free.setdefault(buffer.size, []).append(buffer)
            self.kept_bytes += buffer.size


def _size_class(nbytes: int) -> int:
    """Rounds up to a multiple of an eighth of the next smaller power of two."""
    step = 1 << max(nbytes.bit_length() - 4, 12)
    return -(-nbytes // step) * step


class _Loan:
    """What all views of a buffer keep alive; its end, in any thread, gives it back."""

    __slots__ = ("__array_interface__", "_buffer", "_returned")

    def __init__(self, buffer: Bytes, nbytes: int, returned: deque[Bytes]) -> None:
        self._buffer = buffer
        self._returned = returned
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": buffer.__array_interface__["data"],
        }

    def __del__(self) -> None:
        self._returned.append(self._buffer)
