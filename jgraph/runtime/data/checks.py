"""Checks of data before batches are cut from it."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from jgraph.errors import DataError

Array: TypeAlias = np.ndarray[Any, Any]


def check_lengths(lengths: Mapping[str, int]) -> int:
    """Returns the number of examples that all fields have.

    Raises:
      DataError: there is no field or no example, or two fields differ in length.
    """
    if not lengths:
        raise DataError("the data has no field; give arrays, for example (x, y)")
    (first, length), *others = lengths.items()
    for name, other in others:
        if other != length:
            raise DataError(
                f"data field '{name}' has {other} examples and '{first}' has {length}; "
                "all fields must have the same length along axis 0",
                field=name,
            )
    if not length:
        raise DataError(f"data field '{first}' has no examples", field=first)
    return length


def check_batch_size(batch_size: int, length: int) -> None:
    """Refuses a batch size that ``length`` examples cannot fill.

    Raises:
      DataError: less than 1, or more than there are examples.
    """
    if batch_size < 1:
        raise DataError(f"batch_size is {batch_size}; it must be at least 1")
    if batch_size > length:
        raise DataError(
            f"batch_size is {batch_size}, but the data has only {length} examples; "
            f"choose batch_size={length} or less",
            batch_size=batch_size,
            examples=length,
        )
