"""Pace of local steps: how many a worker takes in a round of so many seconds."""

from typing import final


@final
class Pace:
    """Chooses the steps of the next round by how long those of the last one took.

    Args:
      seconds: of computing that a round is to take.
      most: steps of a round.

    Example:
      >>> pace = Pace(seconds=2.0, most=500)
      >>> pace.steps
      1
      >>> pace.took(0.02)
      >>> pace.steps
      100
    """

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds = seconds
        self._most = most
        self.steps = 1
        """Of the next round; the first is to find out how long one takes."""

    def took(self, seconds: float) -> None:
        """Learns how long the steps of the last round took to compute."""
        fit = self._seconds * self.steps / max(seconds, 1e-9)
        self.steps = max(1, min(round(fit), self._most))
