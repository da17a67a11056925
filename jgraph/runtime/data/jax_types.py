"""Data types of examples: those that JAX makes of what a reader has."""

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
    with wide_types() if wide else narrow_types():
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype != array.dtype and array.dtype.kind in "iu" and array.size:
        limits, low, high = np.iinfo(dtype), int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            raise SourceError(
                f"{where} has values from {low} to {high}, too large for {dtype}; "
                "store smaller numbers, or switch 64-bit types on with JAX_ENABLE_X64=1"
            )
    return array.astype(dtype, copy=False)
