"""Recovery of a run after tasks were lost and started again.

Where copies are kept of what a ps holds, from there; else from its newest checkpoint.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

from jgraph.client.cluster import Cluster
from jgraph.client.wait_for_tasks import incarnations_of
from jgraph.clock import Clock, SystemClock
from jgraph.coordination.run.recovery import (
    GiveUp,
    GoBack,
    Recoveries,
    Recovery,
    hopeless,
)
from jgraph.errors import (
    ClusterError,
    ClusterUnreachableError,
    CopyLostError,
    InternalError,
    JGError,
    ProtocolError,
    TaskLeavingError,
    TaskLostError,
    UninitializedError,
)
from jgraph.graph.ir import TaskName
from jgraph.runtime.files.step_files import our_steps
from jgraph.train.attempt import Attempt, Attempts, FitRequest
from jgraph.train.checkpoint.remote_saver import RemoteSaver
from jgraph.train.checkpoint.saver import Saver
from jgraph.train.parts import Rebuilt, TrainerConfig
from jgraph.train.run.history import History
from jgraph.train.strategies.local import Local

_LOG = logging.getLogger("jgraph.recover")

_LOSS_ERRORS: Final = (ClusterError, ProtocolError, InternalError, UninitializedError)
"""What a step may fail with where a task is gone, or was started again meanwhile.

None of these alone is a loss: a run goes back only if a task is another process by now,
or a connection ended. ``InternalError`` is among them because what a survivor was doing
with a lost task may end in any exception (see ``failed.as_error``); its message is in
the log, and ``Recoveries`` bounds how often.
"""


@final
@dataclass(slots=True)
class Recover:
    """Makes the next attempt of a run, after an error.

    Attributes:
      cluster: whose tasks may be lost.
      saving: has the checkpoints; None: there are none.
      history: what was measured.
      stop: set from another thread: the run is to end; if it waits, at once.
      remake: makes the parts of an attempt anew. That takes seconds and needs no task,
        so it is done in a thread while tasks are waited for.
      again: given a directory and those parts, fills them from its newest good
        checkpoint, and returns what does the steps that are left.
      keep_on: does so from what is kept of a lost ps; None: nothing is.
      known: which processes the run began with.
      wait_s: how long all tasks are waited for.
      clock: says how long it took.
    """

    cluster: Cluster
    saving: Saver | RemoteSaver | None
    history: History
    stop: threading.Event
    remake: Callable[[], Rebuilt]
    again: Callable[[Path, Future[Rebuilt]], Attempt]
    keep_on: Callable[[Future[Rebuilt]], Attempt] | None
    known: Mapping[TaskName, str]
    wait_s: float
    clock: Clock = field(default_factory=SystemClock)
    decide: Recoveries = field(init=False)

    def __post_init__(self) -> None:
        self.decide = Recoveries(self.history.steps)

    def next_attempt(self, error: JGError) -> tuple[Attempt, Recovery]:
        """Waits for the tasks, and returns the attempt and what happened.

        A run that was to end anyway ends there: stopped, with what it goes back to.

        Raises:
          JGError: nothing was lost, or the run cannot go on, or was stopped while it
            waited; says why.
        """
        step, lost, kept = self.history.steps, self._lost(error), self.keep_on
        began = self.clock.now()
        stop = threading.Event() if self.stop.is_set() else self.stop
        while lost and not stop.is_set():
            newest = self._newest() if kept is None else step
            told = isinstance(error, TaskLeavingError)
            match self.decide.lost(newest, told=told):
                case GiveUp(why):
                    raise self._hopeless(error, why, self._newest())
                case GoBack(to):
                    self._announce(lost, step, to, error)
            with ThreadPoolExecutor(1, thread_name_prefix="jgraph-recover") as pool:
                remade = pool.submit(self.remake)
                try:
                    if not self.cluster.wait_for_tasks(self.wait_s, stop=stop):
                        break
                except ClusterError as missing:
                    raise self._hopeless(missing, "", self._newest()) from error
                # While the master was gone nobody could say who else was.
                lost = self._changed() or lost
                self.known = incarnations_of(self.cluster)
                try:
                    attempt = self._next(remade) if kept is None else kept(remade)
                except CopyLostError as another:
                    kept, error = None, another
                    continue
                except JGError as another:
                    lost, error = self._lost(another), another
                    continue
            return attempt, self._went_on(attempt, lost, step, error, began)
        if lost:
            why = "it was stopped while it waited for that"
            raise self._hopeless(error, why, self._newest()) from error
        raise error

    def _next(self, remade: Future[Rebuilt]) -> Attempt:
        assert self.saving is not None  # it has a checkpoint
        return self.again(self.saving.directory, remade)

    def _newest(self) -> int | None:
        if self.saving is None:
            return None
        self.saving.wait()
        steps = our_steps(self.saving.directory)
        return steps[-1] if steps else None

    def _lost(self, error: JGError) -> list[TaskName]:
        """Returns the tasks whose loss may be why there is this error."""
        if not isinstance(error, _LOSS_ERRORS):
            return []
        if isinstance(error, TaskLeavingError):
            return list(error.details["tasks"])
        lost = self._changed()
        if not lost and isinstance(error, TaskLostError | ClusterUnreachableError):
            # All live, and a connection was lost: what was under way may be half done.
            named = str(error.details.get("task", ""))
            tasks = self.cluster.tasks()
            lost = [t for t in tasks if t == named] or [self.cluster.master]
        return lost

    def _changed(self) -> list[TaskName]:
        """Returns the tasks that are gone, or were started again."""
        now = incarnations_of(self.cluster)
        if self.known and not now:
            return [self.cluster.master]
        return [task for task, one in self.known.items() if now.get(task) != one]

    def _announce(
        self, lost: list[TaskName], step: int, to: int, error: JGError
    ) -> None:
        if to < step or self.keep_on is None:
            assert self.saving is not None  # where it goes back to
            then = f"goes back to step {to} in {self.saving.directory}: "
            then += f"{max(0, step - to)} steps are done again"
        else:
            then = "goes on with the copies of what was there"
        what = f"{', '.join(lost)} {'was' if len(lost) == 1 else 'were'} lost at"
        why = f": {error.message.rstrip('.')}"
        if isinstance(error, TaskLeavingError):
            what, why = f"{error.message} after", ""
        # The display says so, and the end of it is told once it is known.
        _LOG.info(
            "%s step %d%s. The run waits up to %g s until all tasks answer, and then "
            "%s.",
            *(what, step, why, self.wait_s, then),
        )

    def _went_on(
        self,
        attempt: Attempt,
        lost: list[TaskName],
        step: int,
        error: JGError,
        began: float,
    ) -> Recovery:
        to = attempt.first
        if to < self.decide.first:  # all newer ones were damaged
            raise self._hopeless(error, "the checkpoints of this run are damaged", to)
        if self.saving is not None:
            self.saving.go_back(attempt.take, to)
        recovery = Recovery(tuple(lost), step, to)
        told = isinstance(error, TaskLeavingError)
        level = logging.INFO if told else logging.WARNING
        _LOG.log(
            level,
            "%s %s at step %d; after %.1f s all tasks answer, and the run goes on from "
            "step %d: %d steps are done again.",
            ", ".join(lost),
            "was told to end" if told else "was lost",
            *(step, self.clock.now() - began, to, recovery.again),
        )
        return recovery

    def _hopeless(self, error: JGError, why: str, newest: int | None) -> JGError:
        directory = "" if self.saving is None else str(self.saving.directory)
        return hopeless(error, why, directory, newest)


def make_recover(
    given: TrainerConfig,
    wanted: FitRequest,
    saving: Saver | RemoteSaver | None,
    history: History,
    attempts: Attempts,
) -> Recover | None:
    """Returns what makes further attempts; None: there is nothing to go on from.

    A run in one process loses none.
    """
    cluster, strategy = given.cluster, given.strategy
    if cluster is None or isinstance(strategy, Local):
        return None
    if wanted.detached:
        return None  # its master takes it back
    kept = None if strategy.durability == "checkpoint" else attempts.keep_on
    if saving is None and kept is None:
        return None
    return Recover(
        *(cluster, saving, history, attempts.stop),
        remake=attempts.remake,
        again=attempts.again,
        keep_on=kept,
        known=incarnations_of(cluster),
        wait_s=wanted.wait_s,
    )
