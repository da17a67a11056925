"""Following of a run by a thread that trains, saves, evaluates and reports."""

import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias, final

import numpy as np

from jgraph._compat import same_types
from jgraph.client.cluster import Cluster
from jgraph.client.runs.failover import ask_with_failover
from jgraph.client.runs.questions import Question
from jgraph.clock import Clock
from jgraph.coordination.run.loop_outcome import BATCH_ERRORS
from jgraph.coordination.run.recovery import Recovery
from jgraph.errors import (
    CheckpointWriterError,
    ClusterError,
    ConfigError,
    DataSlotError,
    JGError,
)
from jgraph.train.answers import LOSS_ERRORS, Asked
from jgraph.train.arguments import check_counts
from jgraph.train.attempt import Attempt
from jgraph.train.checkpoint.saver import Saver
from jgraph.train.run.history import History
from jgraph.train.run.hooks import Callback, hook
from jgraph.train.run.progress import Display
from jgraph.train.run.report import Report
from jgraph.train.run.run import Run
from jgraph.train.run.standings import Standings
from jgraph.train.run.watch import Watch
from jgraph.train.state.remote_arrays import KEPT_BYTES
from jgraph.train.state.runner import Chunk, Position, Runner

_BATCH_ERRORS: Final = (DataSlotError, *BATCH_ERRORS)
"""Errors of one batch: all updates before it are applied, and good."""

_LOG = logging.getLogger("jgraph.data")
_PRIVACY_LOG = logging.getLogger("jgraph.privacy")
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
      callbacks: called with each report.
      display: shows reports; entered, and left by whoever made it.
      workers: names of the replicas; empty if nobody looks at them.
      cluster: knows how tasks ended that nobody starts again; None: all runs here.
      clock: measures rates.
    """

    attempt: Attempt
    run: Run
    history: History
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

        thread = threading.Thread(
            target=context.run,
            args=(work,),
            name="jgraph-fit",
            daemon=True,
        )
        if self.cluster is not None and self.attempt.order is not None:
            self.cluster.begins(self.attempt.order.at_master, thread)
        thread.start()

    def _work(self, release: Callable[[], None]) -> None:
        attempt, start_s = self.attempt, self.clock.now()
        self.run.begin()
        error: BaseException | None = None
        values: Sequence[Any] | None = None
        position: Position = None
        try:
            for callback in self.callbacks:
                hook(callback, "begin", self.run)
            saving = attempt.saving or contextlib.nullcontext()
            with saving, naming_ends(self.cluster):
                self._train_and_finish(start_s)
        except BaseException as caught:  # noqa: BLE001  # Run.wait raises it
            error = caught
            self.run.fails(caught)
        runner, steps = attempt.runner, self.history.steps
        self.history.members, self.history.rounds = runner.members(), runner.rounds()
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
        is_done = max(steps, self.history.steps) >= attempt.total
        state = "done" if is_done else "stopped"
        self.run.finish("failed" if error else state, values, position, error)
        if attempt.order is not None:
            attempt.order.at_master.set()  # nobody waits for one that is over

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
        updates = runner.state.global_step()
        self.history.ended(updates)
        if (spending := self.attempt.spending) is not None:
            spending.reached(updates)
            report = self.run.last_report
            seconds = 0.0 if report is None else report.seconds
            self.history.add_epsilon(updates, seconds, spending.epsilon)
        self.history.staleness = runner.staleness()
        self.history.events = runner.state.events()
        return values, runner.position()

    def _train_and_finish(self, start_s: float) -> None:
        """Trains, to the end.

        Raises:
          JGError: what ended the run early.
        """
        try:
            self._follow(start_s)
        except JGError as error:
            saving = self.attempt.saving
            if isinstance(error, _BATCH_ERRORS) and isinstance(saving, Saver):
                # To go on from once that batch is taken out; what is told is the batch.
                with contextlib.suppress(CheckpointWriterError):
                    saving.save()
            raise

    def _follow(self, start_s: float) -> None:
        attempt, order = self.attempt, self.attempt.order
        if attempt.evaluations is not None and attempt.evaluations.are_here:
            attempt.runner.state.check_model()  # rather than after the training
        ask = attempt.runner.staleness if self.workers else None
        watch = Watch(
            self.history,
            attempt.total,
            attempt.batch_size,
            self.clock,
            evaluations=attempt.evaluations,
            every=None if order is None or order.evaluates_halted else order.eval_every,
            events=attempt.runner.state.events,
            standings=Standings(self.workers, ask),
            spending=attempt.spending,
            start_s=start_s,
        )
        is_finished = attempt.total > attempt.first and self._train(watch)
        if not is_finished:
            self._finish(watch)

    def _finish(self, watch: Watch) -> None:
        """Evaluates and saves what came out."""
        if self.attempt.evaluations is not None:
            self.display.say("evaluating")
        for report in watch.finish(self.attempt.runner.state.global_step):
            self._tell(report)
        if self.attempt.saving is not None:
            self.display.say("saving the last checkpoint")
            self.attempt.saving.finish()

    def _train(self, watch: Watch) -> bool:
        """Trains; returns whether the end was evaluated and saved, too."""
        attempt = self.attempt
        self.display.say("compiling on the tasks" if self.workers else "compiling")
        answers = Asked(attempt, self.display)
        is_finished = False
        # Closed here, whatever happens: nothing trains on behind an error.
        with contextlib.closing(attempt.chunks()) as chunks:
            for chunk in chunks:
                question = chunk.question
                if question is not None and question.kind == "finish":
                    is_finished = self._finish_if_there(question, watch)
                elif question is not None:
                    answers.answer(question)
                elif chunk.restored is not None:
                    self._recovered(chunk.restored)
                elif chunk.rescaled is not None:
                    self.run.rescaled(chunk.rescaled)
                else:
                    self._take(chunk, watch)
                if attempt.saving is not None and question is None:
                    attempt.saving.note(self.history.steps)
        self._warn_of_end()
        return is_finished

    def _take(self, chunk: Chunk, watch: Watch) -> None:
        try:
            report = watch.take(chunk)
        except LOSS_ERRORS as error:
            if self.cluster is None:
                raise
            # The run finds out by itself what was lost.
            _LOG.info("not evaluated now: %s", error)
        else:
            self._tell(report)

    def _finish_if_there(self, question: Question, watch: Watch) -> bool:
        """Evaluates and saves what came out, unless that is lost; returns whether."""
        try:
            self._finish(watch)
        except LOSS_ERRORS as error:
            question.answer(error=error)
            return False
        question.answer()
        return True

    def _warn_of_end(self) -> None:
        order, total = self.attempt.order, self.attempt.total
        has_ended = order is not None and order.dataset.has_ended
        if has_ended and self.history.steps < total:
            _LOG.warning(
                "the data ended: the run stops at step %d of %d; give more of it, or "
                "an iterable that can begin anew, such as the function that makes the "
                "generator",
                *(self.history.steps, total),
            )

    def _recovered(self, recovery: Recovery) -> None:
        """Takes note that the master of the run has taken it back."""
        spending = self.attempt.spending
        if spending is not None:
            newest = max(recovery.step, self.history.steps)
            spending.went_back(newest, recovery.back_to)
            if not spending.may_do(self.attempt.total - recovery.back_to):
                if newest > recovery.step:  # the master makes too many updates
                    self.attempt.stop.set()
                _PRIVACY_LOG.warning(
                    "the run ends early: with %d updates that are made again, all of "
                    "them would pass target_epsilon",
                    newest - recovery.back_to,
                )
        self.history.go_back(recovery.back_to)
        self.run.recovered(recovery)

    def _tell(self, report: Report) -> None:
        saving = self.attempt.saving
        if report.copy is not None and isinstance(saving, Saver):
            saving.save_best(report)
        self.run.report(replace(report, copy=None))
        self.display.show(report)
        for callback in self.callbacks:
            if callable(callback):
                callback(self.run, report)


@contextlib.contextmanager
def naming_ends(cluster: Cluster | None) -> Iterator[None]:
    """Says in an error how tasks ended that nobody starts again, and what does.

    Args:
      cluster: knows that; None: all runs here.
    """
    try:
        yield
    except ClusterError as error:
        ends = {} if cluster is None else cluster.gone()
        reasons = [why for why in ends.values() if why not in error.message]
        if not reasons:
            raise
        why = "; ".join([error.message.rstrip("."), *reasons])
        raise type(error)(why, **error.details) from error


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


def wait_begun(run: Run, at_master: threading.Event) -> Run:
    """Waits until a detached run can do without this process; an interrupt ends it.

    Raises:
      JGError: it did not begin.
    """
    try:
        at_master.wait()
    except KeyboardInterrupt:
        run.stop()
        raise
    return run.wait() if run.state == "failed" else run


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
