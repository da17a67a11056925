"""Order of an iterable's batches among workers that train in step."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import final

from jgraph.runtime.data.batches import Array


@final
class Shares:
    """Gives the batches of an iterable by their numbers in a run.

    Workers in step get the numbers in turn, and ask for their batches ahead of need,
    one more than the other. Batches before the one that is asked for are read and kept
    for the workers that they are due to. So each update is of neighbours in the order
    of the iterable, and at its end only batches that make no whole update are left out.

    A number whose batch was given has another one when it is asked for again: who held
    the first was lost, and an iterable does not give it twice.

    Args:
      take: returns the next batch of the iterable; raises an error at its end.
      open_numbers: numbers before ``end`` that are still to come, ascending.
      end: the first number of those that were never dealt.

    Example:
      >>> batches = iter([{"x": 0}, {"x": 1}, {"x": 2}])
      >>> shares = Shares(lambda: next(batches), [], 0)
      >>> shares.read(2), shares.read(0), shares.read(1)
      ({'x': 2}, {'x': 0}, {'x': 1})
    """

    def __init__(
        self,
        take: Callable[[], dict[str, Array]],
        open_numbers: Iterable[int],
        end: int,
    ) -> None:
        self._take = take
        self._open_numbers = deque(open_numbers)
        self._end = end
        self._batches: dict[int, dict[str, Array]] = {}
        self._lock = threading.Lock()
        self._source = threading.Lock()  # held to take from the iterable

    def read(self, number: int) -> dict[str, Array]:
        """Returns the batch of a number, from any thread."""
        while True:
            with self._lock:
                if number in self._batches:
                    return self._batches.pop(number)
            with self._source:
                with self._lock:
                    if number in self._batches:
                        continue  # another thread took it meanwhile
                    is_to_come = number >= self._end or number in self._open_numbers
                batch = self._take()
                if not is_to_come:
                    return batch
                with self._lock:
                    self._batches[self._next()] = batch

    def _next(self) -> int:
        if self._open_numbers:
            return self._open_numbers.popleft()
        self._end += 1
        return self._end - 1
