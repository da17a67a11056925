"""Clock offsets and drift between tasks, from round trips and messages, with bounds.

The clocks of two machines have nothing to do with each other. A message bounds their
difference: it cannot arrive before it was sent. From bounds in both directions follows
an interval, and its middle breaks none of them.

Source: Mills, "Internet Time Synchronization: the Network Time Protocol", 1991, for
the offset from one round trip; Moon, Skelly and Towsley, "Estimation and Removal of
Clock Skew from Network Delay Measurements", 1999, for drift between convex hulls.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Final, TypeAlias, TypeVar, final

import numpy as np

MOST_DRIFT: Final = 2e-4
"""Seconds a second between two clocks: quartz is off by 1e-4 at most."""
_TRIPS: Final = 32

K = TypeVar("K", bound=Hashable)
Bounds: TypeAlias = dict[tuple[K, K], float]
"""By pair (a, b): how far at most the clock of b is ahead of that of a, in seconds."""
_Point: TypeAlias = tuple[float, float]


@final
@dataclass(frozen=True, slots=True)
class RoundTrip:
    """A question and its answer.

    Attributes:
      sent_s: by the clock of who asks.
      received_s: by the clock of who answers.
      answered_s: by the clock of who answers.
      back_s: by the clock of who asks.
    """

    sent_s: float
    received_s: float
    answered_s: float
    back_s: float

    @property
    def is_possible(self) -> bool:
        """Whether no clock stood still or went back."""
        asked, away = self.back_s - self.sent_s, self.answered_s - self.received_s
        return isfinite(asked) and isfinite(away) and asked > 0 and away >= 0


@final
@dataclass(frozen=True, slots=True)
class ClockFit:
    """A clock beside the reference: how far ahead, and how sure that is.

    Attributes:
      offset_s: how far the clock is ahead at the time ``at_s``.
      error_s: by how much that may be off, at any time that was looked at.
      at_s: by the reference.
      drift: seconds that it gains in one second of the reference.

    Example:
      >>> ClockFit(offset_s=100.0, error_s=1e-5).here(102.5)
      2.5
    """

    offset_s: float
    error_s: float
    at_s: float = 0.0
    drift: float = 0.0

    def here(self, there_s: float) -> float:
        """Returns a time of that clock by the reference."""
        since = (there_s - self.at_s - self.offset_s) / (1 + self.drift)
        return self.at_s + since

    def there_to_here(self, there_s: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Does the same with many times."""
        since: np.ndarray[Any, Any]
        since = (there_s - (self.at_s + self.offset_s)) / (1 + self.drift)
        return since + self.at_s


SAME: Final = ClockFit(0.0, 0.0)
"""That is the reference itself."""


def fit(trips: Iterable[RoundTrip], since_s: float = inf) -> ClockFit | None:
    """Returns a line that breaks no bound of any round trip; None without a trip.

    A clock drifts only as far as a bound shows that it does. Where there is no such
    line, as when a clock jumped, the offset is that of the best trip and the error says
    by how much others contradict it.

    Args:
      trips: of one clock; those that are impossible are left out.
      since_s: the error holds from there on, to the last trip, by the clock of who
        asks; from the first trip if unset.

    Example:
      >>> found = fit([RoundTrip(1.0, 101.25, 101.25, 1.5)])
      >>> found.offset_s, round(found.error_s, 3)
      (100.0, 0.25)
    """
    possible = [trip for trip in trips if trip.is_possible]
    if not possible:
        return None
    best = min(possible, key=_uncertainty)
    first = min(trip.sent_s for trip in possible)
    last = max(trip.back_s for trip in possible)
    possible = _best_of_each_time(possible, first, last)
    at = (best.sent_s + best.back_s) / 2
    above = [(t.sent_s - at, t.received_s - t.sent_s) for t in possible]
    below = [(t.back_s - at, t.answered_s - t.back_s) for t in possible]
    lines = list(_lines(_hull(above, upper=False), _hull(below, upper=True)))
    if not lines:
        offset = best.received_s - best.sent_s, best.answered_s - best.back_s
        worst = max(abs(y - sum(offset) / 2) for _, y in (*above, *below))
        return ClockFit(sum(offset) / 2, worst, at)
    ends = (min(first, since_s) - at, last - at)
    least, most = max(y for _, y in below), min(y for _, y in above)
    if least <= most:
        offset_s, drift = (least + most) / 2, 0.0
    else:
        # What lies between lines that break no bound breaks none either.
        extremes = [line for moment in ends for line in _extremes(lines, moment)]
        offset_s = sum(offset for offset, _ in extremes) / len(extremes)
        drift = sum(drift for _, drift in extremes) / len(extremes)
    off = (o + d * m - offset_s - drift * m for o, d in lines for m in ends)
    return ClockFit(offset_s, max(map(abs, off)), at, drift)


def _extremes(lines: Sequence[_Point], moment: float) -> list[_Point]:
    """Returns a line that is the lowest at a time, and one that is the highest."""
    by_height = sorted(lines, key=lambda line: line[0] + line[1] * moment)
    return [by_height[0], by_height[-1]]


def _best_of_each_time(
    trips: Iterable[RoundTrip], first: float, last: float
) -> list[RoundTrip]:
    """Returns those that say most: who asks more often knows more, and no slower."""
    best: dict[int, RoundTrip] = {}
    for trip in trips:
        when = int(_TRIPS * (trip.sent_s - first) / (last - first))
        if when not in best or _uncertainty(trip) < _uncertainty(best[when]):
            best[when] = trip
    return list(best.values())


def _uncertainty(trip: RoundTrip) -> float:
    return (trip.back_s - trip.sent_s) - (trip.answered_s - trip.received_s)


def _hull(points: Iterable[_Point], *, upper: bool) -> list[_Point]:
    """Returns the corners of one side of the convex hull, by time."""
    sign = -1.0 if upper else 1.0
    hull: list[_Point] = []
    for x, y in sorted((x, sign * y) for x, y in points):
        while len(hull) > 1:
            (ax, ay), (bx, by) = hull[-2], hull[-1]
            if (by - ay) * (x - bx) < (y - by) * (bx - ax):
                break
            hull.pop()
        if hull and hull[-1][0] == x:
            continue  # the lower one of these is there
        hull.append((x, y))
    return [(x, sign * y) for x, y in hull]


def _lines(above: Sequence[_Point], below: Sequence[_Point]) -> Iterable[_Point]:
    """Yields the corners of all (offset, drift) whose line passes between the two."""
    corners = [*above, *below]
    for n, (x, y) in enumerate(corners):
        drifts = [-MOST_DRIFT, MOST_DRIFT]
        drifts += [(y2 - y) / (x2 - x) for x2, y2 in corners[n + 1 :] if x2 != x]
        for drift in drifts:
            offset = y - drift * x
            if abs(drift) <= MOST_DRIFT and _passes(offset, drift, above, below):
                yield offset, drift


def _passes(
    offset: float, drift: float, above: Sequence[_Point], below: Sequence[_Point]
) -> bool:
    slack = 1e-9
    return all(offset + drift * x <= y + slack for x, y in above) and all(
        offset + drift * x >= y - slack for x, y in below
    )


def bound(bounds: Mapping[tuple[K, K], float], a: K, b: K) -> float:
    """Returns how far at most the clock of b is ahead of that of a."""
    return 0.0 if a == b else bounds.get((a, b), inf)


def tighten(bounds: Bounds[K], a: K, b: K, ahead_s: float) -> None:
    """Takes a bound, if it says more than what is known."""
    if ahead_s < bound(bounds, a, b):  # not if it is no number
        bounds[a, b] = ahead_s


def offsets(
    bounds: Bounds[K], clocks: Sequence[K], reference: K
) -> dict[K, tuple[float, float]]:
    """Returns how far each clock is ahead of the reference, and what that may be off.

    A clock that nothing bounds on both sides is taken for the reference.

    Args:
      bounds: between any two.
      clocks: all of them.
      reference: one of them.

    Example:
      >>> bounds = {("a", "b"): 5.0, ("b", "a"): -3.0}
      >>> offsets(bounds, ["a", "b"], "a")
      {'a': (0.0, 0.0), 'b': (4.0, 1.0)}
    """
    around = dict(bounds)
    # The tightest bound between two clocks may lead over a third one.
    for via in clocks:
        for a in clocks:
            for b in clocks:
                tighten(around, a, b, bound(around, a, via) + bound(around, via, b))
    found = {}
    for clock in clocks:
        most, least = bound(around, reference, clock), -bound(around, clock, reference)
        known = isfinite(most) and isfinite(least)
        middle = (most + least) / 2, abs(most - least) / 2
        found[clock] = middle if known else (0.0, 0.0)
    return found
