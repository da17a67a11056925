"""Mappings of memory files: at two places at once, and with no file descriptor left.

Whoever maps what others lend needs a descriptor to open it, and Python keeps another
with each mapping. Both are given up here as soon as the memory is mapped. As a task
that can open nothing more would lose what it is sent, two are kept for that.
"""

import ctypes
import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, Final, TypeAlias, TypeVar, final

import numpy as np

Bytes: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]
_HUGE_PAGE_BYTES: Final = 2 << 20
_TO_A_PLACE: Final = 1 | 2  # MREMAP_MAYMOVE | MREMAP_FIXED
_NO_MORE_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE})
_T = TypeVar("_T")


def map_file(fd: int, nbytes: int) -> mmap.mmap:
    """Maps a file; it is unmapped when the last array that looks at it is gone."""
    mapped = mmap.mmap(fd, nbytes)
    if nbytes >= _HUGE_PAGE_BYTES:
        with suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def map_without_file(fd: int, nbytes: int) -> Bytes:
    """Returns a file as an array that keeps no descriptor, where the kernel can.

    Example:
      >>> fd = os.memfd_create("example")
      >>> os.ftruncate(fd, 5000)
      >>> data = map_without_file(fd, 5000)
      >>> data[4999] = 7
      >>> os.pread(fd, 1, 4999)[0]
      7
      >>> os.close(fd)
    """
    data: Bytes = np.frombuffer(map_file(fd, nbytes), np.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        place = mmap.mmap(-1, nbytes, flags=flags)
    except OSError:
        return data
    again: Bytes = np.frombuffer(place, np.uint8)
    is_there = map_again(address_of(data), nbytes, address_of(again))
    return again if is_there else data


def map_again(place: int, nbytes: int, target: int) -> bool:
    """Maps pages of shared memory once more, over what is mapped at ``target``."""
    if sys.platform != "linux":
        return False
    pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    found = _mremap()(place, 0, pages, _TO_A_PLACE, target)
    return bool(found == target)


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Returns where an array begins."""
    address: int = array.__array_interface__["data"][0]
    return address


@cache
def _mremap() -> Any:
    """Returns the call of Linux, with the types of what it takes."""
    mremap = ctypes.CDLL(None).mremap
    mremap.restype, size = ctypes.c_void_p, ctypes.c_size_t
    mremap.argtypes = [ctypes.c_void_p, size, size, ctypes.c_int, ctypes.c_void_p]
    return mremap


@final
class SpareFiles:
    """Descriptors of nothing, for what cannot wait until there are others.

    Args:
      count: how many.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._fds: list[int] = []
        self._lock = threading.Lock()

    def use(self, work: Callable[[], _T]) -> _T:
        """Does what opens so many files and closes them, also if none is left.

        Raises:
          OSError: what the system says.
        """
        with self._lock:
            try:
                return work()
            except OSError as error:
                if error.errno not in _NO_MORE_FILES or not self._fds:
                    raise
                while self._fds:
                    os.close(self._fds.pop())
                return work()
            finally:
                self._keep()

    def _keep(self) -> None:
        with suppress(OSError):
            while len(self._fds) < self._count:
                self._fds.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


spare_files: Final = SpareFiles(2)
