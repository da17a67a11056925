"""Fields of a batch: arrays of the types that JAX computes with; equal parts."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.errors import DataError, FeedError
from jgraph.runtime.data.batches import Array
from jgraph.train.model.trees import Tree
from jgraph.view.units import count_text

_WHOLE: Final = re.compile(r"u?int|bool")
_LISTS: Final = re.compile(r"(large_|fixed_size_)?list")
"""Types of columns with nulls, in lower case: of pandas, Arrow and polars."""


def as_array(
    value: Any, field: str, *, finite: bool = False, single: bool = False
) -> Array:
    """Returns what a user gave as an array of the type that JAX makes of it.

    Args:
      value: an array of any library in the memory of this process, or numbers.
      field: what to call it in messages.
      finite: refuse NaN and infinity.
      single: it may be a single value: it is a field of one example.

    Raises:
      DataError: no array, of an object or string dtype, with integers too large for
        JAX's type or for that of the fractions beside them in a table, with nulls
        among integers, or with NaN where it is forbidden.
    """
    value = as_table(value, field)
    _check_nulls(value, field)
    array = _array_of(value, field)
    if array.dtype.kind == "O":
        array = _of_rows(array, field)
        if array.ndim and (count := sum(one is None for one in array.flat)):
            raise _has_nulls(field, count)
    if array.ndim == 0 and (not single or array.dtype.kind == "O"):
        raise DataError(_not_an_array(value, field, array), field=field)
    if not _is_numeric(array.dtype):
        raise DataError(
            f"{field} has dtype {array.dtype}, which XLA does not know; give numbers "
            f"(for text: ids; for ragged rows: padded arrays){_no_numbers_in(value)}",
            field=field,
            dtype=str(array.dtype),
        )
    if finite and array.dtype.kind in "fcV" and not np.isfinite(array).all():
        where = f", first at example {_first_bad(array)}" if array.ndim else ""
        raise DataError(
            f"{field} contains NaN or infinity{where}; clean the data or set "
            "check_finite=False",
            field=field,
        )
    if hasattr(value, "columns"):
        _check_table(value, array, field)
    return _as_jax_dtype(array, field)


def as_table(value: Any, name: str) -> Any:
    """Returns a list of Arrow's record batches as the table of their rows.

    All else is returned as it is.

    Raises:
      DataError: they have different columns.
    """
    if not (isinstance(value, list) and value and _is_record_batch(value[0])):
        return value
    import pyarrow as pa  # is there: it made them

    try:
        return pa.Table.from_batches(value)
    except (pa.ArrowInvalid, TypeError) as error:
        raise DataError(
            f"{name} is a list of record batches that make no table together: "
            f"{' '.join(str(error).split())}",
            field=name,
        ) from error


def _is_record_batch(value: Any) -> bool:
    cls = type(value)
    return cls.__name__ == "RecordBatch" and cls.__module__.startswith("pyarrow")


def check_keys(value: Any, name: str) -> None:
    """Refuses dicts whose keys have no order, by which fields are known.

    Raises:
      DataError: names the keys.
    """
    if isinstance(value, Mapping):
        try:
            sorted(value)
        except TypeError:
            raise DataError(
                f"{name} is a dict with the keys {', '.join(map(repr, value))}, which "
                "have no order; make all of them names"
            ) from None
        for key, each in value.items():
            check_keys(each, f"{name}[{key!r}]")
    elif isinstance(value, tuple):
        for number, each in enumerate(value):
            check_keys(each, f"{name}[{number}]")


def _check_nulls(value: Any, field: str) -> None:
    """Refuses nulls that would turn whole numbers into fractions, as NaN does.

    Among fractions NaN stands for them, as in pandas, Arrow and ``to_numpy``.
    """
    if hasattr(value, "columns"):
        names = getattr(value, "column_names", value.columns)
        columns = [(f"column {name!r} of {field}", value[name]) for name in names]
    else:
        columns = [(field, value)]
    for what, column in columns:
        if count := _nulls(column):
            raise _has_nulls(what, count)


def _nulls(column: Any) -> int:
    """Returns how many nulls a column has that NaN cannot stand for."""
    kind = str(getattr(column, "type", None) or getattr(column, "dtype", "")).lower()
    is_whole, is_lists = _WHOLE.match(kind), _LISTS.match(kind)
    counted = getattr(column, "null_count", None)
    if counted is None and hasattr(column, "isna"):  # of pandas
        counted = column.isna().sum
    if counted is None or not (is_whole or is_lists):
        return 0
    count = int(counted() if callable(counted) else counted)
    if count or is_whole or not hasattr(column, "type"):
        return count
    return sum(_nulls(one.flatten()) for one in getattr(column, "chunks", [column]))


def _has_nulls(what: str, count: int) -> DataError:
    return DataError(
        f"{what} has {count_text(count, 'null')}, and only fractions have NaN for "
        "them; say what they are, as in fillna(0) of pandas or fill_null(0) of Arrow, "
        "leave these rows out, or make it float if NaN is meant",
        field=what,
    )


def _check_table(table: Any, array: Array, field: str) -> None:
    """Refuses a table whose whole numbers become others among its fractions."""
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype.kind != "f":
        return
    exact = 2 ** (np.finfo(dtype).nmant + 1)
    for name, column in _columns(table):
        if column.dtype.kind not in "iu" or not column.size:
            continue
        if max(int(column.max()), -int(column.min())) > exact:
            raise DataError(
                f"{field} is a table whose columns become one array of {dtype}, which "
                f"does not hold the whole numbers of '{name}'; give columns by name: "
                f"{{'x': df[[…]], '{name}': df['{name}']}}",
                field=field,
            )


def _columns(table: Any) -> Iterator[tuple[Any, Array]]:
    """Yields the columns of a table: of pandas and polars, or of Arrow."""
    for name in getattr(table, "column_names", table.columns):
        yield name, np.asarray(table[name])


def _no_numbers_in(value: Any) -> str:
    """Returns what to do about columns of a table that are no numbers."""
    if not hasattr(value, "columns"):
        return ""
    bad = [str(name) for name, one in _columns(value) if not _is_numeric(one.dtype)]
    if not bad:  # of pandas, such as bool beside float
        return "; the columns of the table have no type in common: df.astype('float32')"
    names = ", ".join(repr(name) for name in bad[:3])
    return f"; of the table these are no numbers: {names}; give columns by name"


def _of_rows(array: Array, field: str) -> Array:
    """Makes one array of a column whose values are arrays, as Arrow and pandas do.

    Raises:
      DataError: they have different shapes.
    """
    if array.ndim != 1 or not all(isinstance(one, np.ndarray) for one in array):
        return array
    if shapes := sorted({one.shape for one in array})[:2]:
        if len(shapes) > 1:
            raise DataError(
                f"{field} has arrays of the shapes {shapes[0]} and {shapes[1]}; pad "
                "them to one shape",
                field=field,
            )
        return np.stack([*array])
    return array


def _array_of(value: Any, field: str) -> Array:
    if isinstance(value, jax.Array) and jnp.issubdtype(
        value.dtype, jax.dtypes.prng_key
    ):
        raise DataError(
            f"{field} is an array of random keys; give jax.random.key_data(keys), and "
            "make keys of it in the loss with jax.random.wrap_key_data",
            field=field,
        )
    if isinstance(value, np.ma.MaskedArray) and (mask_count := int(value.mask.sum())):
        raise DataError(
            f"{field} has {mask_count} masked values; say what they are, as in "
            "array.filled(0), and give the mask as a field of its own if it is needed",
            field=field,
        )
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        hint = "; pad it to one shape" if "inhomogeneous" in str(error) else ""
        raise DataError(f"{field} is not an array: {error}{hint}", field=field) from (
            error
        )


def _not_an_array(value: Any, field: str, array: Array) -> str:
    if array.dtype.kind == "O":
        name = type(value).__name__
        return f"{field} is a {name}, not an array; give an array of numbers"
    return (
        f"{field} is a single value, {value!r:.20}; examples lie along axis 0: repeat "
        f"it for each of them, as in np.full(len(x), {value!r:.20}), or use it in the "
        "loss as a constant"
    )


def _is_numeric(dtype: np.dtype[Any]) -> bool:
    is_number = jnp.issubdtype(dtype, np.number) or dtype == np.bool_
    # Wider than 64 bits, and spans of time.
    return bool(is_number) and dtype.char not in "gGm"


def _first_bad(array: Array) -> int:
    rows = np.isfinite(array).reshape(len(array), -1).all(axis=1)
    return int(np.argmin(rows))


def _as_jax_dtype(array: Array, field: str) -> Array:
    dtype = jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("="))
    if dtype == array.dtype:
        return array
    if array.dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        low, high = int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            raise DataError(
                f"{field} has values from {low} to {high}, too large for JAX's "
                f"{dtype}; for a jg.HashTable give jg.split_keys(ids), else smaller "
                "numbers, or switch 64-bit types on: "
                "jax.config.update('jax_enable_x64', True)",
                field=field,
            )
    return array.astype(dtype)


def split_batch(batch: Tree, count: int, what: str) -> list[Tree]:
    """Returns the parts of a batch, in order.

    Args:
      batch: arrays with the examples as first dimension.
      count: of the parts.
      what: the batch, for the message.

    Raises:
      FeedError: the arrays have different sizes, or ``count`` does not divide
        them.

    Example:
      >>> [part.tolist() for part in split_batch(jnp.arange(4), 2, "x")]
      [[0, 1], [2, 3]]
    """
    each = part_size(batch, count, what)
    return [
        jax.tree.map(lambda leaf, n=n: leaf[n * each : (n + 1) * each], batch)
        for n in range(count)
    ]


def part_size(batch: Tree, count: int, what: str, of: str = "") -> Any:
    """Returns how many examples each part of a batch has, a number or a symbol.

    Args:
      batch: arrays with the examples as first dimension.
      count: of the parts.
      what: the batch, for the message.
      of: what the parts are, for the message.

    Raises:
      FeedError: the arrays have different sizes, or ``count`` does not divide them.

    Example:
      >>> part_size(jnp.arange(6), 3, "x")
      2
    """
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    sizes = sorted({shape[0] if shape else 0 for shape in shapes})
    if len(sizes) != 1 or not sizes[0] or sizes[0] % count:
        counts = " and ".join(map(str, sizes)) or "no"
        raise FeedError(
            f"{what} has {counts} examples, which cannot be cut into {count} equal "
            f"parts{of and f', {of}'}; give a batch of a multiple of {count}",
            feed=what,
        )
    return sizes[0] // count
