"""Losses of tasks while a run is prepared: waits for them, and begins with what it had.

From its first step on the master of a run looks after it. Before that nobody does, and
making ready takes seconds: sources that are opened, initial values, and programs that
are compiled.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar, final

from jgraph.client.cluster import Cluster
from jgraph.cluster.polling import Polling
from jgraph.coordination.run.recovery import hopeless, is_loss
from jgraph.errors import (
    ConfigError,
    InternalError,
    InvalidProgramError,
    JGError,
    UninitializedError,
)
from jgraph.runtime.files.step_files import our_steps
from jgraph.train.state.remote_state import RemoteState
from jgraph.train.state.runner import Order

_T = TypeVar("_T")
_LOG: Final = logging.getLogger("jgraph.recover")
_AGAIN_S: Final = 0.1
_PERHAPS: Final = (
    *(InternalError, InvalidProgramError, UninitializedError),
    ConfigError,
)
"""What else fails where a task was started again: it has no values, programs, runs."""


@final
@dataclass(frozen=True, slots=True)
class EarlyWait:
    """Does again what failed because a task was lost, once all tasks answer.

    Args:
      cluster: of the tasks; None: this process does the work, and loses none.
      wait_s: how long, if tasks are lost again and again.
      stop: set from another thread: waits no longer.
    """

    cluster: Cluster | None
    wait_s: float
    stop: threading.Event

    def outlive(
        self,
        work: Callable[[], _T],
        *,
        loses: Callable[[JGError], bool] = is_loss,
        renew: Callable[[JGError], None] = lambda error: None,
    ) -> _T:
        """Returns what ``work`` does.

        Args:
          work: asks tasks for something; may be done several times.
          loses: whether an error is that of a lost task.
          renew: called with it before the work is done again.

        Raises:
          JGError: something else, or nobody starts a lost task again, or it is lost
            again and again for ``wait_s``.
        """
        polling: Polling | None = None
        while True:
            try:
                return work()
            except JGError as error:
                if not loses(error):
                    raise
                lost = error
                polling = polling or Polling(_AGAIN_S, self.wait_s)
                if not polling.wait():
                    raise
                self.wait(error)
            renew(lost)

    def wait(self, error: JGError) -> None:
        """Waits until all tasks answer.

        Raises:
          JGError: one does not, and nobody starts it again, or not in time.
        """
        cluster = self.cluster
        if cluster is None or not cluster.starts_again:
            raise error
        what = "%s. The run has not begun; it waits up to %g s until all tasks answer"
        _LOG.warning(what, error.message.rstrip("."), self.wait_s)
        if not cluster.wait_for_tasks(self.wait_s, stop=self.stop):
            raise error


@final
@dataclass(frozen=True, slots=True)
class EarlyLosses:
    """Lets what is done before a run begins outlive the loss of tasks.

    Args:
      state: variables of the run.
      order: what to train.
      forget: called before it is done again: no task may have a program any more.
      ends: whether to do it again makes no sense, as what is done is of other tasks.
    """

    state: RemoteState
    order: Order
    forget: Callable[[], None]
    ends: Callable[[], bool]

    def outlive(self, work: Callable[[], _T]) -> _T:
        """Returns what ``work`` does, which is done again after each loss.

        Raises:
          JGError: see ``EarlyWait.outlive``, or nothing is kept of what a task held.
        """
        order = self.order
        wait = EarlyWait(self.state.cluster, order.wait_s, order.stop)
        return wait.outlive(work, loses=self._is_loss, renew=self._renew)

    def begin_anew(self, error: JGError) -> None:
        """Waits for all tasks, and gives all variables their initial values again.

        Args:
          error: of a run that ended before anything of it was told of.

        Raises:
          JGError: it is not that of a lost task, or that does not come back.
        """
        if not self._is_loss(error):
            raise error
        order, state = self.order, self.state
        EarlyWait(state.cluster, order.wait_s, order.stop).wait(error)
        with state.lock:
            if not state.lost_values():
                raise error
            _LOG.warning("all variables get their initial values again")
            state.begin_anew()

    def _is_loss(self, error: JGError) -> bool:
        if self.ends():
            return False
        if is_loss(error):
            return True
        if isinstance(error, _PERHAPS):
            with suppress(JGError):  # what was lost may be away again
                return bool(self.state.lost_values())
        return False

    def _renew(self, error: JGError) -> None:
        self.forget()
        self._give_back(error)

    def _give_back(self, error: JGError) -> None:
        """Gives lost variables the values that they had.

        Raises:
          JGError: nothing is kept of them.
        """
        state, order = self.state, self.order
        with state.lock:
            if not (tasks := state.lost_values()):
                return
            who = f"{', '.join(tasks)} lost what it held before the run began"
            if state.is_initial:
                _LOG.warning("%s; that gets its initial values again", who)
                state.initialize(again=True)
                return
            options = order.checkpoint
            directory = "" if options is None else str(options.directory)
            steps = our_steps(Path(directory)) if directory else []
            newest = steps[-1] if steps else None
            if order.restore is None or newest != order.first:
                raise hopeless(error, who, directory, newest)
            _LOG.warning("%s; it goes on from step %d in %s", who, newest, directory)
            order.restore(Path(directory))
