"""Arrays spilled to a file without a name, and mapped: a second cache behind memory.

What lies there costs memory only while the system has some to spare.
"""

import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from math import prod
from typing import Final, final

import numpy as np

from jgraph.runtime.data.batches import Array

_SHARE: Final = 4
"""Of the disk's free bytes so large a part may be taken: a quarter."""
_ALIGNMENT: Final = 64


@final
class SpilledArrays:
    """Keeps groups of arrays in one file, which goes with this object.

    Args:
      room: bytes that it may take; a quarter of what the disk of temporary files has
        free if unset.

    Example:
      >>> spill = SpilledArrays()
      >>> spill.keep({"x": np.arange(3)})["x"].tolist()
      [0, 1, 2]
    """

    def __init__(self, room: int | None = None) -> None:
        self._room = room
        self._file: int | None = None
        self._end = 0

    def keep(self, arrays: Mapping[str, Array]) -> dict[str, Array] | None:
        """Writes arrays; returns them as they lie there, not to be written to.

        None where there is no room for them, or the disk will not take them.
        """
        places: dict[str, int] = {}
        end = 0
        for name, array in arrays.items():
            places[name] = end
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        try:
            if self._room is None:
                directory = tempfile.gettempdir()
                self._room = shutil.disk_usage(directory).free // _SHARE
            if not 0 < end <= self._room:
                return None
            if self._file is None:
                self._file, path = tempfile.mkstemp(prefix="jgraph-rows-")
                weakref.finalize(self, os.close, self._file)
                os.unlink(path)
            first = -(-self._end // mmap.ALLOCATIONGRANULARITY)
            first *= mmap.ALLOCATIONGRANULARITY
            for name, array in arrays.items():
                _write(self._file, array, first + places[name])
            os.posix_fallocate(self._file, first, end)
            mapped = mmap.mmap(self._file, end, access=mmap.ACCESS_READ, offset=first)
        except OSError:
            self._room = 0  # a full disk is no reason to stop: it is decoded again
            return None
        self._end = first + end
        self._room -= end
        return {
            name: np.frombuffer(
                mapped, array.dtype, prod(array.shape), places[name]
            ).reshape(array.shape)
            for name, array in arrays.items()
        }


def _write(file: int, array: Array, offset: int) -> None:
    rest = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    while rest:
        count = os.pwrite(file, rest, offset)
        rest, offset = rest[count:], offset + count
