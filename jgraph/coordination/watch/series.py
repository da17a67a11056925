"""Bounded time series: points of minimum, mean and maximum that merge in pairs."""

import math
from collections.abc import Sequence
from typing import Any, Final, final

MOST: Final = 600


@final
class Series:
    """A curve of at most ``most`` points, however long it goes on.

    When there are more, neighbours become one: a week has the size of a minute, and no
    extreme is lost. Values that are not finite are counted and left out.

    Args:
      most: points, at least 2.

    Attributes:
      odd: how many values were not finite.

    Example:
      >>> series = Series(most=4)
      >>> for x in range(6):
      ...     series.add(x, x * 10.0)
      >>> series.columns()["x"], series.columns()["mean"]
      ([1, 3, 5], [5.0, 25.0, 45.0])
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = max(2, most)
        self._stride = 1
        self._points: list[tuple[float, float, float, float, int]] = []
        self._open = 0  # values in the last point
        self.odd = 0

    def add(self, x: float, mean: float, low: Any = None, high: Any = None) -> None:
        """Appends a value, or what stands for several, at ``x``."""
        low, high = (mean if end is None else end for end in (low, high))
        if not all(map(_is_number, (x, mean, low, high))):
            self.odd += 1
            return
        if self._points and self._open < self._stride:
            self._points[-1] = _joined(self._points[-1], (x, low, mean, high, 1))
            self._open += 1
        else:
            self._points.append((x, low, mean, high, 1))
            self._open = 1
        if len(self._points) > self._most:
            self._halve()

    def cut(self, x: float) -> None:
        """Forgets all points after ``x``."""
        while self._points and self._points[-1][0] > x:
            self._points.pop()
            self._open = self._stride

    def after(self, x: float) -> list[tuple[float, float]]:
        """Returns the points from ``x`` on, as x and mean."""
        return [(p[0], p[2]) for p in self._points if p[0] >= x]

    @property
    def last(self) -> float | None:
        """The newest mean."""
        return self._points[-1][2] if self._points else None

    @property
    def fall(self) -> tuple[float, float] | None:
        """The greatest of the values until the least one, and that.

        Example:
          >>> series = Series()
          >>> for x, y in enumerate((3.0, 8.0, 1.0, 9.0)):
          ...     series.add(x, y)
          >>> series.fall
          (8.0, 1.0)
        """
        if not self._points:
            return None
        least = min(range(len(self._points)), key=lambda at: self._points[at][1])
        before = self._points[: least + 1]
        return max(point[3] for point in before), before[-1][1]

    def columns(self) -> dict[str, list[float]]:
        """Returns the points, column by column."""
        names: Sequence[tuple[str, int]] = (
            ("x", 0),
            ("min", 1),
            ("mean", 2),
            ("max", 3),
        )
        return {name: [point[at] for point in self._points] for name, at in names}

    def __len__(self) -> int:
        return len(self._points)

    def _halve(self) -> None:
        pairs = zip(self._points[::2], self._points[1::2], strict=False)
        merged = [_joined(one, other) for one, other in pairs]
        if len(self._points) % 2:
            merged.append(self._points[-1])
        else:
            self._open += self._stride  # the last point took in a whole one
        self._points = merged
        self._stride *= 2


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _joined(
    one: tuple[float, float, float, float, int],
    other: tuple[float, float, float, float, int],
) -> tuple[float, float, float, float, int]:
    count = one[4] + other[4]
    mean = one[2] + (other[2] - one[2]) * other[4] / count
    return other[0], min(one[1], other[1]), mean, max(one[3], other[3]), count
