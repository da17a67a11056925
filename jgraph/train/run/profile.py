"""Profile of training steps: time by part and replica."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from jgraph.train.run.standings import PARTS
from jgraph.train.state.runner import Chunk
from jgraph.view import markup


@final
@dataclass(frozen=True, slots=True)
class ReplicaTimes:
    """The steps of one replica: how many, and seconds by part, summed over them."""

    replica: int
    steps: int
    seconds: Mapping[str, float]

    @property
    def ms_per_step(self) -> float:
        """Milliseconds of one step, on average."""
        return 1e3 * sum(self.seconds.values()) / max(self.steps, 1)

    def share(self, part: str) -> float:
        """Returns the share of a part in the time, 0 to 1."""
        total = sum(self.seconds.values())
        return self.seconds.get(part, 0.0) / total if total else 0.0


@final
@dataclass(frozen=True, slots=True)
class Profile:
    """Where the time of a run's steps went.

    Attributes:
      parts: names of the parts, in the order of a step.
      replicas: one row per replica.

    Example:
      >>> rows = [ReplicaTimes(0, 10, {"input": 0.01, "compute": 0.03})]
      >>> print(Profile(("input", "compute"), rows))
      replica  steps  ms/step  input  compute
            0     10     4.00    25%      75%
    """

    parts: tuple[str, ...]
    replicas: Sequence[ReplicaTimes]

    def __str__(self) -> str:
        head = self._head()
        lines = [head, *self._rows()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        return "\n".join(
            "  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True))
            for line in lines
        )

    def _repr_html_(self) -> str:
        return markup.table(self._head(), self._rows())

    def _head(self) -> list[str]:
        return ["replica", "steps", "ms/step", *self.parts]

    def _rows(self) -> list[list[str]]:
        return [
            [
                str(row.replica),
                str(row.steps),
                f"{row.ms_per_step:.2f}",
                *(f"{row.share(part):.0%}" for part in self.parts),
            ]
            for row in self.replicas
        ]


def make_profile(chunks: Sequence[Chunk]) -> Profile:
    """Sums what the replicas of a run reported."""
    parts: dict[str, None] = {}
    seconds: dict[int, dict[str, float]] = {}
    steps: Counter[int] = Counter()
    for chunk in (one for all_ in chunks for one in all_.of_workers or [all_]):
        parts.update(dict.fromkeys(chunk.times))
        steps[chunk.replica] += len(chunk)
        times = seconds.setdefault(chunk.replica, {})
        for part, value in chunk.times.items():
            times[part] = times.get(part, 0.0) + value
    order = [p for p in PARTS if p in parts] + [p for p in parts if p not in PARTS]
    rows = [ReplicaTimes(r, steps[r], dict(seconds[r])) for r in sorted(seconds)]
    return Profile(tuple(order), rows)
