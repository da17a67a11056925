"""Metrics of steps as loops tell them: their names, and means of whole numbers.

A mean of whole numbers over workers is exact. A worker sends a large whole number as
pieces of 11 bits, whose float32 sums are exact, and whoever reads the mean puts them
together as float64.
"""

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]

CONTRIBUTIONS: Final = "contributions"
"""Metric of a synchronous step: of how many contributions its update is the mean."""

LOCAL_STEPS: Final = "local_steps"
"""Metric of an update from local steps that are not as many for each worker."""

WHOLE: Final = "<whole>"
"""Prefix of the fetch that has the pieces of a metric of whole numbers."""

BITS: Final = 11
"""Of a piece."""


def from_pieces(means: Array, counts: Array) -> Array:
    """Returns the means of whole numbers, float64[steps, …].

    Args:
      means: of the pieces, float32[steps, n, …].
      counts: of how many each is the mean, int[steps].

    Example:
      >>> means = np.float32([[904.0, 2.0, 0.0], [0.5, 0.0, 0.0]])
      >>> from_pieces(means, np.array([1, 2])).tolist()
      [5000.0, 0.5]
    """
    number = counts.reshape(-1, *[1] * (means.ndim - 1)).astype(np.float64)
    # What was summed is whole: a mean that was rounded to float32 still tells it.
    sums = np.rint(means.astype(np.float64) * number)
    weights = 2.0 ** (BITS * np.arange(means.shape[1]))
    totals = np.tensordot(np.moveaxis(sums, 1, -1), weights, axes=1)
    result: Array = totals / number[:, 0]
    return result


def metrics_by_name(names: Sequence[str], fetches: Sequence[Array]) -> dict[str, Array]:
    """Returns what a loop fetched, a row per step, by the names of the metrics."""
    by_name = dict(zip(names, fetches, strict=bool(names)))
    return {
        name.removeprefix(WHOLE): from_pieces(values, by_name[CONTRIBUTIONS])
        if name.startswith(WHOLE)
        else values
        for name, values in by_name.items()
    }
