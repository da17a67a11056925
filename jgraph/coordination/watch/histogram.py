"""Histogram of seconds in fixed buckets: sums that any reader may subtract."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, final

BOUNDS_S: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 3.0, 10.0),
)
"""Upper bounds of the buckets; one more has all that is longer."""


@final
class Histogram:
    """Counts of how long things took.

    Attributes:
      buckets: how many were within each bound and not within the one before.
      seconds: of all together.

    Example:
      >>> histogram = Histogram()
      >>> for seconds in (0.0004, 0.003, 0.004, 60.0):
      ...     histogram.add(seconds)
      >>> histogram.buckets
      [1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    """

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS_S) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """Counts one."""
        self.buckets[bisect_left(BOUNDS_S, seconds)] += 1
        self.seconds += seconds


def quantile(buckets: Sequence[float], share: float) -> float | None:
    """Returns the seconds within which ``share`` of all were; None: there were none.

    Within a bucket they are taken to be spread evenly; of those above the last bound
    that bound is all that is known.

    Example:
      >>> quantile([0, 0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], 0.5)
      0.0035
    """
    remaining = share * sum(buckets)
    if remaining <= 0:
        return None
    below = 0.0
    for count, bound in zip(buckets, BOUNDS_S, strict=False):
        if remaining <= count:
            return below + (bound - below) * remaining / count
        remaining, below = remaining - count, bound
    return BOUNDS_S[-1]
