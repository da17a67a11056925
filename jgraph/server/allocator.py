"""Allocator settings (glibc malloc) of a server process.

A step takes and returns the same large blocks. By default glibc gets each from the
kernel and gives it back, and every page is cleared and mapped anew: measured, most of
the time of a step of 100 MB, and half of that of a gRPC stream.
"""

import ctypes
import logging
import os
from contextlib import suppress
from typing import Final

# Names and numbers of glibc's malloc.h.
_TRIM_THRESHOLD: Final = -1
_MMAP_MAX: Final = -4
_ARENA_MAX: Final = -8
_NEVER: Final = 2**31 - 1

_logger = logging.getLogger(__name__)


def keep_memory() -> bool:
    """Makes this process keep the memory that it frees, for its next allocation.

    For processes of ours only, and before they start threads: it holds for all of the
    process. With another C library than glibc it changes nothing, nor where somebody
    set one of glibc's own variables (``MALLOC_MMAP_THRESHOLD_``, …).

    Returns:
      Whether it holds.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        _logger.debug("this C library has no mallopt; freed memory is not kept")
        return False
    options = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_ARENA_MAX, 1))
    return all(mallopt(option, value) == 1 for option, value in options)


def give_back_memory() -> None:
    """Gives free memory to the kernel, wherever it lies between what is used.

    For when work is over that comes once: the values with which a variable began, in a
    block of their size, would be kept for ever where nothing of that size follows.
    """
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
