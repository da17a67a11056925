"""Callbacks for ``Trainer.fit``: early stopping, NaN guard, end at a step.

A callback is called as ``callback(run, report)`` twice a second or so; one that has a
method ``close`` is closed when the run ends.
"""

import math
from collections.abc import Iterable
from difflib import get_close_matches
from typing import final

from jgraph.counts import check_flags, is_amount, is_count
from jgraph.errors import ConfigError, NonFiniteError
from jgraph.train.evaluation.evaluations import Copy
from jgraph.train.run.report import Report
from jgraph.train.run.run import Run
from jgraph.view import markup


@final
class StopAtStep:
    """Ends a run once so many updates are applied, those of earlier runs included.

    At the first report at or after that step: the workers do not wait for the report.
    ``fit(steps=…)`` counts exactly.

    Args:
      last_step: number of the update.

    Source: tensorflow/python/training/basic_session_run_hooks.py, ``StopAtStepHook``.

    Example:
      >>> StopAtStep(1000)
      StopAtStep(1000)
    """

    def __init__(self, last_step: int) -> None:
        self._last_step = _count("last_step", last_step)

    def __call__(self, run: Run, report: Report) -> None:
        """Stops the run if it is time."""
        if report.step >= self._last_step:
            run.stop()

    def __repr__(self) -> str:
        return f"StopAtStep({self._last_step})"

    def _repr_html_(self) -> str:
        return markup.lines(repr(self))


@final
class NanGuard:
    """Ends a run in which the loss, or another metric, is NaN or infinite.

    It looks at means since the last report, and costs nothing. ``check_finite=True``
    of the Trainer looks at every gradient before it is applied.

    Args:
      fail: raise ``NonFiniteError``; else the run is stopped, and has what was trained.

    Source: tensorflow/python/training/basic_session_run_hooks.py, ``NanTensorHook``.

    Example:
      >>> NanGuard()
      NanGuard(fail=True)
    """

    def __init__(self, *, fail: bool = True) -> None:
        check_flags(fail=fail)
        self._fail = fail

    def __call__(self, run: Run, report: Report) -> None:
        """Ends the run if a metric is not finite.

        Raises:
          NonFiniteError: names the metric and the step; with ``fail``.
        """
        bad = [n for n, value in report.metrics.items() if not math.isfinite(value)]
        if not bad:
            return
        run.stop()
        if self._fail:
            raise NonFiniteError(
                f"'{bad[0]}' is NaN or infinite before step {report.step}; go back to "
                "a checkpoint with a smaller learning rate, or find the gradient with "
                "Trainer(…, check_finite=True)",
                step=report.step,
                metrics=bad,
            )

    def __repr__(self) -> str:
        return f"NanGuard(fail={self._fail})"

    def _repr_html_(self) -> str:
        return markup.lines(repr(self))


@final
class EarlyStopping:
    """Ends a run when a metric has not become better for a while.

    Args:
      metric: ``eval_…``: one that is evaluated on ``eval_data``, every ``eval_every``
        steps; else one of the training, of which each report has the mean.
      patience: evaluations, or reports, without a better value before the end.
      min_delta: what counts as better, at least.
      higher_is_better: for accuracy and the like.
      restore_best: when the run has ended, go back to the copy that had the best value,
        as it was evaluated: model, optimizer state, number of updates, position in the
        data. It is kept in this process, which evaluates then.

    Attributes:
      best: the best value of the run so far; None before the first, and NaN is none.
      best_step: updates of the model that had it.
      evaluated: the metric, if it is one of an evaluation; else empty.

    Raises:
      ConfigError: an argument that cannot be, or ``restore_best`` with a metric of the
        training. From ``fit``: the run
        has no such metric, or evaluates it at its end only.

    Source: keras/src/callbacks/early_stopping.py.

    Example:
      >>> EarlyStopping("eval_accuracy", patience=5, higher_is_better=True)
      EarlyStopping('eval_accuracy', patience=5, best=None)
    """

    def __init__(
        self,
        metric: str = "eval_loss",
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        higher_is_better: bool = False,
        restore_best: bool = False,
    ) -> None:
        check_flags(higher_is_better=higher_is_better, restore_best=restore_best)
        if not isinstance(metric, str):
            raise ConfigError(
                f"metric is {metric!r:.60}; give the name of one, such as 'eval_loss'"
            )
        if not is_amount(min_delta):
            raise ConfigError(f"min_delta is {min_delta!r:.60}; give 0 or more")
        self.evaluated = metric if metric.startswith("eval_") else ""
        if restore_best and not self.evaluated:
            raise ConfigError(
                f"restore_best goes back to a copy that was evaluated, and '{metric}' "
                "is a metric of the training; give 'eval_loss'"
            )
        self.restore_best = restore_best
        self._forget()
        self._metric = metric
        self._patience = _count("patience", patience)
        self._min_delta = min_delta
        self._sign = -1.0 if higher_is_better else 1.0

    def begin(self, run: Run) -> None:
        """Forgets what was the best in a run before."""
        self._forget()

    def _forget(self) -> None:
        self._copy: Copy | None = None
        self.best: float | None = None
        self.best_step = 0
        self._wait_count = 0

    def __call__(self, run: Run, report: Report) -> None:
        """Takes a report; stops the run if it has waited long enough."""
        metrics = self._values(report)
        if metrics is None:
            return
        if self._metric not in metrics:
            raise ConfigError(
                f"EarlyStopping waits for '{self._metric}', and the run has "
                f"{', '.join(metrics)}{_instead(self._metric, metrics)}"
            )
        value = metrics[self._metric]
        best = self._sign * math.inf if self.best is None else self.best
        if self._sign * (best - value) > self._min_delta:
            self.best, self._wait_count = value, 0
            self._copy = report.copy if self.restore_best else None
            self.best_step = report.evaluation_step if self.evaluated else report.step
            return
        self._wait_count += 1
        if self._wait_count >= self._patience:
            run.stop()

    def end(self, run: Run) -> None:
        """Goes back to the best copy, if it is to."""
        copy, self._copy = self._copy, None
        if copy is not None:
            run.go_back(copy.values, copy.position)

    def _values(self, report: Report) -> dict[str, float] | None:
        if not self.evaluated:
            return dict(report.metrics)
        if report.evaluation is None:
            return None
        return report.evaluated()

    def __repr__(self) -> str:
        facts = f"'{self._metric}', patience={self._patience}, best={self.best}"
        return f"EarlyStopping({facts})"

    def _repr_html_(self) -> str:
        return markup.lines(repr(self))


def _instead(metric: str, known: Iterable[str]) -> str:
    """Returns what to wait for; empty: nobody knows."""
    if metric.startswith("val_"):
        of_data = f"eval_{metric.removeprefix('val_')}"
        return f"; write '{of_data}', a metric of eval_data=, with eval_every="
    near = get_close_matches(metric, known, 1)
    return f"; write '{near[0]}'" if near else ""


def _count(name: str, value: int) -> int:
    if not is_count(value, 0):
        raise ConfigError(f"{name} is {value!r:.60}; give a whole number, 0 or more")
    return value


def check_evaluated(
    callbacks: Iterable[object], eval_data: object, eval_every: int | None
) -> None:
    """Refuses to stop early by what a run evaluates at its end only, or never.

    Raises:
      ConfigError: says what to give.
    """
    for callback in callbacks:
        metric = callback.evaluated if isinstance(callback, EarlyStopping) else ""
        if metric and (eval_data is None or eval_every is None):
            data = "eval_data=(x, y) and " if eval_data is None else ""
            raise ConfigError(
                f"EarlyStopping waits for '{metric}', which this run evaluates "
                f"{'never' if data else 'at its end only'}; give {data}eval_every=100, "
                "or wait for a metric of the training, such as 'loss'"
            )
