"""Data types of examples: those that JAX makes of what a reader has."""

from functools import cache
from typing import Any

import jax
import numpy as np

from jgraph._compat import narrow_types, wide_types
from jgraph.errors import SourceError
from jgraph.runtime.data.batches import Array


def as_jax_type(array: Array, where: str, wide: bool) -> Array:
    """Returns an array in the type that JAX makes of its own.

    Args:
      array: as it was read.
      where: for messages.
      wide: 64-bit types are switched on in the program that it is for.

    Raises:
      SourceError: not numbers, or whole numbers too large for JAX's type.
    """
    if array.dtype.kind not in "biufcV":
        raise SourceError(f"{where} is {array.dtype}, not numbers; store ids for text")
    dtype = _jax_type(array.dtype, wide)
    if dtype != array.dtype and array.dtype.kind in "iu" and array.size:
        limits, low, high = np.iinfo(dtype), int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            raise SourceError(
                f"{where} has values from {low} to {high}, too large for {dtype}; "
                "store smaller numbers, or switch 64-bit types on with JAX_ENABLE_X64=1"
            )
    return array.astype(dtype, copy=False)


@cache
def _jax_type(dtype: "np.dtype[Any]", wide: bool) -> "np.dtype[Any]":
    with wide_types() if wide else narrow_types():
        return jax.dtypes.canonicalize_dtype(dtype)
