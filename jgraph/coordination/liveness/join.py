"""Join barrier: waits until all listed tasks of a cluster have answered.

The shell asks every task; each answer or refusal is an event. The call is over when all
have answered or the time is up, and then it names who is missing and why.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias, final

from jgraph.errors import JGError, TaskMissingError, VersionError
from jgraph.graph.ir import TaskName


@final
@dataclass(frozen=True, slots=True)
class TaskAnswered:
    """A task answered with its incarnation."""

    task: TaskName
    incarnation: int


@final
@dataclass(frozen=True, slots=True)
class TaskRefused:
    """Asking a task failed."""

    task: TaskName
    error: JGError


@final
@dataclass(frozen=True, slots=True)
class TimeIsUp:
    """The caller waits no longer."""

    timeout_s: float


Event: TypeAlias = TaskAnswered | TaskRefused | TimeIsUp


@final
@dataclass(frozen=True, slots=True)
class AskAgain:
    """Ask this task again in a moment."""

    task: TaskName


@final
@dataclass(frozen=True, slots=True)
class Complete:
    """All tasks answered."""


@final
@dataclass(frozen=True, slots=True)
class GiveUp:
    """Stop waiting, with this error."""

    error: JGError


Instruction: TypeAlias = AskAgain | Complete | GiveUp


@final
class JoinBarrier:
    """State machine of one wait for all tasks.

    Example:
      >>> call = JoinBarrier({TaskName("/job:ps/task:0"): "localhost:1"})
      >>> call.handle(TaskAnswered(TaskName("/job:ps/task:0"), 7))
      [Complete()]
    """

    def __init__(self, addresses: dict[TaskName, str]) -> None:
        self._addresses = addresses
        self._missing: dict[TaskName, JGError | None] = dict.fromkeys(addresses)
        self.incarnations: dict[TaskName, int] = {}

    @property
    def missing(self) -> list[TaskName]:
        """Tasks that have not answered, sorted."""
        return sorted(self._missing)

    def handle(self, event: Event) -> list[Instruction]:
        """Takes an event; returns what to do now."""
        match event:
            case TaskAnswered(task, incarnation):
                self._missing.pop(task, None)
                self.incarnations[task] = incarnation
                return [] if self._missing else [Complete()]
            case TaskRefused(task, error):
                if isinstance(error, VersionError):
                    return [GiveUp(error)]
                self._missing[task] = error
                return [AskAgain(task)]
            case TimeIsUp(timeout_s):
                return [GiveUp(self._missing_error(timeout_s))]

    def _missing_error(self, timeout_s: float) -> TaskMissingError:
        total = len(self._addresses)
        answers = total - len(self._missing)
        who = "; ".join(self._describe(self.missing))
        return TaskMissingError(
            f"{answers} of {total} tasks answered in {timeout_s:g} s. Missing: {who}. "
            "Start them with `jgraph server --job … --task …` on their hosts, or take "
            "them out of the cluster description",
            missing=self.missing,
        )

    def _describe(self, tasks: Iterable[TaskName]) -> list[str]:
        def reason(task: TaskName) -> str:
            error = self._missing[task]
            return f" ({error.message})" if error is not None else " (no answer yet)"

        return [f"{task} at {self._addresses[task]}{reason(task)}" for task in tasks]
