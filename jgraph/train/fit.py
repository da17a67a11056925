"""One call of ``Trainer.fit``: a thread that trains, saves, evaluates and reports."""

import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias, final

import numpy as np

from jgraph._compat import same_types
from jgraph.client.cluster import Cluster
from jgraph.client.runs.failover import ask_with_failover
from jgraph.clock import Clock
from jgraph.coordination.run.loop_outcome import BATCH_ERRORS
from jgraph.coordination.run.recovery import Recovery
from jgraph.errors import (
    CheckpointWriterError,
    ClusterError,
    ConfigError,
    DataSlotError,
    JGError,
    TaskLeavingError,
)
from jgraph.train.attempt import Attempt
from jgraph.train.checkpoint.remote_saver import RemoteSaver
from jgraph.train.checkpoint.saver import Saver
from jgraph.train.recovery import Recover
from jgraph.train.run.history import History
from jgraph.train.run.hooks import Callback, hook
from jgraph.train.run.progress import Display
from jgraph.train.run.report import Report
from jgraph.train.run.run import Run
from jgraph.train.run.standings import Standings
from jgraph.train.run.watch import Watch
from jgraph.train.state.remote_arrays import KEPT_BYTES
from jgraph.train.state.runner import Position, Runner

_BATCH_ERRORS: Final = (DataSlotError, *BATCH_ERRORS)
"""Errors of one batch: all updates before it are applied, and good."""

_LOG = logging.getLogger("jgraph.data")
_TRAIN_LOG = logging.getLogger("jgraph.train")

_End: TypeAlias = tuple[Sequence[Any] | None, Position]
"""Values of all variables, if they are not large; and where in the data a run ended."""


@final
@dataclass(frozen=True, slots=True)
class Fit:
    """What a run is made of.

    Attributes:
      attempt: does all steps, if no task is lost.
      run: the user's handle.
      history: where measurements go.
      saving: saves checkpoints; None: never.
      recover: makes the next attempt after tasks were lost; None: that ends the run.
      callbacks: called with each report.
      display: shows reports; entered, and left by whoever made it.
      workers: names of the replicas; empty if nobody looks at them.
      cluster: knows how tasks ended that nobody starts again; None: all runs here.
      clock: measures rates.
    """

    attempt: Attempt
    run: Run
    history: History
    saving: Saver | RemoteSaver | None
    recover: Recover | None
    callbacks: Sequence[Callback]
    display: Display
    workers: Sequence[str]
    cluster: Cluster | None
    clock: Clock

    def start(self, release: Callable[[], None]) -> None:
        """Begins in a thread; ``release`` is called when no more steps run.

        A thread also when the user waits for the end: an interrupt then lands in the
        waiting, never between two halves of a step.
        """
        context = contextvars.copy_context()
        types = same_types()

        def work() -> None:
            with types:  # JAX asks each thread whether it has 64-bit types
                self._work(release)

        threading.Thread(
            target=context.run,
            args=(work,),
            name="jgraph-fit",
            daemon=True,
        ).start()

    def _work(self, release: Callable[[], None]) -> None:
        attempt, began = self.attempt, self.clock.now()
        total = attempt.first + attempt.order.steps
        error: BaseException | None = None
        values: Sequence[Any] | None = None
        position: Position = None
        try:
            for callback in self.callbacks:
                hook(callback, "begin", self.run)
            with self.saving or contextlib.nullcontext():
                while (failure := self._failure(attempt, total, began)) is not None:
                    attempt = self._next(failure, began)
        except BaseException as caught:  # noqa: BLE001  # Run.wait raises it
            error = caught
        runner, told = attempt.runner, self.history.steps
        try:
            for callback in self.callbacks:
                hook(callback, "end", self.run)
                hook(callback, "close")
            # Of a cluster that failed, asking again would only take time.
            if not isinstance(error, ClusterError):
                read = partial(self._ended, runner)
                cluster = self.cluster
                values, position = (
                    ask_with_failover(cluster, read) if cluster else read()
                )
                self._show_end()
                self._warn_of_nan()
        except BaseException as caught:  # noqa: BLE001  # Run.wait raises it
            error = error or caught
        finally:
            runner.state.let_go()
            release()
        done = "done" if max(told, self.history.steps) >= total else "stopped"
        self.run.finish("failed" if error else done, values, position, error)

    def _warn_of_nan(self) -> None:
        report = self.run.last_report
        loss = 0.0 if report is None else report.metrics.get("loss", 0.0)
        if not np.isfinite(loss):
            _TRAIN_LOG.warning(
                "the loss was %s at the end of the run; callbacks=jg.NanGuard() ends a "
                "run there, and Trainer(check_finite=True) before it is applied",
                loss,
            )

    def _show_end(self) -> None:
        """Shows the true count: of the last updates of lost workers nobody reported."""
        report = self.run.last_report
        if report is not None and report.step != self.history.steps:
            report = replace(report, step=self.history.steps)
            self.run.report(report)
            self.display.show(report)

    def _ended(self, runner: Runner) -> _End:
        """Reads what a run has come to."""
        # A large model is not moved unasked.
        values = runner.state.values() if runner.state.nbytes() <= KEPT_BYTES else None
        self.history.ended(runner.state.global_step())
        self.history.staleness = runner.staleness()
        self.history.events = runner.state.events()
        return values, runner.position()

    def _failure(self, attempt: Attempt, total: int, began: float) -> JGError | None:
        """Trains; returns what ended the attempt early, if that may be mended."""
        try:
            self._follow(attempt, total, began)
        except JGError as error:
            if isinstance(error, _BATCH_ERRORS) and isinstance(self.saving, Saver):
                # To go on from once that batch is taken out; what is told is the batch.
                with contextlib.suppress(CheckpointWriterError):
                    self.saving.save()
            attempt.runner.state.let_go()
            if self.recover is not None:
                return error
            if isinstance(error, TaskLeavingError):
                why = "and the run has nothing to go on from; give fit(checkpoint=…)"
                raise TaskLeavingError(
                    f"{error.message}, {why}", **error.details
                ) from error
            gone = {} if self.cluster is None else self.cluster.gone()
            if not isinstance(error, ClusterError) or not gone:
                raise
            why = "; ".join([error.message.rstrip("."), *gone.values()])
            raise type(error)(why, **error.details) from error
        return None

    def _next(self, failure: JGError, began: float) -> Attempt:
        assert self.recover is not None  # _failure asks for it
        self.display.say(f"waiting for all tasks to be back: {failure}")
        attempt, recovery = self.recover.next_attempt(failure)
        self.history.go_back(recovery.back_to, self.clock.now() - began)
        self.run.recovered(recovery)
        return attempt

    def _follow(self, attempt: Attempt, total: int, began: float) -> None:
        if attempt.evaluations is not None and attempt.evaluations.are_here:
            attempt.runner.state.check_model()  # rather than after the training
        ask = attempt.runner.staleness if self.workers else None
        watch = Watch(
            self.history,
            total,
            attempt.order.batch_size,
            self.clock,
            evaluations=attempt.evaluations,
            every=None if attempt.order.evaluates_halted else attempt.order.eval_every,
            events=attempt.runner.state.events,
            standings=Standings(self.workers, ask),
            began=began,
        )
        if attempt.order.steps:
            self._train(attempt, watch)
        if attempt.evaluations is not None:
            self.display.say("evaluating")
        report = watch.finish(attempt.runner.state.global_step)
        if report is not None:
            self._tell(report)
        if self.saving is not None:
            self.display.say("saving the last checkpoint")
            self.saving.finish()

    def _train(self, attempt: Attempt, watch: Watch) -> None:
        self.display.say("compiling on the tasks" if self.workers else "compiling")
        # Closed here, whatever happens: nothing trains on behind an error.
        dataset = attempt.order.dataset
        if dataset.note:
            _LOG.info("%s", dataset.note)
        running = contextlib.closing(attempt.runner.run(attempt.order))
        halted = attempt.first
        with dataset.reading(), running as chunks:
            for chunk in chunks:
                if chunk.at_rest:
                    self._save_at_rest()
                    continue
                if chunk.go_on is not None:
                    halted = self._at_halt(attempt, chunk.go_on, halted)
                    continue
                if chunk.restored is not None:
                    self._recovered(chunk.restored)
                else:
                    self._tell(watch.take(chunk))
                if self.saving is not None:
                    self.saving.note(self.history.steps)
        total = attempt.first + attempt.order.steps
        if dataset.has_ended and self.history.steps < total:
            _LOG.warning(
                "the data ended: the run stops at step %d of %d; give more of it, or "
                "an iterable that can begin anew, such as the function that makes the "
                "generator",
                *(self.history.steps, total),
            )

    def _at_halt(self, attempt: Attempt, go_on: Callable[[], bool], last: int) -> int:
        """Evaluates, and saves, while loops stand still, if that is due.

        Returns:
          After how many updates; ``last`` is that of the halt before.
        """
        order, saving = attempt.order, self.saving
        if not order.evaluates_halted:
            if saving is not None:
                saving.save_halted(go_on)
            return last
        try:
            step = attempt.runner.state.global_step()
        except ClusterError:
            return last  # the run finds out by itself what was lost

        def is_due(every: int | None) -> bool:
            return every is not None and step // every != last // every

        def save_and_go_on() -> bool:
            stood: list[bool] = []

            def told() -> bool:
                stood.append(go_on())
                return stood[-1]

            if saving is not None and is_due(order.save_every):
                saving.save_halted(told)
            return all(stood) if stood else go_on()

        if attempt.evaluations is not None and is_due(order.eval_every):
            attempt.evaluations.begin_halted(save_and_go_on)
        else:
            save_and_go_on()
        return step

    def _recovered(self, recovery: Recovery) -> None:
        """Takes note that the master of the run has taken it back."""
        self.history.go_back(recovery.back_to, 0.0)
        self.run.recovered(recovery)

    def _save_at_rest(self) -> None:
        if self.saving is not None:
            self.display.say("saving, as tasks are about to end")
            self.saving.save()

    def _tell(self, report: Report) -> None:
        if report.copy is not None and isinstance(self.saving, Saver):
            self.saving.save_best(report)
        self.run.report(replace(report, copy=None))
        self.display.show(report)
        for callback in self.callbacks:
            if callable(callback):
                callback(self.run, report)


def check_length(steps: int | None, epochs: int | None) -> None:
    """Refuses a run of no length, or of two.

    Raises:
      ConfigError: says what to give.
    """
    if steps is None and epochs is None:
        raise ConfigError(
            "fit does not know how long to train; give steps=1000, or epochs=10"
        )
    if steps is not None and epochs is not None:
        raise ConfigError(f"give steps={steps} or epochs={epochs}, not both")
    if epochs is None:
        check_counts(steps=0 if steps is None else steps)
    else:
        check_counts(epochs=epochs)


def one_of(eval_data: Any, validation_data: Any) -> Any:
    """Returns the data to evaluate on, which has two names.

    Raises:
      ConfigError: it was given by both.
    """
    if validation_data is None:
        return eval_data
    if eval_data is not None:
        raise ConfigError("eval_data and validation_data are the same; give one")
    return validation_data


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


def check_wait(wait_s: float) -> None:
    """Refuses what is no time to wait.

    Raises:
      ConfigError: says what it may be.
    """
    is_number = isinstance(wait_s, float | int | np.number)
    if not (is_number and wait_s >= 0):
        raise ConfigError(
            f"wait_s is {wait_s!r:.60}; it is how many seconds to wait for lost tasks, "
            "0 or more"
        )


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


def wait_or_stop(run: Run, display: Display) -> Run:
    """Waits for the end of a run; an interrupt ends it after the current step.

    A second interrupt is raised, and the run ends by itself.
    """
    try:
        return run.wait()
    except KeyboardInterrupt:
        run.stop()
        display.notice(
            "interrupted: ends after this step, and saves if it has checkpoints; "
            "interrupt again to leave it to that (trainer.run)"
        )
        return run.wait()
