"""One call of ``Trainer.fit``: steps in a thread of its own, watched."""

import contextlib
import contextvars
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from jgraph.clock import Clock
from jgraph.errors import ClusterError, ConfigError
from jgraph.train.evaluations import Evaluations
from jgraph.train.history import History
from jgraph.train.large import KEPT_BYTES
from jgraph.train.progress import Display, Report, make_display
from jgraph.train.run import Callback, Run
from jgraph.train.runner import Order, Position, Runner
from jgraph.train.saving import Saving
from jgraph.train.watch import Watch, check_finite, check_ids


@final
@dataclass(frozen=True, slots=True)
class Fit:
    """What a run is made of.

    Attributes:
      runner: performs the steps.
      order: which steps.
      run: the user's handle.
      history: where measurements go.
      evaluations: evaluate the model; None: never.
      saving: saves checkpoints; None: never.
      callbacks: called with each report.
      checked: names of the leaves to check for NaN; None: not checked.
      lookups: what the ids that are checked are of; see ``check_ids``.
      progress: show a live line.
      clock: measures rates.
    """

    runner: Runner
    order: Order
    run: Run
    history: History
    evaluations: Evaluations | None
    saving: Saving | None
    callbacks: Sequence[Callback]
    checked: Sequence[str] | None
    lookups: Sequence[tuple[str, str, int]]
    progress: bool
    clock: Clock

    def start(self, release: Callable[[], None]) -> None:
        """Begins in a thread; ``release`` is called when no more steps run.

        A thread also when the user waits for the end: an interrupt then lands in the
        waiting, never between two halves of a step.
        """
        context = contextvars.copy_context()
        threading.Thread(
            target=context.run,
            args=(self._work, release),
            name="jgraph-fit",
            daemon=True,
        ).start()

    def _work(self, release: Callable[[], None]) -> None:
        total = self.history.steps + self.order.steps
        error: BaseException | None = None
        values: Sequence[Any] | None = None
        position: Position = None
        try:
            with self.saving or contextlib.nullcontext():
                self._follow(total)
        except BaseException as caught:  # noqa: BLE001  # Run.wait raises it
            error = caught
        try:
            # Of a cluster that failed, asking again would only take time.
            if not isinstance(error, ClusterError):
                # A large model is not moved unasked.
                if self.runner.nbytes() <= KEPT_BYTES:
                    values = self.runner.values()
                position = self.runner.position()
                self.history.untold = self.runner.untold()
                self.history.staleness = self.runner.staleness()
                self.history.events = self.runner.events()
        except BaseException as caught:  # noqa: BLE001  # Run.wait raises it
            error = error or caught
        finally:
            release()
        done = "done" if self.history.steps >= total else "stopped"
        self.run.finish("failed" if error else done, values, position, error)

    def _follow(self, total: int) -> None:
        if self.evaluations is not None and self.evaluations.are_here:
            self.runner.check_model()  # rather than after the training
        watch = Watch(
            self.history,
            total,
            self.order.batch_size,
            self.clock,
            evaluations=self.evaluations,
            every=self.order.eval_every,
            events=self.runner.events,
        )
        with make_display(show=self.progress) as display:
            # Closed here, whatever happens: nothing trains on behind an error.
            with contextlib.closing(self.runner.run(self.order)) as chunks:
                for chunk in chunks:
                    check_ids(chunk, self.lookups)
                    if self.checked is not None:
                        check_finite(chunk, self.checked)
                    self._tell(watch.take(chunk), display)
                    if self.saving is not None:
                        self.saving.note(self.history.steps)
            report = watch.finish()
            if report is not None:
                self._tell(report, display)
            if self.saving is not None:
                self.saving.finish()

    def _tell(self, report: Report, display: Display) -> None:
        self.run.report(report)
        display(report)
        for callback in self.callbacks:
            callback(self.run, report)


def check_counts(**counts: int) -> None:
    """Refuses counts that are no whole numbers, or less than 1.

    Raises:
      ConfigError: names the argument.
    """
    for name, count in counts.items():
        if not isinstance(count, int | np.integer):
            raise ConfigError(f"{name} is {count!r:.60}; it must be a whole number")
        if count < 1:
            raise ConfigError(f"{name} is {count}; it must be at least 1")


def check_evaluation(eval_data: object, eval_every: int | None) -> None:
    """Refuses to evaluate without data.

    Raises:
      ConfigError: ``eval_every`` alone.
    """
    if eval_every is not None and eval_data is None:
        raise ConfigError(
            f"eval_every={eval_every} needs data to evaluate on; give eval_data=(x, y) "
            "too, or leave eval_every out"
        )


def wait_or_stop(run: Run) -> Run:
    """Waits for the end of a run; an interrupt ends it after the current step.

    A second interrupt is raised, and the run ends by itself.
    """
    try:
        return run.wait()
    except KeyboardInterrupt:
        run.stop()
        return run.wait()
