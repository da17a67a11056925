"""Joining: whether a request runs as it comes, or where later ones can join it.

What runs at once, on the event loop, costs least by itself, and nothing is read before
it has ended: the next requests find nobody to run with. What runs aside, in a thread,
has company if others ask. That pays if a row costs less among others, by more than a
thread does; and if there are others, which only what runs aside can see.
"""

from collections import deque
from typing import Final, final

from jgraph.coordination.serving.batching import Limits

SHORT_S: Final = 0.002
"""What takes longer never runs on the event loop."""
WORTH_S: Final = 0.00015
"""What a row has to cost less among others: about what a thread costs."""
LATEST: Final = 16
"""Executions of a number of rows of which the shortest says how long one is."""
LOOK_EVERY: Final = 16
"""Of requests that run at once, as nobody else asks, one is aside, to look again."""
LONELY: Final = 16
"""Executions aside to which nobody came, one after the other: nobody else asks."""


@final
class Joining:
    """How long executions of a function take, and so how its requests run.

    Args:
      limits: what it takes at a time.

    Example:
      >>> joining = Joining(Limits(max_rows=64, buckets=(1, 64)))
      >>> joining.took(1, 0.0010)
      >>> joining.took(64, 0.0032)
      >>> round(joining.saved_s * 1e6)  # of a row, 1000 us alone, 50 among 64
      950
      >>> joining.runs_at_once(1)
      False
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._latest_s: dict[int, deque[float]] = {}
        self._took_s: dict[int, float] = {}
        self._at_once = LOOK_EVERY
        self._lonely = 0
        self._has_company = False
        self.saved_s = 0.0
        """What a row costs less among others than alone."""

    def took(self, rows: int, seconds: float) -> None:
        """Notes how long an execution was.

        One that other work of the machine held up says little, and where there is much
        of it every third one is: the shortest of the latest counts.
        """
        latest_s = self._latest_s.get(rows)
        if latest_s is None:
            latest_s = self._latest_s[rows] = deque(maxlen=LATEST)
        latest_s.append(seconds)
        shortest_s = min(latest_s)
        if shortest_s != self._took_s.get(rows):
            self._took_s[rows] = shortest_s
            self.saved_s = self._saved_s()

    def _saved_s(self) -> float:
        alone_s = self._took_s.get(self._limits.bucket(1))
        if alone_s is None or not self._limits.merges:
            return 0.0
        return max(alone_s - min(s / rows for rows, s in self._took_s.items()), 0.0)

    def expected_s(self, rows: int) -> float:
        """How long an execution of so many rows takes; a second, if none has been."""
        return self._took_s.get(rows, max(self._took_s.values(), default=1.0))

    @property
    def runs_some_at_once(self) -> bool:
        """Whether there is a number of rows that runs at once."""
        return any(map(self.runs_at_once, self._took_s))

    def runs_at_once(self, rows: int) -> bool:
        """Whether a request of so many rows, for which nobody waits, should run now."""
        if self._took_s.get(rows, SHORT_S) >= SHORT_S:
            return False
        if self.saved_s < WORTH_S:
            return True
        return not self._has_company and self._at_once < LOOK_EVERY

    def runs_here(self, rows: int) -> bool:
        """Whether an execution should be on the event loop, whoever else may ask."""
        return self.saved_s < WORTH_S and self._took_s.get(rows, SHORT_S) < SHORT_S

    def ran_at_once(self) -> None:
        """Notes that a request did."""
        self._at_once += 1

    def ran_aside(self, *, had_company: bool) -> None:
        """Notes an execution aside: whether several ran in it, or came meanwhile."""
        self._at_once = 0
        self._lonely = 0 if had_company else self._lonely + 1
        if had_company or self._lonely >= LONELY:
            self._has_company = had_company
