"""Signature of an exported function: names, datatypes and shapes, and their checks."""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias, final

import ml_dtypes
import numpy as np

from jgraph.errors import ArtifactError, ModelInputError

Array: TypeAlias = np.ndarray[Any, Any]

DEFAULT: Final = "serving_default"
"""The signature that is meant where none is named."""

DATATYPES: Final = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "bfloat16": "BF16",
}
"""Names of the Open Inference Protocol, by dtype."""

FLOATS: Final = frozenset({"float16", "float32", "float64", "bfloat16"})
"""Dtypes with NaN and infinity."""

MAX_RANK: Final = 32
FEW: Final = 64
"""Numbers that Python looks at sooner than NumPy."""
PART: Final = 1024
"""Elements of a list that become an array in one call."""
_BOOLS: Final = frozenset({bool, np.bool_})
_LISTS: Final = frozenset({list, tuple})


@final
@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output.

    Attributes:
      name: what it is called.
      dtype: name of its dtype.
      shape: its sizes; None: the number of rows of the batch.

    Example:
      >>> print(TensorSpec("dense", "float32", (None, 13)))
      dense: float32[b,13]
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]

    @property
    def datatype(self) -> str:
        """What the Open Inference Protocol calls its dtype."""
        return DATATYPES[self.dtype]

    @property
    def np_dtype(self) -> np.dtype[Any]:
        """Its dtype."""
        return dtype_of(self.dtype)

    @property
    def is_float(self) -> bool:
        """Whether it may have values that are not finite."""
        return self.dtype in FLOATS

    @property
    def wire_shape(self) -> list[int]:
        """Its sizes, -1 for any number of rows."""
        return [-1 if size is None else size for size in self.shape]

    def check(self, dtype: str, shape: Sequence[int]) -> None:
        """Refuses a value of another type.

        Args:
          dtype: its dtype, or what the protocol calls it.
          shape: its sizes.

        Raises:
          ModelInputError: names both types.
        """
        if dtype not in (self.dtype, self.datatype):
            raise ModelInputError(
                f"input '{self.name}' is {dtype:.40}, and the model takes "
                f"{self.datatype} ({self.dtype}); nothing is cast: send that",
                input=self.name,
            )
        if not self._fits(shape):
            raise ModelInputError(
                f"input '{self.name}' has the shape {short(shape)}, and the model "
                f"takes {self}",
                input=self.name,
            )

    def _fits(self, shape: Sequence[int]) -> bool:
        if len(shape) != len(self.shape):
            return False
        for size, wanted in zip(shape, self.shape, strict=True):
            if size < 0 if wanted is None else size != wanted:
                return False
        return True

    def nbytes_of(self, shape: Sequence[int]) -> int:
        """Returns how many bytes a value of such a shape has."""
        return math.prod(shape) * self.np_dtype.itemsize

    def size_of(self, rows: int) -> int:
        """Returns how many numbers a value of so many rows has."""
        return math.prod([rows if size is None else size for size in self.shape])

    def empty(self) -> Array:
        """Returns the value of no rows."""
        return np.zeros([size or 0 for size in self.shape], self.np_dtype)

    def __str__(self) -> str:
        sizes = ",".join("b" if size is None else str(size) for size in self.shape)
        return f"{self.name}: {self.dtype}[{sizes}]"


@final
@dataclass(frozen=True, slots=True)
class Signature:
    """A function of an exported model.

    Attributes:
      program: SHA-256 of its code.
      inputs: what it takes after the model's arrays.
      outputs: what it gives.
      arguments: names of the arrays that it takes first.
      is_batched: axis 0 of each input and output is any number of rows.
      rows_independent: a row's answer does not depend on the other rows, so that
        requests may be computed together.
      rtol: how much the answer of a row may differ, relatively, among others.
    """

    program: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    arguments: tuple[str, ...] = ()
    is_batched: bool = False
    rows_independent: bool = False
    rtol: float = 1e-5

    def input(self, name: str) -> TensorSpec:
        """Returns the input of a name.

        Raises:
          ModelInputError: there is none; says which there are.
        """
        for spec in self.inputs:
            if spec.name == name:
                return spec
        raise ModelInputError(
            f"'{name!s:.80}' is no input of the model; {_nearest(name, self.inputs)}",
            input=str(name)[:80],
        )

    def chosen(self, names: Iterable[str]) -> list[int]:
        """Returns the positions of outputs that somebody names; of all, if none.

        Raises:
          ModelInputError: one is no output, or is named twice.
        """
        names = list(names)
        if not names:
            return list(range(len(self.outputs)))
        known = {spec.name: place for place, spec in enumerate(self.outputs)}
        places: list[int] = []
        for name in names:
            if name not in known:
                raise ModelInputError(
                    f"'{name:.80}' is no output of the model; "
                    f"{_nearest(name, self.outputs)}"
                )
            if known[name] in places:
                raise ModelInputError(f"the output '{name}' is named twice")
            places.append(known[name])
        return places

    def are_close(
        self, outputs: Sequence[Array], other: "Signature", others: Sequence[Array]
    ) -> bool:
        """Whether another function's outputs are the same, within ``rtol``.

        Args:
          outputs: of this one.
          other: has the same names of outputs, or it is not the same.
          others: its outputs.
        """
        if [one.name for one in self.outputs] != [one.name for one in other.outputs]:
            return False
        return all(
            mine.shape == theirs.shape and is_close(mine, theirs, self.rtol)
            for mine, theirs in zip(outputs, others, strict=True)
        )

    def ordered(self, values: Mapping[str, Array]) -> tuple[list[Array], int]:
        """Returns the inputs in the order of the program, and how many rows they have.

        Raises:
          ModelInputError: one is missing, unknown or of another type, or they have
            different numbers of rows.
        """
        if len(values) != len(self.inputs):
            for name in values:
                self.input(name)
        found: list[Array] = []
        for spec in self.inputs:
            value = values.get(spec.name)
            if value is None:
                for name in values:  # a wrong name says more than a missing one
                    self.input(name)
                raise ModelInputError(
                    f"the input '{spec.name}' is missing; the model takes "
                    f"{listed(self.inputs)}",
                    input=spec.name,
                )
            is_due = value.dtype == spec.np_dtype  # its name takes longer
            spec.check(spec.dtype if is_due else value.dtype.name, value.shape)
            if not is_due and not value.dtype.isnative:  # XLA would read it as it lies
                value = value.astype(spec.np_dtype)
            found.append(value)
        if not self.is_batched:
            return found, 1
        first, rows = self.inputs[0], len(found[0])
        for spec, value in zip(self.inputs, found, strict=True):
            if len(value) != rows:
                raise ModelInputError(
                    f"input '{first.name}' has {rows} rows and '{spec.name}' has "
                    f"{len(value)}; send one row of each per example",
                    input=spec.name,
                )
        return found, rows


@cache
def dtype_of(name: str) -> np.dtype[Any]:
    """Returns the dtype of a name.

    Example:
      >>> dtype_of("bfloat16").itemsize
      2
    """
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def is_close(answer: Array, reference: Array, rtol: float) -> bool:
    """Whether two arrays differ by less than ``rtol`` of the largest number.

    Example:
      >>> is_close(np.array([1.0, 100.0]), np.array([1.0005, 100.0]), 1e-5)
      True
    """
    answer64, reference64 = (np.asarray(one, np.float64) for one in (answer, reference))
    scale = float(
        np.max(np.abs(reference64), initial=0.0, where=np.isfinite(reference64))
    )
    return np.allclose(
        answer64, reference64, rtol=rtol, atol=rtol * scale, equal_nan=True
    )


def is_finite(value: Array) -> bool:
    """Whether all numbers of an array are finite.

    Example:
      >>> is_finite(np.ones(3)), is_finite(np.array([np.inf, -np.inf]))
      (True, False)
    """
    if value.size <= FEW and math.isfinite(sum(value.ravel().tolist())):
        return True  # whatever is not finite would be in the sum
    return bool(np.isfinite(value).all())


def check_dtype(name: str, dtype: str) -> None:
    """Refuses a dtype that the protocols of servers have no name for.

    Raises:
      ArtifactError: it is one.
    """
    if dtype not in DATATYPES:
        raise ArtifactError(
            f"'{name}' is {dtype}, which inference protocols have no name for; convert "
            f"it in the function, to one of {', '.join(DATATYPES)}"
        )


def array_of_numbers(spec: TensorSpec, value: Any) -> Array:
    """Returns numbers of Python, in nested lists, as an array of the input's dtype.

    Raises:
      ModelInputError: they are of another kind, do not fit, or are no rectangle.

    Example:
      >>> array_of_numbers(TensorSpec("x", "float32", (None,)), [1, 2.5]).dtype
      dtype('float32')
      >>> array_of_numbers(TensorSpec("id", "uint64", (None,)), [1, 2**64 - 1]).max()
      np.uint64(18446744073709551615)
    """
    wanted = spec.np_dtype
    try:
        array = _as_array(value)
    except (ValueError, OverflowError, RecursionError) as error:
        raise _no_numbers(spec, f"is no array: {str(error).splitlines()[0]}") from error
    if not array.size:
        return np.zeros(array.shape, wanted)
    if wanted == np.uint64 and array.dtype.kind == "f":
        array = _unsigned(value, array)
    kinds = {"b": "b", "i": "iu", "u": "iu"}.get(wanted.kind, "iuf")
    if array.dtype.kind not in kinds:
        raise _no_numbers(spec, f"has values that are no {spec.dtype}")
    if wanted.kind != "b" and isinstance(value, list) and _holds_bool(value):
        raise _no_numbers(spec, "has true or false among its numbers; send 1 or 0")
    if wanted.kind in "iu":
        limits = np.iinfo(wanted)
        if not (limits.min <= array.min() and array.max() <= limits.max):
            raise _no_numbers(spec, f"has values beyond {limits.min} to {limits.max}")
        return array.astype(wanted)
    with np.errstate(over="ignore"):
        cast = array.astype(wanted)
    if wanted.kind != "b" and not is_finite(cast) and np.isfinite(array).all():
        raise _no_numbers(spec, f"has values that {spec.dtype} does not hold")
    return cast


def _unsigned(value: Any, array: Array) -> Array:
    """Returns whole numbers of which some are beyond int64, as they are.

    NumPy makes floats of such ones beside smaller ones, and loses digits. What is a
    float, or beyond uint64, stays what NumPy made of it.
    """
    exact = np.asarray(value, object)
    if all(type(one) is int and 0 <= one < 1 << 64 for one in exact.flat):
        return exact.astype(np.uint64)
    return array


def _as_array(value: Any) -> Array:
    """Returns what NumPy makes of a value; of a long list in parts.

    Between them other threads have a turn; parts that are not alike are NumPy's matter.
    """
    if not isinstance(value, list) or len(value) <= PART:
        return np.asarray(value)
    starts = range(0, len(value), PART)
    try:
        parts = [np.asarray(value[first : first + PART]) for first in starts]
    except ValueError:
        return np.asarray(value)  # what it says then is about the whole
    if len({(part.dtype, part.shape[1:]) for part in parts}) > 1:
        return np.asarray(value)
    return np.concatenate(parts)


def _holds_bool(value: Sequence[Any]) -> bool:
    """Whether a list has True or False somewhere, of which NumPy makes 1 and 0.

    Between parts of a long one other threads have a turn, as where it becomes an array.
    """
    for first in range(0, len(value), PART):
        part = value[first : first + PART]
        kinds = set(map(type, part))
        if not kinds.isdisjoint(_BOOLS):
            return True
        if not kinds.isdisjoint(_LISTS) and any(
            _holds_bool(one) for one in part if type(one) in _LISTS
        ):
            return True
    return False


def _no_numbers(spec: TensorSpec, why: str) -> ModelInputError:
    what = f"input '{spec.name}' {why:.200}; the model takes {spec}"
    return ModelInputError(what, input=spec.name)


def listed(specs: Iterable[TensorSpec]) -> str:
    """Returns inputs or outputs in a line."""
    return "; ".join(map(str, specs))


def short(shape: Sequence[int]) -> str:
    """Returns a shape in a few words, however long it is.

    Example:
      >>> short([2, 3]), short(range(99))
      ('[2,3]', '[0,1,2,3,4,5,6,7,…] of 99 sizes')
    """
    text = ",".join(map(str, shape[:8]))
    return f"[{text}]" if len(shape) <= 8 else f"[{text},…] of {len(shape)} sizes"


def _nearest(name: object, specs: Sequence[TensorSpec]) -> str:
    names = [spec.name for spec in specs]
    near = difflib.get_close_matches(str(name)[:80], names, 1)
    return f"did you mean '{near[0]}'?" if near else f"it has {listed(specs)}"
