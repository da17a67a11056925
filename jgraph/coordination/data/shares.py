"""Shares of a synchronous update: how many pieces of a batch each replica computes.

The batch of an update is cut into pieces of one size. Each replica computes some in one
step, so the slowest step is the shortest where a replica's pieces are in proportion to
its speed. Whoever computes them, an update is of the same pieces.

Source: Jia et al., "Whale: Efficient Giant Model Training over Heterogeneous GPUs",
2022, which balances by declared instead of measured speeds.
"""

import heapq
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, final

_PIECES: Final = 8
"""Of a replica's batch, at most: a smaller piece computes less efficiently."""
_LEAST_STEPS: Final = 5
_LAST_STEPS: Final = 20
_ROUNDS: Final = 20
"""Shares stay for so many updates at least."""
_GAIN: Final = 0.9
"""They change if the slowest step then takes less than this part of its time."""


def pieces_of(batch_size: int, least: int = 1) -> int:
    """Returns into how many equal pieces to cut a batch; 1 if it cannot be cut well.

    Args:
      batch_size: examples of it.
      least: no fewer, if there are as many examples.

    Example:
      >>> pieces_of(128), pieces_of(100), pieces_of(13), pieces_of(100, least=9)
      (8, 5, 1, 10)
    """
    divisors = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
    usual = max(n for n in divisors if n <= _PIECES)
    if usual >= least:
        return usual
    return next((n for n in divisors if n >= least), batch_size)


@final
@dataclass(frozen=True, slots=True)
class Cut:
    """How the batches of updates are cut.

    Attributes:
      each: pieces of an update for each replica that takes part.
      total: pieces of an update, whoever takes part; 0: as ``each`` says.
      most: pieces of one replica at most.
      measured: shares follow the speed of the replicas; else they are even.
    """

    each: int
    total: int = 0
    most: int = 1
    measured: bool = False

    def of(self, replicas: int) -> int:
        """Returns the pieces of an update of so many replicas."""
        return min(self.total or self.each * replicas, self.most * replicas)


@final
class Shares:
    """How many pieces of each update every replica gets.

    They change only from one update to the next, and seldom: after twenty updates at
    the earliest, and where the slowest step becomes a tenth shorter.

    Args:
      cut: how batches are cut.

    Example:
      >>> shares = Shares(Cut(each=5, most=15, measured=True))
      >>> dict(shares.next(["a", "b", "c"]))
      {'a': 5, 'b': 5, 'c': 5}
      >>> for name, piece_s in ("a", 1.0), ("b", 1.0), ("c", 2.0):
      ...     shares.learn(name, piece_s)
      >>> dict(shares.next(["a", "b", "c"]))
      {'a': 6, 'b': 6, 'c': 3}
    """

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._piece_s: dict[str, float] = {}
        self._now: dict[str, int] = {}
        self._rounds = _ROUNDS

    def learn(self, replica: str, piece_s: float) -> None:
        """Learns how long a replica takes for a piece; 0: it does not know yet."""
        if self._cut.measured and piece_s > 0:
            self._piece_s[replica] = piece_s

    def next(self, replicas: Iterable[str]) -> Mapping[str, int]:
        """Returns the shares of the next update, of these replicas."""
        names = list(replicas)
        if names != list(self._now):
            self._change(self._balanced(names))
        elif self._rounds >= _ROUNDS and all(n in self._piece_s for n in names):
            better = self._balanced(names)
            if self._takes(better) < _GAIN * self._takes(self._now):
                self._change(better)
        self._rounds += 1
        return self._now

    def _change(self, shares: dict[str, int]) -> None:
        # The first change comes as soon as all speeds are known.
        self._rounds = 0 if all(n in self._piece_s for n in shares) else _ROUNDS
        self._now = shares

    def _takes(self, shares: Mapping[str, int]) -> float:
        return max(count * self._piece_s[name] for name, count in shares.items())

    def _balanced(self, names: list[str]) -> dict[str, int]:
        """Returns the shares with which the slowest step is the shortest."""
        known = [self._piece_s[name] for name in names if name in self._piece_s]
        usual = statistics.fmean(known) if known else 1.0
        seconds = [self._piece_s.get(name, usual) for name in names]
        counts = [1] * len(names)
        # Who would be done first with one more; of equals the first.
        heap = [(2 * each_s, number) for number, each_s in enumerate(seconds)]
        heapq.heapify(heap)
        for _ in range(self._cut.of(len(names)) - len(names)):
            _, number = heapq.heappop(heap)
            counts[number] += 1
            if counts[number] < self._cut.most:
                due = (counts[number] + 1) * seconds[number]
                heapq.heappush(heap, (due, number))
        return dict(zip(names, counts, strict=True))


@final
class PieceTimes:
    """How long a replica takes for a piece: the median of its last twenty steps.

    Example:
      >>> times = PieceTimes()
      >>> for seconds in 0.2, 0.4, 9.0, 0.4, 0.4:
      ...     times.learn(seconds, pieces=2)
      >>> times.piece_s
      0.2
    """

    def __init__(self) -> None:
        self._last = deque[float](maxlen=_LAST_STEPS)

    def learn(self, seconds: float, pieces: int) -> None:
        """Learns how long a step of so many pieces computed."""
        self._last.append(seconds / pieces)

    @property
    def piece_s(self) -> float:
        """Seconds; 0: after a few steps it is known."""
        known = len(self._last) >= _LEAST_STEPS
        return statistics.median(self._last) if known else 0.0
