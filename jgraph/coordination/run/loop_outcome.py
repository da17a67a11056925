"""Loop outcome: judges whether the error that ended a loop is a loss or a failure."""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final, final

from jgraph.errors import (
    ClusterUnreachableError,
    JGError,
    NonFiniteError,
    RowBudgetError,
    RowIdError,
    TaskLostError,
)
from jgraph.graph.ir import TaskName

BATCH_ERRORS: Final = (NonFiniteError, RowIdError, RowBudgetError)
"""Errors of a step that is not applied, whose worker and tasks are well."""


@final
class LoopOutcome(Enum):
    """Why a loop ended."""

    MASTER_LOST = auto()
    """The connection to the master ended."""

    WORKER_LOST = auto()
    """The master lost the worker."""

    ARBITER_LOST = auto()
    """The master lost the arbiter in synchronous training."""

    LINK_LOST = auto()
    """The worker lost another task, which the master may still reach."""

    UNWELL = auto()
    """Its batch cannot be trained on; all loops end after their steps in flight."""

    FAILED = auto()
    """Anything else: the run cannot go on as it is."""


def judge(
    error: JGError, task: TaskName, master: TaskName, *, decides: bool
) -> LoopOutcome:
    """Returns what the end of a loop means.

    Args:
      error: ended it.
      task: ran it.
      master: relayed its reports.
      decides: it is the loop that decides in synchronous training.

    Example:
      >>> master, ps, worker = map(TaskName, ["/job:ps/task:0", "/job:ps/task:1", "w"])
      >>> judge(TaskLostError("gone", task=ps), worker, master, decides=False).name
      'LINK_LOST'
    """
    if isinstance(error, BATCH_ERRORS):
        return LoopOutcome.UNWELL
    if not isinstance(error, TaskLostError | ClusterUnreachableError):
        return LoopOutcome.FAILED
    named = error.details.get("task")
    if not named or named == task == master:
        return LoopOutcome.MASTER_LOST
    if named == task:
        return LoopOutcome.ARBITER_LOST if decides else LoopOutcome.WORKER_LOST
    if decides:
        return LoopOutcome.MASTER_LOST if named == master else LoopOutcome.FAILED
    return LoopOutcome.LINK_LOST


def is_link_loss(
    named: TaskName, began: Mapping[TaskName, str], ready: Mapping[TaskName, str]
) -> bool:
    """Whether only its link is lost to a worker that says it lost another task.

    Args:
      named: the task that it lost.
      began: which start of each task the loops began with.
      ready: which start of each the master reaches now, that takes new work.

    Example:
      >>> ps = TaskName("/job:ps/task:0")
      >>> is_link_loss(ps, {ps: "a"}, {ps: "a"}), is_link_loss(ps, {ps: "a"}, {ps: "b"})
      (True, False)
    """
    return named in ready and ready[named] == began.get(named)
