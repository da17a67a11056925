"""Saver of a run: snapshots between reports, written in a thread of their own."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeAlias, final

from jgraph.clock import SystemClock
from jgraph.coordination.run.cuts import patience_s
from jgraph.errors import (
    CheckpointError,
    CheckpointForeignError,
    CheckpointWriterError,
    ClusterError,
    ConfigError,
    JGError,
)
from jgraph.runtime.files.failed_saves import FailedSaves
from jgraph.runtime.files.manifest import is_ours
from jgraph.runtime.files.step_files import our_steps, steps_in
from jgraph.train.checkpoint.checkpoints import Checkpoints, CheckpointWriter
from jgraph.train.model.trees import Tree
from jgraph.train.run.report import Report
from jgraph.train.state.runner import Position

_LOG = logging.getLogger("jgraph.checkpoint")
_CLOCK: Final = SystemClock()
_WENT_ON: Final = "the run went on while it was to be saved"


@final
@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run at one moment; ``release`` when it is written.

    One that ``is_live`` is of the moment only until the run goes on.
    """

    step: int
    tree: Tree
    position: Position
    release: Callable[[], None] = lambda: None
    is_live: bool = False


Take: TypeAlias = Callable[[Callable[[], None] | None], Snapshot]
"""Takes a snapshot. While loops stand still it is given what says that they did: called
as soon as they may go on, unless the snapshot is live."""


@final
class Saver:
    """Saves when due; used by one thread, the writing is in another.

    Args:
      options: where and how often.
      take: takes a snapshot of the run.
      step: updates applied before the run.
      in_process: who calls does the steps: a save that is due is taken between two of
        them, and waits for the one before. Else loops are halted for it.
      wait_elsewhere: waits until the master has saved the run, which it does in the
        place of a client that was away.

    Raises:
      CheckpointError: the directory has steps that are not before this run's.
      CheckpointWriterError: another process writes there.
    """

    def __init__(
        self,
        options: Checkpoints,
        take: Take,
        step: int,
        *,
        in_process: bool = False,
        wait_elsewhere: Callable[[], None] = lambda: None,
    ) -> None:
        self._options = options
        self._wait_elsewhere = wait_elsewhere
        self._in_process = in_process
        self._take = take
        self._last = step
        self._written_step: int | None = None
        self._under_way: Future[None] | None = None
        self._save_s: float | None = None
        self._best: float | None = None
        # Of the best step that this saver wrote: a step that is written anew keeps it.
        self._best_evaluation: tuple[int | None, Mapping[str, float] | None] = (
            None,
            None,
        )
        self._stack = ExitStack()
        with ExitStack() as stack:
            self._writer = stack.enter_context(
                CheckpointWriter(options.directory, options.keep)
            )
            self._failures = FailedSaves(self._writer.directory)
            _check_order(self._writer, step)
            if options.best is not None:
                self._best = self._writer.best(options.best)
            self._thread = stack.enter_context(
                ThreadPoolExecutor(1, thread_name_prefix="jgraph-checkpoint")
            )
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        # Waits for a save that is under way, then gives the directory free.
        self._stack.close()

    def note(self, step: int) -> None:
        """Saves at ``step`` if a multiple was passed, in one process.

        Raises:
          CheckpointWriterError: another process has taken over the directory.
        """
        if self._under_way is not None and self._under_way.done():
            self._settle(self._under_way)
        every = self._options.every
        if self._in_process and step // every != self._last // every:
            self.wait()
            self._begin()

    def save_halted(self, go_on: Callable[[], bool]) -> None:
        """Saves a run whose loops stand still, unless a slow save is under way.

        Args:
          go_on: lets them go on, as soon as that is possible; returns whether they
            stood still until then: else what was taken is of no one moment.

        Raises:
          CheckpointWriterError: another process has taken over the directory.
        """
        if self._under_way is not None:
            wait([self._under_way], patience_s(self._save_s))
            if not self._under_way.done():
                _LOG.info("no checkpoint now: the one before it is not written yet")
                return
            self._settle(self._under_way)

        def check() -> None:
            if not go_on():
                raise CheckpointError(_WENT_ON, path=str(self.directory))

        try:
            self._begin(check=check)
        except CheckpointWriterError:
            raise
        except JGError as error:
            # The run finds out by itself what was lost. What was made for one master
            # another does not know; it is made anew for the next save.
            _LOG.info("no checkpoint now: %s", error)

    @property
    def directory(self) -> Path:
        """Where the steps are."""
        return self._writer.directory

    def save_best(self, report: Report) -> None:
        """Saves the copy that was evaluated, if it is the best so far.

        Raises:
          CheckpointWriterError: another process has taken over the directory.
          ConfigError: the evaluation has no such metric.
        """
        options, copy, metrics = self._options, report.copy, report.evaluated()
        if options.best is None or copy is None:
            return
        if options.best not in metrics:
            raise ConfigError(
                f"Checkpoints(best='{options.best}') finds no such metric; the run has "
                f"{', '.join(metrics)}"
            )
        if options.is_better(metrics[options.best], self._best):
            self.wait()
        # The save before may have been of a better one; or it failed.
        if options.is_better(metrics[options.best], self._best):
            step = report.evaluation_step
            snapshot = Snapshot(step, copy.tree, copy.position)
            saving = self._thread.submit(self._save, snapshot, None, metrics)
            self._under_way = saving

    def wait(self) -> None:
        """Waits for a save that is under way.

        Raises:
          CheckpointWriterError: another process has taken over the directory.
        """
        if self._under_way is not None:
            self._settle(self._under_way)

    def go_back(self, step: int) -> None:
        """Goes on after tasks were lost: from ``step``."""
        self._last = step
        self._failures.forget()

    def save(self) -> None:
        """Saves a run whose loops have ended, before a task goes; failures are told.

        Raises:
          CheckpointWriterError: another process has taken over the directory.
        """
        self.wait()
        try:
            self._begin(at_rest=True)
        except ClusterError as error:
            _LOG.warning("no checkpoint before the tasks end: %s", error)
        self.wait()

    def finish(self) -> None:
        """Saves what came out in the end, unless the master has done so.

        Raises:
          CheckpointError: that cannot be saved.
          CheckpointWriterError: another process has taken over the directory, and does
            not save what came out.
        """
        with suppress(CheckpointWriterError):  # the next save says so again
            self.wait()
        try:
            self._begin(at_rest=True)
            if self._under_way is not None:
                self._under_way.result()
        except CheckpointWriterError:
            self._wait_elsewhere()
            if self._last not in our_steps(self.directory):
                raise

    def _begin(
        self, *, at_rest: bool = False, check: Callable[[], None] | None = None
    ) -> None:
        snapshot = self._take(check)
        before_commit = check if snapshot.is_live else None
        is_due = snapshot.step not in our_steps(self._writer.directory)
        # What was saved under way may be of a moment before, on another ps.
        is_due |= at_rest and snapshot.step == self._written_step
        self._last = snapshot.step
        if is_due:
            of_step, evaluation = self._best_evaluation
            metrics = evaluation if snapshot.step == of_step else None
            saving = self._thread.submit(self._save, snapshot, before_commit, metrics)
            self._under_way = saving
            if before_commit is not None:
                self.wait()
        else:
            self._under_way = None
            snapshot.release()

    def _save(
        self,
        snapshot: Snapshot,
        before_commit: Callable[[], None] | None,
        evaluation: Mapping[str, float] | None = None,
    ) -> None:
        step, position, start_s = snapshot.step, snapshot.position, _CLOCK.now()
        try:
            tree = snapshot.tree
            self._writer.save(step, tree, position, before_commit, evaluation)
            self._written_step = step
            if evaluation is not None and self._options.best is not None:
                self._best = evaluation[self._options.best]
                self._best_evaluation = step, evaluation
        finally:
            self._save_s = _CLOCK.now() - start_s
            with suppress(ClusterError):  # a task that is gone holds nothing
                snapshot.release()

    def _settle(self, save: Future[None]) -> None:
        self._under_way = None
        try:
            save.result()
        except CheckpointWriterError:
            raise
        except JGError as error:
            # That a task was lost is told where it ends a step, too.
            self._failures.tell(error)
        else:
            self._failures.forget()


def _check_order(writer: CheckpointWriter, step: int) -> None:
    steps = steps_in(writer.directory)
    if steps and steps[-1] > step:
        if not is_ours(writer.directory / str(steps[-1])):
            raise CheckpointForeignError(
                f"{writer.directory} has step {steps[-1]} of another program, which "
                "this run would come to; give another directory",
                path=str(writer.directory),
            )
        raise CheckpointError(
            f"{writer.directory} has step {steps[-1]}, and this Trainer is at {step}; "
            f"go on from there with trainer.restore('{writer.directory}'), or give "
            "another directory",
            path=str(writer.directory),
        )
