"""Step tracker: the parts of one step that are not done yet, and how it ends.

States of a step: *running* until every part is done or one part fails; then *over*.
The first failure decides: it is what the caller sees, and every other part is aborted.
Failures that come later are consequences and are dropped.

    running --(last part done)--> over: Finish
    running --(a part failed, a peer lost, deadline)--> over: Abort others, Fail
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias, final

from jgraph.errors import DeadlineError, JGError
from jgraph.graph.ir import TaskName


@final
@dataclass(frozen=True, slots=True)
class PartDone:
    """A task finished its partition."""

    task: TaskName


@final
@dataclass(frozen=True, slots=True)
class PartFailed:
    """A task's partition ended with an error."""

    task: TaskName
    error: JGError


@final
@dataclass(frozen=True, slots=True)
class PeerLost:
    """A task cannot be reached any more."""

    task: TaskName
    error: JGError


@final
@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The step's time is up; ``waited_for`` says what the driver itself lacked."""

    timeout_s: float
    waited_for: tuple[str, ...] = ()


Event: TypeAlias = PartDone | PartFailed | PeerLost | DeadlinePassed


@final
@dataclass(frozen=True, slots=True)
class Abort:
    """Tell a task to forget the step."""

    task: TaskName
    error: JGError


@final
@dataclass(frozen=True, slots=True)
class Finish:
    """The step is complete: every update of it has been applied."""


@final
@dataclass(frozen=True, slots=True)
class Fail:
    """The step failed."""

    error: JGError


Instruction: TypeAlias = Abort | Finish | Fail


@final
class StepTracker:
    """State machine of one step at its driver.

    Args:
      name: what the user calls the function, for messages.
      tasks: all tasks with a part in the step, the driver included.

    Example:
      >>> tracker = StepTracker("train", [TaskName("/job:ps/task:0")])
      >>> tracker.handle(PartDone(TaskName("/job:ps/task:0")))
      [Finish()]
    """

    def __init__(self, name: str, tasks: Iterable[TaskName]) -> None:
        self._name = name
        self._pending = set(tasks)
        self._over = False

    @property
    def pending(self) -> list[TaskName]:
        """Tasks that have not finished their part, sorted."""
        return sorted(self._pending)

    def handle(self, event: Event) -> list[Instruction]:
        """Takes an event; returns what to do now."""
        if self._over:
            return []
        match event:
            case PartDone(task):
                self._pending.discard(task)
                if self._pending:
                    return []
                self._over = True
                return [Finish()]
            case PartFailed(task, error):
                return self._fail(error, but=task)
            case PeerLost(task, error):
                # A part that was done before its task went away stays done.
                return self._fail(error, but=task) if task in self._pending else []
            case DeadlinePassed(timeout_s, waited_for):
                return self._fail(self._late(timeout_s, waited_for), but=None)

    def _fail(self, error: JGError, *, but: TaskName | None) -> list[Instruction]:
        self._over = True
        aborts: list[Instruction] = [
            Abort(task, error) for task in self.pending if task != but
        ]
        return [*aborts, Fail(error)]

    def _late(self, timeout_s: float, waited_for: tuple[str, ...]) -> DeadlineError:
        names = ", ".join(self.pending)
        values = (
            f" (values still to come: {', '.join(waited_for)})" if waited_for else ""
        )
        return DeadlineError(
            f"step of '{self._name}' was not done after {timeout_s:g} s; not finished: "
            f"{names}{values}. Look at these tasks with `jgraph status`, or give "
            "timeout_s=… a larger value",
            pending=self.pending,
        )
