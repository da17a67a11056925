"""Conversion of replicas' chunks to reports: rates, means, evaluations."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import final

from jgraph.clock import Clock
from jgraph.runtime.data.batches import Array
from jgraph.train.evaluation.evaluations import Evaluation, Evaluations
from jgraph.train.model.metrics import as_float64, is_complex
from jgraph.train.privacy.accounting import Spending
from jgraph.train.run.history import History
from jgraph.train.run.report import Report
from jgraph.train.run.standings import Rates, Standings
from jgraph.train.state.runner import Chunk, Events

_EVENTS_EVERY_S = 1.0
_EPSILON_SHARE = 0.05  # of the time, for computing what privacy was spent


@final
class Watch:
    """Follows a run chunk by chunk.

    Args:
      history: where chunks and evaluations are kept.
      total: number of the last step.
      batch_size: examples per batch.
      clock: measures time.
      evaluations: evaluate the model; None: never.
      every: steps between evaluations; None: only at the end.
      events: says how hash tables stand; asked once a second, and at the end.
      standings: sums up how workers stand.
      spending: the account of privacy; None: nobody keeps one.
      start_s: when the run began, by the clock; now if unset.
    """

    def __init__(
        self,
        history: History,
        total: int,
        batch_size: int,
        clock: Clock,
        *,
        evaluations: Evaluations | None = None,
        every: int | None = None,
        events: Callable[[], Events] = tuple,
        standings: Standings | None = None,
        spending: Spending | None = None,
        start_s: float | None = None,
    ) -> None:
        self._history = history
        self._total = total
        self._batch_size = batch_size
        self._clock = clock
        self._evaluations = evaluations
        self._every = every
        self._last: Report | None = None
        self._events = events
        self._standings = standings or Standings()
        self._events_time = clock.now()
        self._start_s = self._events_time if start_s is None else start_s
        self._rates = Rates()
        self._spending = spending
        self._epsilon: dict[str, float] = {}
        self._epsilon_due_s = 0.0
        self._untold: list[Evaluation] = []

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return self._clock.now() - self._start_s

    def take(self, chunk: Chunk) -> Report:
        """Keeps a chunk and returns how the run stands; lets evaluate when due."""
        before = self._history.steps
        self._history.add(chunk)
        self._standings.add(chunk)
        steps, every = self._history.steps, self._every
        is_due = every is not None and before // every != steps // every
        rate = self._rates.add(chunk)
        self._last = Report(
            step=steps,
            steps=self._total,
            seconds=self.seconds,
            steps_per_s=rate,
            examples_per_s=rate * chunk.batches_per_step * self._batch_size,
            metrics={**_means(chunk.metrics), **self._spent(steps)},
            dropped=self._history.dropped(),
            curve=self._standings.curve,
            workers=self._standings.workers(),
        )
        if self._clock.now() - self._events_time >= _EVENTS_EVERY_S:
            self._note_events()
        if self._evaluations is None:
            return self._last
        # The last evaluation is that of finish: of what comes out in the end.
        if is_due and steps < self._total:
            self._evaluations.begin()
        # One with each report: each copy may be the best.
        self._untold += self._evaluations.take()
        evaluations, self._untold = self._untold[:1], self._untold[1:]
        return (
            self._evaluated(self._last, evaluations[0]) if evaluations else self._last
        )

    def _spent(self, steps: int) -> dict[str, float]:
        """Returns what of privacy was spent, as a metric that is now and then new."""
        if self._spending is None:
            return {}
        self._spending.reached(steps)
        begin_s = self._clock.now()
        if begin_s >= self._epsilon_due_s:
            self._epsilon = {"epsilon": self._spending.epsilon}
            now_s = self._clock.now()
            self._epsilon_due_s = now_s + (now_s - begin_s) / _EPSILON_SHARE
            seconds = now_s - self._start_s
            self._history.add_epsilon(steps, seconds, self._epsilon["epsilon"])
        return self._epsilon

    def finish(self, applied: Callable[[], int]) -> list[Report]:
        """Evaluates what came out; returns a report for each evaluation.

        Args:
          applied: asks how many updates are applied.
        """
        self._note_events()
        if self._evaluations is None or self._last is None:
            return []
        evaluations = [*self._untold, *self._evaluations.finish(applied())]
        self._untold = []
        return [self._evaluated(self._last, each) for each in evaluations]

    def _evaluated(self, report: Report, one: Evaluation) -> Report:
        self._history.add_evaluation(one.step, self.seconds, one.values)
        return replace(
            report,
            seconds=self.seconds,
            evaluation=one.values,
            evaluation_step=one.step,
            copy=one.copy,
        )

    def _note_events(self) -> None:
        self._events_time = self._clock.now()
        self._standings.read_staleness()
        self._history.add_events(self.seconds, self._events())


def _means(metrics: Mapping[str, Array]) -> dict[str, float]:
    means = {
        name: float(as_float64(values).mean())
        for name, values in metrics.items()
        if values.ndim == 1 and not is_complex(values)
    }
    return {"loss": means.pop("loss"), **means}
