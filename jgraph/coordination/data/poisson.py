"""Poisson sampling of batches: rate of each example, and most that a batch holds.

An update is of a sample that has each example with the same probability, whatever else
is in it: what accountants of differential privacy assume. Worker ``i`` of ``W`` samples
the examples ``i, i + W, …``, so that no example is in a sample twice. A sample has any
size; one that is larger than ``capacity`` comes once in 2^80 batches, or less often.
"""

import math
from typing import Final

_LOG_ODDS: Final = 80 * math.log(2.0)


def sampling_rate(examples: int, batch_size: int, workers: int) -> float:
    """Returns the probability of each example to be in the sample of an update.

    Args:
      examples: of the data.
      batch_size: how many one worker samples, on average.
      workers: who sample.

    Example:
      >>> sampling_rate(1000, 16, 4)
      0.064
    """
    return min(1.0, batch_size * workers / examples)


def population(examples: int, workers: int, worker: int) -> int:
    """Returns how many examples a worker samples from.

    Example:
      >>> [population(10, 4, worker) for worker in range(4)]
      [3, 3, 2, 2]
    """
    return len(range(worker, examples, workers))


def capacity(examples: int, batch_size: int, workers: int) -> int:
    """Returns how many examples of one worker there is room for.

    By Chernoff's bound a binomial sample is larger with a probability of 2^-80 at most.

    Args:
      examples: of the data.
      batch_size: how many one worker samples, on average.
      workers: who sample.

    Example:
      >>> capacity(60_000, 256, 1), capacity(40, 16, 2)
      (441, 20)
    """
    most = population(examples, workers, 0)
    rate = sampling_rate(examples, batch_size, workers)
    low, high = min(most, math.ceil(most * rate)), most
    while low < high:
        middle = (low + high) // 2
        if most * _divergence((middle + 1) / most, rate) >= _LOG_ODDS:
            high = middle
        else:
            low = middle + 1
    return low


def _divergence(x: float, rate: float) -> float:
    """Returns that of a coin of probability ``x`` from one of ``rate``, in nats."""
    if x >= 1.0:
        return math.inf if x > 1.0 else -math.log(rate)
    if rate >= 1.0:
        return math.inf
    return x * math.log(x / rate) + (1 - x) * math.log((1 - x) / (1 - rate))
