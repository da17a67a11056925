"""Rates of counters between two looks, and over a window of looks."""

from collections import deque
from collections.abc import Mapping
from typing import Any, final

Counts = Mapping[str, float]


def grown(before: Counts, after: Counts, seconds: float) -> dict[str, float]:
    """Returns how much each counter grew per second; one that fell began anew.

    Example:
      >>> grown({"a": 1.0, "b": 9.0}, {"a": 3.0, "b": 2.0, "c": 4.0}, 2.0)
      {'a': 1.0, 'b': 1.0, 'c': 2.0}
    """
    if seconds <= 0:
        return {}
    return {
        name: (count - (was if (was := before.get(name, 0.0)) <= count else 0.0))
        / seconds
        for name, count in after.items()
    }


@final
class Window:
    """Sums of the last ``seconds``, of counters that are told as sums since a start.

    Args:
      seconds: how far back.

    Example:
      >>> window = Window(60)
      >>> for now, count in ((0, 100), (30, 160), (90, 190)):
      ...     window.add(now, {"n": count})
      >>> window.sums(), window.span
      ({'n': 30}, 60)
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._looks: deque[tuple[float, Mapping[str, Any]]] = deque()

    def add(self, now: float, counts: Mapping[str, Any]) -> None:
        """Adds a look; a counter that fell makes the window begin anew."""
        if self._looks:
            newest = self._looks[-1][1]
            if any(counts.get(name, 0) < count for name, count in newest.items()):
                self._looks.clear()
        self._looks.append((now, counts))
        while len(self._looks) > 2 and self._looks[1][0] <= now - self._seconds:
            self._looks.popleft()

    @property
    def span(self) -> float:
        """Seconds between the first look and the last."""
        return self._looks[-1][0] - self._looks[0][0] if self._looks else 0.0

    def sums(self) -> dict[str, Any]:
        """Returns by how much each counter grew; none before there were two looks."""
        if len(self._looks) < 2:
            return {}
        first, last = self._looks[0][1], self._looks[-1][1]
        return {name: count - first.get(name, 0) for name, count in last.items()}
