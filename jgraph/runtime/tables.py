"""Rows of a variable: looked up and changed in place, at their own cost only."""

import ctypes
import sys
from typing import Any, Final, Protocol, TypeAlias, final

import jax
import numpy as np

from jgraph.errors import MalformedMessageError

Array: TypeAlias = "np.ndarray[Any, Any]"

_HUGE_PAGE: Final = 2 << 20
_MADV_HUGEPAGE: Final = 14
_MADV_COLLAPSE: Final = 25  # Linux 6.1; before, the kernel collapses by and by


class Table(Protocol):
    """Rows found by their ids. Its user holds the lock of its variable."""

    def lookup(self, ids: Array, out: Array) -> None:
        """Copies the rows of ``ids`` to ``out``, which has as many.

        Raises:
          MalformedMessageError: an id without a row.
        """

    def update(self, ids: Array, rows: Array) -> None:
        """Replaces the rows of ``ids``, each of which is there once.

        Raises:
          MalformedMessageError: an id without a row; nothing is changed.
        """


@final
class ArrayTable:
    """The rows of one array, changed in the array's own memory.

    Nothing else may use the array meanwhile: to JAX it never changes.

    Args:
      value: an array on a CPU; its memory must belong to it alone.

    Example:
      >>> import jax.numpy as jnp
      >>> array = jnp.zeros((3, 2))
      >>> ArrayTable(array).update(np.array([1]), np.ones((1, 2)))
      >>> array.tolist()
      [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    """

    def __init__(self, value: jax.Array) -> None:
        self.value = value
        self._rows = _writable(value)

    def lookup(self, ids: Array, out: Array) -> None:
        """Copies the rows of ``ids`` to ``out``."""
        self._check(ids)
        # The default mode would fill a buffer first, to leave ``out`` alone on errors.
        np.take(self._rows, ids, axis=0, out=out, mode="clip")

    def update(self, ids: Array, rows: Array) -> None:
        """Replaces the rows of ``ids``."""
        self._check(ids)
        put_rows(self._rows, ids, rows)

    def _check(self, ids: Array) -> None:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(self._rows):
            raise MalformedMessageError(
                f"rows {int(ids.min())} to {int(ids.max())} of a table of "
                f"{len(self._rows):,} rows are asked for; the sender's program is "
                "another one"
            )


def put_rows(table: Array, ids: Array, rows: Array) -> None:
    """Replaces rows of a table, which is contiguous.

    Example:
      >>> table = np.zeros((3, 2))
      >>> put_rows(table, np.array([1]), np.ones((1, 2)))
      >>> table.tolist()
      [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    """
    width = table[:1].nbytes
    if not width or not len(ids):
        return
    # Whole rows as one element each: numpy copies them in two thirds of the time.
    row = np.dtype((np.void, width))
    given = np.ascontiguousarray(rows, table.dtype)
    np.put(_as_elements(table, row), ids, _as_elements(given, row))


def _as_elements(table: Array, row: np.dtype[Any]) -> Array:
    return table.reshape(len(table), -1).view(row).reshape(-1)


def on_cpu(value: jax.Array) -> bool:
    """Whether a CPU holds the array."""
    return all(device.platform == "cpu" for device in value.devices())


def _writable(value: jax.Array) -> Array:
    # numpy's own views of JAX arrays can only be read.
    value.block_until_ready()
    flat = np.zeros(0, np.uint8)
    if value.nbytes:
        pointer = value.addressable_data(0).unsafe_buffer_pointer()
        _use_huge_pages(pointer, value.nbytes)
        memory = (ctypes.c_uint8 * value.nbytes).from_address(pointer)
        flat = np.ctypeslib.as_array(memory)
    return flat.view(value.dtype).reshape(value.shape)


def _use_huge_pages(pointer: int, nbytes: int) -> None:
    """Asks the kernel for 2 MB pages, now: rows at random then cost 0.6 times as much.

    Where it does not know the request, or has none, everything stays as it is.
    """
    begin = -(-pointer // _HUGE_PAGE) * _HUGE_PAGE
    length = (pointer + nbytes - begin) // _HUGE_PAGE * _HUGE_PAGE
    if length > 0 and sys.platform == "linux":
        madvise = ctypes.CDLL(None).madvise
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), advice)
