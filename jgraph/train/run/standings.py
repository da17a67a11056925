"""Standings of workers and the loss curve so far, for live displays."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, final

from jgraph.graph.ir import TaskName
from jgraph.train.evaluation.evaluations import in_thread
from jgraph.train.model.metrics import as_float64
from jgraph.train.state.runner import Chunk, Staleness

PARTS: Final = ("wait", "input", "pull", "compute", "push", "other")
"""Parts of a step, in their order; see ``Run.profile``."""

_POINTS: Final = 60
_NEWEST: Final = 24
_BARS: Final = "▁▂▃▄▅▆▇█"


@final
@dataclass(frozen=True, slots=True)
class WorkerStanding:
    """How one worker stands.

    Attributes:
      name: of its task.
      steps: done in this run.
      steps_per_s: at its last report.
      shares: of its time, by part of a step; see ``Run.profile``.
      staleness: its updates, by how many others came before them; see
        ``Run.staleness``.
      late: its gradients that came too late and did not count; see ``Run.dropped``.
    """

    name: str
    steps: int
    steps_per_s: float
    shares: Mapping[str, float] = field(default_factory=dict)
    staleness: Mapping[int, int] = field(default_factory=dict)
    late: int = 0

    def __str__(self) -> str:
        shares_text = " ".join(
            f"{part} {share:.0%}" for part, share in self.shares.items()
        )
        stale = self.staleness_text()
        progress = f"step {self.steps}  {self.steps_per_s:.1f} steps/s  {shares_text}"
        text = f"{self.name}  {progress}" + (f"  stale {stale}" if stale else "")
        return text + (f"  late {self.late}" if self.late else "")

    def staleness_text(self) -> str:
        """Returns the most frequent staleness, and the largest; empty if unknown.

        Example:
          >>> WorkerStanding("w", 9, 1.0, staleness={0: 2, 1: 6, 4: 1}).staleness_text()
          '1 (up to 4)'
        """
        if not self.staleness:
            return ""
        often = max(self.staleness, key=lambda age: (self.staleness[age], -age))
        return f"{often} (up to {max(self.staleness)})"


@final
class Standings:
    """Sums up what workers report, in memory that does not grow with the run.

    Args:
      names: of the workers, by replica.
      staleness: asks how old updates were, in a thread of its own: the run does not
        wait for the answer, nor end by an error.
    """

    def __init__(
        self,
        names: Sequence[str] = (),
        staleness: Callable[[], Staleness] | None = None,
    ) -> None:
        self._names = names
        self._ask = staleness
        self._staleness: Staleness = {}
        self._answer: Future[Staleness] | None = None
        self._late: dict[TaskName, int] = {}
        self._rates = Rates()
        self._steps: Counter[int] = Counter()
        self._times: dict[int, Counter[str]] = {}
        self._curve = Curve()

    def add(self, chunk: Chunk) -> None:
        """Takes what a replica did."""
        for one in chunk.of_workers or [chunk]:
            self._steps[one.replica] += len(one)
            self._times.setdefault(one.replica, Counter()).update(one.times)
            self._rates.add(one)
        self._late.update(chunk.dropped)
        self._curve.add(float(as_float64(chunk.metrics["loss"]).mean()))

    def read_staleness(self) -> None:
        """Asks how old updates were, and takes the answer to the last question."""
        if self._ask is None:
            return
        if self._answer is not None:
            if not self._answer.done():
                return
            if self._answer.exception() is None:
                self._staleness = self._answer.result()
        self._answer = in_thread(self._ask, "jgraph-staleness")

    @property
    def curve(self) -> tuple[float, ...]:
        """Losses from the beginning, in at most 60 points."""
        return self._curve.points

    def workers(self) -> tuple[WorkerStanding, ...]:
        """Returns how each stands that has reported."""
        return tuple(self._worker(n) for n in sorted(self._steps))

    def _worker(self, replica: int) -> WorkerStanding:
        is_known = replica < len(self._names)
        name = self._names[replica] if is_known else f"replica {replica}"
        times = self._times[replica]
        total = sum(times.values()) or 1.0
        shares = {part: times[part] / total for part in PARTS if part in times}
        ages: Counter[int] = Counter()
        for task, by_ps in self._staleness.items():
            for updates in by_ps.values() if task == name else ():
                ages.update(updates)
        steps, rate = self._steps[replica], self._rates.of[replica]
        late = self._late.get(TaskName(name), 0)
        return WorkerStanding(name, steps, rate, shares, dict(ages), late)


@final
class Rates:
    """Steps per second of replicas, by their own clocks.

    Attributes:
      of: by replica, at its last report.
    """

    def __init__(self) -> None:
        self.of: dict[int, float] = {}
        self._last_s: dict[int, float] = {}

    def add(self, chunk: Chunk) -> float:
        """Takes what a replica did; returns the rate of all together."""
        last, before = float(chunk.seconds[-1]), self._last_s.get(chunk.replica, 0.0)
        # The loop of a worker that came back counts its time anew.
        seconds = last if last < before else last - before
        self._last_s[chunk.replica] = last
        self.of[chunk.replica] = len(chunk) / max(seconds, 1e-9)
        return sum(self.of.values())


@final
class Curve:
    """Values in order, in a bounded number of means over stretches of equal length.

    Example:
      >>> curve = Curve(limit=4)
      >>> for value in range(8):
      ...     curve.add(value)
      >>> curve.points
      (0.5, 2.5, 4.5, 6.5)
    """

    def __init__(self, limit: int = _POINTS) -> None:
        self._limit = limit
        self._means: list[float] = []
        self._stretch: list[float] = []
        self._stride = 1

    def add(self, value: float) -> None:
        """Appends a value; one that is not finite is left out."""
        if not math.isfinite(value):
            return
        self._stretch.append(value)
        if len(self._stretch) == self._stride:
            if len(self._means) == self._limit:
                pairs = zip(self._means[::2], self._means[1::2], strict=True)
                self._means = [(a + b) / 2 for a, b in pairs]
                self._stride *= 2
            if len(self._stretch) == self._stride:
                self._means.append(sum(self._stretch) / self._stride)
                self._stretch = []

    @property
    def points(self) -> tuple[float, ...]:
        """The means."""
        return tuple(self._means)


def bars(values: Iterable[float]) -> str:
    """Returns the newest values as a line of bars, the last on the right.

    Example:
      >>> bars([3.0, 2.0, 1.0])
      '█▅▁'
    """
    newest = list(values)[-_NEWEST:]
    if not newest:
        return ""
    low, high = min(newest), max(newest)
    scale = (len(_BARS) - 1) / (high - low or 1.0)
    return "".join(_BARS[round((value - low) * scale)] for value in newest)
