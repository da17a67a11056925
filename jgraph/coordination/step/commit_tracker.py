"""Commit tracking: a step is acknowledged once all its changes are replicated."""

from collections.abc import Hashable
from typing import Generic, TypeVar, final

StepT = TypeVar("StepT", bound=Hashable)


@final
class CommitTracker(Generic[StepT]):
    """State machine of one stream of numbered records.

    Records are made in order, and are kept in order: a number stands for all before it.

    Example:
      >>> updates = CommitTracker()
      >>> updates.append("step 1"), updates.append("step 2")
      (1, 2)
      >>> updates.finish("step 1"), updates.commit(1), updates.finish("step 2")
      (False, ['step 1'], False)
      >>> updates.commit(2)
      ['step 2']
    """

    def __init__(self) -> None:
        self.count = 0
        """Records made so far."""
        self._committed = 0
        self._last: dict[StepT, int] = {}
        self._over: dict[StepT, int] = {}

    def append(self, step: StepT | None = None) -> int:
        """Counts a record that a step made (None: none did); returns its number."""
        self.count += 1
        if step is not None:
            self._last[step] = self.count
        return self.count

    def finish(self, step: StepT) -> bool:
        """Ends a step; returns whether it may be told of now, not by ``commit``.

        It makes no record any more.
        """
        last = self._last.pop(step, 0)
        if last > self._committed:
            self._over[step] = last
        return last <= self._committed

    def commit(self, number: int) -> list[StepT]:
        """Learns that all records up to this one are kept.

        Returns:
          The steps that are over and may be told of, in the order of their ends.
        """
        self._committed = max(self._committed, number)
        done = [step for step, last in self._over.items() if last <= self._committed]
        for step in done:
            del self._over[step]
        return done

    def forget(self, step: StepT) -> None:
        """Ends a step that failed: nobody waits for what it did."""
        self._last.pop(step, None)

    def fail(self) -> list[StepT]:
        """Ends the stream; returns the steps that wait for what is never kept."""
        lost = list(self._over)
        self._over.clear()
        return lost
