"""Change log of a task: numbers records and holds steps until theirs are committed.

A record is made while the locks of what changed are held, so that records of one
variable are in the order of its versions; and a step is told of when whoever takes the
records has kept them.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import numpy as np

from jgraph.coordination.run.same_version import Progress
from jgraph.coordination.step.commit_tracker import CommitTracker
from jgraph.errors import CopyLostError, JGError
from jgraph.plan.program.replay import NodeRan, Record, What
from jgraph.runtime.rendezvous import StepKey
from jgraph.runtime.store.undo import PutBack, Undo

OnKept: TypeAlias = Callable[[JGError | None], None]
Work: TypeAlias = Callable[[], list[Any]]
_HOLD_S: Final = 20.0
"""An update that computes for longer counts as made in part; who asks waits 30 s."""


@final
class Recorder:
    """Numbers records and hands them on; holds steps back until theirs are kept.

    ``put`` is called in any thread, and so is what waits; everything else on the
    task's event loop.

    Args:
      wake: called in any thread when there are records to ``take``, once until then.
      undoes: what the newest update changed can be undone; see ``undo``.
    """

    def __init__(self, wake: Callable[[], None], *, undoes: bool = False) -> None:
        self._wake = wake
        self._undoes = undoes
        self._undo: list[PutBack] = []
        self._before = 0  # version before the newest update
        self._lock = threading.Condition()
        self._progress = Progress()
        self._update = 0  # number of the last one that began
        self._working = 0  # nodes of updates
        self._kept_number = 0  # number of the last record that is
        self._is_held = False
        self._updates = CommitTracker[StepKey]()
        self._records: deque[Record] = deque()
        self._waiting: dict[StepKey, OnKept] = {}
        self.error: JGError | None = None
        """Why nothing is kept any more."""

    def put(
        self,
        what: What,
        arrays: Sequence[np.ndarray[Any, Any]],
        step: StepKey | None = None,
        *,
        update: bool = False,
    ) -> int:
        """Takes what changed, in the order of the changes; returns its number.

        Args:
          what: see ``Record``.
          arrays: they do not change any more.
          step: what is held back until this is kept.
          update: a node changed it, in an update that has begun.
        """
        with self._lock:
            number, version = self._updates.append(step), 0
            if update:
                # What it averages may come after all that makes the update whole.
                version = self._update
            elif not isinstance(what, NodeRan):
                version = self._progress.version
            if update and isinstance(what, NodeRan):
                self._progress.ran(what.node)
            if self.error is not None:
                return number
            first = not self._records
            self._records.append(Record(number, what, arrays, version))
        if first:
            self._wake()
        return number

    @property
    def number(self) -> int:
        """Of the last record."""
        return self._updates.count

    @property
    def is_torn(self) -> bool:
        """Whether a part of an update has been made, and another has not."""
        return self._progress.is_torn

    def begins(self, due: frozenset[int]) -> None:
        """Begins an update, which is made when these nodes are recorded."""
        with self._lock:
            # All have made the one before, so nobody goes back behind it.
            self._before = self._progress.version
            self._undo.clear()
            self._update = self._progress.begins(due)

    @property
    def undo(self) -> Undo | None:
        """Takes what puts back what a node of an update changed; None: it need not."""
        return self._undo.append if self._undoes else None

    def holding(self, work: Work) -> Work:
        """Returns work of an update, to be done unless no more is to change."""

        def done() -> list[Any]:
            with self._lock:
                if self._is_held:
                    raise CopyLostError("another has taken the place of what is here")
                self._working += 1
            try:
                return work()
            finally:
                with self._lock:
                    self._working -= 1
                    self._lock.notify_all()

        return done

    def hold(self) -> range:
        """Lets no update change anything more; waits for those that do, in a thread.

        Returns:
          The versions that ``end`` can make: how many updates are made, none if one of
          them is made in part, and one less if it can be undone.
        """
        with self._lock:
            self._is_held = True
            ended = self._lock.wait_for(lambda: not self._working, _HOLD_S)
            if not ended:
                return range(0)
            newest = self._progress.version
            first = self._before if self._undoes else newest + self._progress.is_torn
            return range(first, newest + 1)

    def end(self, version: int) -> None:
        """Makes what is held be of a version, in a thread.

        Raises:
          CopyLostError: it is none of those that ``hold`` returned.
        """
        if version not in self.hold():
            raise CopyLostError(f"what is held cannot be of version {version}")
        if version < self._progress.version or self._progress.is_torn:
            for put_back in reversed(self._undo):
                put_back()
            self._progress = Progress(version)
        self._before = version  # what is needed to go back behind it is given up
        self._undo.clear()

    def take(self) -> list[Record]:
        """Returns the records made since the last call."""
        with self._lock:
            records = list(self._records)
            self._records.clear()
        return records

    def when_kept(self, step: StepKey, callback: OnKept) -> None:
        """Calls back when all that a step changed is kept, or never will be.

        At once if it is, or changed nothing.
        """
        with self._lock:
            now = self._updates.finish(step)
        if now or self.error is not None:
            callback(None if now else self.error)
        else:
            self._waiting[step] = callback

    def forget(self, step: StepKey) -> None:
        """Learns that a step failed."""
        with self._lock:
            self._updates.forget(step)

    def wait_kept(self, number: int, timeout_s: float) -> None:
        """Waits in a thread until a record is kept, or nothing is, or for so long."""
        with self._lock:
            self._lock.wait_for(
                lambda: self._kept_number >= number or self.error is not None, timeout_s
            )

    def commit(self, number: int) -> None:
        """Learns that all records up to this one are kept."""
        with self._lock:
            done = self._updates.commit(number)
            self._kept_number = max(self._kept_number, number)
            self._lock.notify_all()
        self._tell(done, None)

    def fail(self, error: JGError) -> None:
        """Learns that no more records are kept: every step that makes one fails."""
        with self._lock:
            if self.error is None:
                self.error = error
            self._records.clear()
            lost = self._updates.fail()
            self._lock.notify_all()
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
      due: each of its steps is an update, for which these nodes change variables;
        none of them, or None: it is no update here.
    """

    recorder: Recorder
    program: int
    due: frozenset[int] | None = None

    def begins(self) -> None:
        """A step begins."""
        if self.due:
            self.recorder.begins(self.due)

    @property
    def undo(self) -> Undo | None:
        """See ``Recorder``."""
        return None if self.due is None else self.recorder.undo

    def work(self, node: int, work: Work) -> Work:
        """Returns what a node of a step does, unless nothing more may change."""
        return work if node not in (self.due or ()) else self.recorder.holding(work)

    def note(
        self, step: StepKey, node: int, inputs: Sequence[np.ndarray[Any, Any]]
    ) -> None:
        """Takes what a node of a step took."""
        what = NodeRan(self.program, node)
        self.recorder.put(what, inputs, step, update=bool(self.due))
