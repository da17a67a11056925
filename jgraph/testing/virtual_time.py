"""Virtual time: what happens when, decided by a seed."""

import heapq
import itertools
import random
from collections.abc import Callable


class Simulation:
    """What happens when; the same seed gives the same run.

    Attributes:
      now: virtual seconds.
      trace: what happened, for comparing runs.

    Example:
      >>> sim = Simulation(seed=0)
      >>> sim.later(2.0, lambda: sim.note("rings"))
      >>> sim.run()
      >>> sim.trace
      ['2.000000 rings']
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)  # noqa: S311
        self.now = 0.0
        self.trace: list[str] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Calls ``act`` then."""
        self.at(self.now + seconds, act)

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Calls ``act`` at that time, after what was asked for the same time before."""
        heapq.heappush(self._events, (when, next(self._numbers), act))

    def note(self, text: str) -> None:
        """Adds to the trace."""
        self.trace.append(f"{self.now:.6f} {text}")

    def run(
        self, is_over: Callable[[], bool] = lambda: False, until: float = float("inf")
    ) -> None:
        """Lets things happen, until there are none."""
        while not is_over() and self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()
