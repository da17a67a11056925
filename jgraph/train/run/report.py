"""Report: the figures of a run that a display shows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from jgraph.graph.ir import TaskName
from jgraph.train.evaluation.evaluations import Copy
from jgraph.train.run.standings import WorkerStanding


@final
@dataclass(frozen=True, slots=True)
class Report:
    """How a run stands; callbacks are given one now and then.

    ``metrics`` are means over the steps since the last report; ``evaluation`` is set
    when the model was just evaluated, as it was after ``evaluation_step`` updates.
    Rates are over the same time. ``dropped`` counts the gradients of workers that came
    too late so far; see ``Run.dropped``. ``curve``
    has the losses from the beginning, in at most 60 points, and ``workers`` how each
    stands that has reported. ``copy`` is what was evaluated, where it is kept.
    """

    step: int
    steps: int
    seconds: float
    steps_per_s: float
    examples_per_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluation: Mapping[str, float] | None = None
    evaluation_step: int = 0
    dropped: Mapping[TaskName, int] = field(default_factory=dict)
    curve: Sequence[float] = ()
    workers: Sequence[WorkerStanding] = ()
    copy: Copy | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        parts = [f"step {self.step}/{self.steps}", *self.facts()]
        return "  ".join(parts)

    def facts(self) -> list[str]:
        """Returns rates and metrics, each as short text."""
        return [*self.rates(), *self.values()]

    def rates(self) -> list[str]:
        """Returns steps and examples per second, as text."""
        return [f"{self.steps_per_s:.1f} steps/s", f"{self.examples_per_s:.0f} ex/s"]

    def evaluated(self) -> dict[str, float]:
        """Returns the metrics of the evaluation, under the names ``eval_…``."""
        return {f"eval_{k}": v for k, v in (self.evaluation or {}).items()}

    def values(self) -> list[str]:
        """Returns the metrics, as text."""
        values = {**self.metrics, **self.evaluated()}
        late = [f"{task} late {n}" for task, n in sorted(self.dropped.items())]
        return [*(f"{name} {value:.4f}" for name, value in values.items()), *late]
