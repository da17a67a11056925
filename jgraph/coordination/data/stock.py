"""Stock of batches that a worker holds ahead of need, by how fast they go."""

from typing import Final, final

# Held ahead: for so many seconds of work, and never fewer than so many batches.
_AHEAD_S: Final = 1.0
_AHEAD: Final = 2


@final
class Stock:
    """How many batches to hold ahead, and when to ask for more.

    Args:
      now: seconds.

    Attributes:
      enough: batches that last for a while.

    Example:
      >>> stock = Stock(now=0.0)
      >>> stock.least, stock.enough
      (2, 2)
      >>> stock.learn(taken=2, now=0.1)  # 20 in a second, so twice as many
      >>> stock.learn(taken=6, now=0.3)
      >>> stock.least, stock.enough
      (4, 8)
    """

    def __init__(self, now: float) -> None:
        self.enough = _AHEAD
        self._asked_at, self._taken_then = now, 0

    @property
    def least(self) -> int:
        """With fewer, the dealer is asked for more."""
        return max(_AHEAD, self.enough // 2)

    def learn(self, taken: int, now: float) -> None:
        """Learns how many batches were taken by now; called at each ask."""
        seconds, batches = now - self._asked_at, taken - self._taken_then
        per_s = batches / max(seconds, 1e-6)
        self.enough = max(_AHEAD, min(int(per_s * _AHEAD_S), 2 * self.enough))
        self._asked_at, self._taken_then = now, taken
