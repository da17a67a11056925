"""Tables: rows of a variable, gathered and updated in place."""

import ctypes
import math
import sys
from contextlib import nullcontext
from typing import Any, Final, Protocol, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np

from jgraph._compat import is_wide, wide_types
from jgraph.errors import ConfigError, MalformedMessageError

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
        self._rows = _memory(value).view(value.dtype).reshape(value.shape)

    def lookup(self, ids: Array, out: Array) -> None:
        """Copies the rows of ``ids`` to ``out``."""
        take_rows(self._rows, ids, out)

    def update(self, ids: Array, rows: Array) -> None:
        """Replaces the rows of ``ids``."""
        _check(ids, len(self._rows))
        put_rows(self._rows, ids, rows)


@final
class PackedTable:
    """The rows of an array of which a byte holds several elements, as XLA keeps int4.

    Args:
      value: as for ``ArrayTable``.

    Example:
      >>> import jax.numpy as jnp
      >>> array = jnp.zeros((3, 3), "int4")
      >>> PackedTable(array).update(np.array([1]), np.full((1, 3), -2, array.dtype))
      >>> array.astype("int8").tolist()
      [[0, 0, 0], [-2, -2, -2], [0, 0, 0]]
    """

    def __init__(self, value: jax.Array) -> None:
        self.value = value
        self._memory = _memory(value)
        self._bits = bits_of(value.dtype)
        self._is_signed = jnp.issubdtype(value.dtype, jnp.signedinteger)

    def lookup(self, ids: Array, out: Array) -> None:
        """Copies the rows of ``ids`` to ``out``."""
        _check(ids, len(self.value))
        places, shifts = self._places(ids)
        found = (self._memory[places] >> shifts) & np.uint8((1 << self._bits) - 1)
        if self._is_signed:  # the upper bits of its byte are those of the sign
            sign = np.uint8(1 << (self._bits - 1))
            found = (found ^ sign) - sign
        out[...] = found.view(out.dtype).reshape(out.shape)

    def update(self, ids: Array, rows: Array) -> None:
        """Replaces the rows of ``ids``."""
        _check(ids, len(self.value))
        places, shifts = self._places(ids)
        mask = np.uint8((1 << self._bits) - 1)
        values = np.ascontiguousarray(rows, self.value.dtype).view(np.uint8) & mask
        values = values.reshape(-1)
        # Of one shift each byte is there once.
        for shift in range(0, 8, self._bits):
            here = np.flatnonzero(shifts == shift)
            others = self._memory[places[here]] & np.uint8(~(int(mask) << shift) & 255)
            self._memory[places[here]] = others | (values[here] << np.uint8(shift))

    def _places(self, ids: Array) -> tuple[Array, Array]:
        """Returns the byte of each element of these rows, and its first bit there."""
        width = math.prod(self.value.shape[1:])
        elements = np.asarray(ids, np.int64)[:, None] * width + np.arange(width)
        bits = elements.reshape(-1) * self._bits
        return bits >> 3, (bits & 7).astype(np.uint8)


def take_rows(values: Array, ids: Array, out: Array) -> None:
    """Copies the rows of ``ids`` to ``out``.

    Raises:
      MalformedMessageError: an id without a row.
    """
    _check(ids, len(values))
    # The default mode would fill a buffer first, to leave ``out`` alone on errors.
    np.take(values, ids, axis=0, out=out, mode="clip")


def rows_elsewhere(value: jax.Array, ids: Array) -> Array:
    """Returns the rows of ``ids`` of an array that several devices or no CPU have.

    Raises:
      MalformedMessageError: an id without a row.
    """
    _check(ids, len(value))
    if not len(ids):
        return np.zeros((0, *value.shape[1:]), value.dtype)
    # Of few sizes: JAX compiles for each of them.
    padded = np.zeros(1 << (len(ids) - 1).bit_length(), np.int32)
    padded[: len(ids)] = ids
    return np.asarray(jnp.take(value, padded, axis=0))[: len(ids)]


def elements(value: jax.Array) -> "Array | None":
    """Returns the elements of an array on a CPU; None where a byte has several."""
    if bits_of(value.dtype) < 8:
        return None
    return _memory(value).view(value.dtype).reshape(value.shape)


def table_of(value: jax.Array) -> ArrayTable | PackedTable:
    """Returns the rows of an array on a CPU."""
    return PackedTable(value) if bits_of(value.dtype) < 8 else ArrayTable(value)


def bits_of(dtype: Any) -> int:
    """Returns how many bits an element takes in the memory of a device.

    Example:
      >>> bits_of(np.dtype("float32")), bits_of(jnp.dtype("uint4"))
      (32, 4)
    """
    if dtype.kind == "V":  # numpy takes a byte at least for each
        is_int = jnp.issubdtype(dtype, jnp.integer)
        info: Any = jnp.iinfo if is_int else jnp.finfo
        return int(info(dtype).bits)
    return int(dtype.itemsize) * 8


def _check(ids: Array, rows: int) -> None:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        raise MalformedMessageError(
            f"rows {int(ids.min())} to {int(ids.max())} of a table of {rows:,} rows "
            "are asked for; the sender's program is another one"
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
    values = np.ascontiguousarray(rows, table.dtype)
    np.put(_as_elements(table, row), ids, _as_elements(values, row))


def _as_elements(table: Array, row: np.dtype[Any]) -> Array:
    return table.reshape(len(table), -1).view(row).reshape(-1)


def on_cpu(value: jax.Array) -> bool:
    """Whether a CPU holds the array."""
    return all(device.platform == "cpu" for device in value.devices())


def cpu_device() -> jax.Device:
    """Returns the device on which rows are looked up and updated.

    Raises:
      ConfigError: JAX has not opened it in this process.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        platform = jax.default_backend()
        raise ConfigError(
            "rows of a variable are looked up and updated on the CPU, which JAX has "
            f"not opened here; set JAX_PLATFORMS={platform},cpu"
        ) from error


def moved(value: jax.Array, device: jax.Device) -> jax.Array:
    """Returns a copy of an array on a device of another kind, all of it.

    By way of numpy: of 64-bit numbers and of those that share a byte, JAX hands over
    memory of another size than the copy's type says.
    """
    with wide_types() if is_wide(value.dtype) else nullcontext():
        copy: jax.Array = jax.device_put(np.array(value), device)
        return copy.block_until_ready()


def _memory(value: jax.Array) -> Array:
    """Returns the bytes of an array, which can be written."""
    # numpy's own views of JAX arrays can only be read.
    value.block_until_ready()
    nbytes = -(-value.size * bits_of(value.dtype) // 8)
    if not nbytes:
        return np.zeros(0, np.uint8)
    pointer = value.addressable_data(0).unsafe_buffer_pointer()
    _use_huge_pages(pointer, nbytes)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer))


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
