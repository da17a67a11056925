"""What users give as data, checked once, and cut into batches and shards."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import jax
import numpy as np
from flax.errors import FlaxError, TraceContextError

from jgraph.cluster.sources import SourceFacts
from jgraph.coordination.slots import Part, SlotPlan
from jgraph.errors import DataError, JGError, OuterStateError
from jgraph.runtime.batches import ArrayReader, Reader
from jgraph.runtime.data import Array, check_batch_size, check_lengths

Data: TypeAlias = Mapping[str, Any] | Sequence[Any] | np.ndarray[Any, Any] | jax.Array
"""A dict of arrays, a tuple of arrays such as ``(x, y)``, or one array."""

Batch: TypeAlias = Any
"""The same structure as the data, with the examples of one batch."""


@final
@dataclass(frozen=True, slots=True)
class Dataset:
    """Arrays of equal length and the structure in which the user gave them.

    ``fields`` go by the user's names: ``data['image']``, ``data[0]``, ``data``.
    """

    fields: dict[str, Array]
    tree: Any
    # Of a source that is read elsewhere: `fields` show its types and hold nothing.
    facts: SourceFacts | None = None
    local: Reader | None = None
    source: str = ""

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def batch(self, fields: Sequence[Any]) -> Batch:
        """Returns ``fields``, in order, in the structure of the data."""
        return jax.tree.unflatten(self.tree, fields)

    def avals(self, batch_size: int) -> Batch:
        """Returns shapes and dtypes of a batch."""
        return self.batch(
            [
                jax.ShapeDtypeStruct((batch_size, *a.shape[1:]), a.dtype)
                for a in self.fields.values()
            ]
        )

    def sample(self) -> Any:
        """Returns the first example of the first field, as a batch of one."""
        return next(iter(self.fields.values()))[:1]

    def plan(self, batch_size: int, seed: int) -> SlotPlan:
        """Returns how the data is cut into slots and shuffled.

        Raises:
          DataError: less than 1, or more than there are examples.
        """
        check_batch_size(batch_size, len(self))
        if self.facts is None:
            return SlotPlan(self.parts, batch_size, seed)
        return SlotPlan(self.parts, batch_size, seed, shuffle=self.facts.shuffle)

    @property
    def is_here(self) -> bool:
        """Whether its batches can be read in this process."""
        return self.local is not None or not self.source

    @property
    def parts(self) -> tuple[Part, ...]:
        """What there is: all arrays together, or files."""
        whole = (Part("the data", len(self)),)
        return whole if self.facts is None else self.facts.parts

    def reader(self) -> Reader:
        """Returns what reads batches in this process."""
        return ArrayReader(self.fields) if self.local is None else self.local

    def describe(self, examples: int | None = None) -> str:
        """Returns names and types of the fields, for messages."""
        count = "…" if examples is None else str(examples)
        return ", ".join(
            f"{name} {a.dtype}[{','.join(map(str, (count, *a.shape[1:])))}]"
            for name, a in self.fields.items()
        )

    def digest(self) -> str:
        """Returns the SHA-256 of the fields: names, types and values."""
        if self.source:
            return self.source
        digest = hashlib.sha256()
        for name, array in self.fields.items():
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
        return digest.hexdigest()

    def batches(self, batch_size: int) -> Iterator[tuple[int, Batch]]:
        """Yields (examples, batch) once, in order; the last of a part is smaller."""
        reader = self.reader()
        names = list(self.fields) if self.local is None else sorted(reader.fields)
        for number, part in enumerate(self.parts):
            for first in range(0, part.examples, batch_size):
                rows = np.arange(first, min(first + batch_size, part.examples))
                fields = reader.read(number, rows)
                yield len(rows), self.batch([fields[name] for name in names])


def as_dataset(
    data: "Data | Dataset", name: str = "data", *, finite: bool = False
) -> Dataset:
    """Checks what the user gave and returns it as a ``Dataset``.

    Types become what JAX makes of them: with 64-bit types off (JAX's default) float64
    becomes float32 and int64 becomes int32.

    Args:
      data: a dict or tuple of arrays with examples along axis 0, or one array.
      name: the caller's argument, for messages.
      finite: also refuse NaN and infinity.

    Raises:
      DataError: not arrays, no examples, lengths that differ, an object or string
        dtype, integers too large for JAX's type, or NaN where it is forbidden.

    Example:
      >>> data = as_dataset({"x": np.zeros((4, 2)), "y": np.arange(4)})
      >>> len(data), data.avals(2)["x"]
      (4, ShapeDtypeStruct(shape=(2, 2), dtype=float32))
    """
    if isinstance(data, Dataset):
        return data
    if not isinstance(data, Mapping | tuple | list) and not hasattr(data, "shape"):
        raise DataError(
            f"{name} is a {type(data).__name__}; give arrays: (x, y) or "
            "{'image': x, 'label': y}"
        )
    leaves, tree = jax.tree_util.tree_flatten_with_path(
        dict(data) if isinstance(data, Mapping) else data,
        is_leaf=lambda v: not isinstance(v, dict | tuple) and v is not data,
    )
    fields = {}
    for path, value in leaves:
        field = name + jax.tree_util.keystr(path)
        fields[field] = _as_array(value, field, finite=finite)
    check_lengths({field: len(array) for field, array in fields.items()})
    return Dataset(fields, tree)


def _as_array(value: Any, field: str, *, finite: bool) -> Array:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(
            f"{field} is not an array: {error}; pad it to one shape", field=field
        ) from error
    if array.ndim == 0:
        raise DataError(
            f"{field} is a single value, not an array; examples lie along axis 0",
            field=field,
        )
    if not _is_numeric(array.dtype):
        raise DataError(
            f"{field} has dtype {array.dtype}, which XLA does not know; give numbers "
            "(for text: ids; for ragged rows: padded arrays)",
            field=field,
            dtype=str(array.dtype),
        )
    if finite and array.dtype.kind in "fV" and not np.isfinite(array).all():
        raise DataError(
            f"{field} contains NaN or infinity, first at example "
            f"{_first_bad(array)}; clean the data or set check_finite=False",
            field=field,
        )
    return _as_jax_dtype(array, field)


def _is_numeric(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biufc" or (dtype.kind == "V" and dtype.names is None)


def _first_bad(array: Array) -> int:
    rows = np.isfinite(array).reshape(len(array), -1).all(axis=1)
    return int(np.argmin(rows))


def _as_jax_dtype(array: Array, field: str) -> Array:
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
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


def check_alike(known: Dataset, given: Dataset, what: str) -> None:
    """Refuses data whose examples are of another kind than those known.

    Raises:
      DataError: other fields, or a field of another shape or dtype.
    """
    if known.tree != given.tree:
        raise DataError(
            f"the data has {given.describe()}, and {what} {known.describe()}; give the "
            "same structure"
        )
    pairs = zip(given.fields.items(), known.fields.values(), strict=True)
    for (name, array), other in pairs:
        if array.shape[1:] != other.shape[1:] or array.dtype != other.dtype:
            raise DataError(
                f"{name} is {_example(array)} per example, and {what} "
                f"{_example(other)}; make them the same",
                field=name,
            )


@contextmanager
def naming_data(dataset: Dataset, batch_size: int) -> Iterator[None]:
    """Describes the batch where a user's loss cannot be traced with it.

    Raises:
      OuterStateError: the loss changes a module that it was not given.
      DataError: the loss raised TypeError, ValueError or one of Flax's errors.
    """
    try:
        yield
    except TraceContextError as error:
        what = str(error).partition(" from ")[0].removeprefix("Cannot mutate ")
        raise OuterStateError(
            f"the loss changes {what} of a module that it did not get as an argument; "
            "use the model that it is given: def loss(model, batch): …"
        ) from error
    except (TypeError, ValueError, FlaxError) as error:
        if isinstance(error, JGError):
            raise
        first = str(error).partition("\n")[0]
        raise DataError(
            f"the loss failed on a batch of {dataset.describe(batch_size)}: "
            f"{type(error).__name__}: {first}; check the data against what the model "
            "and the loss take"
        ) from error


def _example(array: Array) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape[1:]))}]"
