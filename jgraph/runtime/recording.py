"""Records of every change of a task's state, in the order in which they were made.

A record is made while the locks of what changed are held, so that records of one
variable are in the order of its versions; and a step is told of when whoever takes the
records has kept them.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np

from jgraph.coordination.kept_updates import KeptUpdates
from jgraph.errors import JGError
from jgraph.plan.replay import NodeRan, Record, What
from jgraph.runtime.rendezvous import StepKey

OnKept: TypeAlias = Callable[[JGError | None], None]


@final
class Recorder:
    """Numbers records and hands them on; holds steps back until theirs are kept.

    ``put`` is called in any thread, everything else on the task's event loop.

    Args:
      wake: called in any thread when there are records to ``take``, once until then.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._updates = KeptUpdates[StepKey]()
        self._made: deque[Record] = deque()
        self._waiting: dict[StepKey, OnKept] = {}
        self.error: JGError | None = None
        """Why nothing is kept any more."""

    def put(
        self,
        what: What,
        arrays: Sequence[np.ndarray[Any, Any]],
        step: StepKey | None = None,
    ) -> int:
        """Takes what changed, in the order of the changes; returns its number.

        Args:
          what: see ``Record``.
          arrays: they do not change any more.
          step: what is held back until this is kept.
        """
        with self._lock:
            number = self._updates.made(step)
            if self.error is not None:
                return number
            first = not self._made
            self._made.append(Record(number, what, arrays))
        if first:
            self._wake()
        return number

    def take(self) -> list[Record]:
        """Returns the records made since the last call."""
        with self._lock:
            taken = list(self._made)
            self._made.clear()
        return taken

    def when_kept(self, step: StepKey, callback: OnKept) -> None:
        """Calls back when all that a step changed is kept, or never will be.

        At once if it is, or changed nothing.
        """
        with self._lock:
            now = self._updates.over(step)
        if now or self.error is not None:
            callback(None if now else self.error)
        else:
            self._waiting[step] = callback

    def forget(self, step: StepKey) -> None:
        """Learns that a step failed."""
        with self._lock:
            self._updates.forget(step)

    def kept(self, number: int) -> None:
        """Learns that all records up to this one are kept."""
        with self._lock:
            done = self._updates.kept(number)
        self._tell(done, None)

    def fail(self, error: JGError) -> None:
        """Learns that no more records are kept: every step that makes one fails."""
        with self._lock:
            if self.error is None:
                self.error = error
            self._made.clear()
            lost = self._updates.fail()
        self._tell(lost, error)

    def _tell(self, steps: Sequence[StepKey], error: JGError | None) -> None:
        for step in steps:
            # One that was over after a failure was told of it at once.
            if (callback := self._waiting.pop(step, None)) is not None:
                callback(error)


@final
@dataclass(frozen=True, slots=True)
class Recording:
    """The recorder of a program's steps.

    Attributes:
      recorder: of the task.
      program: the program's number there.
    """

    recorder: Recorder
    program: int

    def note(
        self, step: StepKey, node: int, taken: Sequence[np.ndarray[Any, Any]]
    ) -> None:
        """Takes what a node of a step took."""
        self.recorder.put(NodeRan(self.program, node), taken, step)
