"""Wait times at a gate: steps that may not read yet, and sums of those that could."""

from typing import final

from jgraph.clock import Clock
from jgraph.runtime.rendezvous import StepKey


@final
class Waits:
    """Counts the steps that wait.

    Args:
      clock: tells how long.

    Attributes:
      over: how many waited and do so no more.
      seconds: they waited, together.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: dict[StepKey, float] = {}
        self.over = 0
        self.seconds = 0.0

    def begin(self, step: StepKey) -> None:
        """A step waits from now on."""
        self._since[step] = self._clock.now()

    def end(self, step: StepKey) -> None:
        """It does so no more, if it did."""
        since = self._since.pop(step, None)
        if since is not None:
            self.over += 1
            self.seconds += self._clock.now() - since

    @property
    def waiting(self) -> int:
        """How many wait now."""
        return len(self._since)

    @property
    def oldest_s(self) -> float:
        """How long the first of them waits."""
        if not self._since:
            return 0.0
        return self._clock.now() - min(self._since.values())
