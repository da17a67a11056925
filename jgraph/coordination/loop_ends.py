"""What the end of a loop by an error means for the run."""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final, final

from jgraph.errors import (
    ClusterUnreachableError,
    JGError,
    NonFiniteError,
    RowIdError,
    TaskLostError,
)
from jgraph.graph.ir import TaskName

OF_A_BATCH: Final = (NonFiniteError, RowIdError)
"""Errors of a step that is not applied, whose worker and tasks are well."""


@final
class Verdict(Enum):
    """Why a loop ended."""

    MASTER_LOST = auto()
    """The connection to the master ended."""

    WORKER_LOST = auto()
    """The master lost the worker."""

    DECIDER_LOST = auto()
    """The master lost who decides in synchronous training."""

    LINK_LOST = auto()
    """The worker lost another task, which the master may still reach."""

    UNWELL = auto()
    """Its batch cannot be trained on; all loops end after their steps in flight."""

    FAILED = auto()
    """Anything else: the run cannot go on as it is."""


def judge(
    error: JGError, task: TaskName, master: TaskName, *, decides: bool
) -> Verdict:
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
    if isinstance(error, OF_A_BATCH):
        return Verdict.UNWELL
    if not isinstance(error, TaskLostError | ClusterUnreachableError):
        return Verdict.FAILED
    named = error.details.get("task")
    if not named or named == task == master:
        return Verdict.MASTER_LOST
    if named == task:
        return Verdict.DECIDER_LOST if decides else Verdict.WORKER_LOST
    if decides:
        return Verdict.MASTER_LOST if named == master else Verdict.FAILED
    return Verdict.LINK_LOST


def is_cut_off(
    named: TaskName, began: Mapping[TaskName, str], ready: Mapping[TaskName, str]
) -> bool:
    """Whether only its link is lost to a worker that says it lost another task.

    Args:
      named: the task that it lost.
      began: which start of each task the loops began with.
      ready: which start of each the master reaches now, that takes new work.

    Example:
      >>> ps = TaskName("/job:ps/task:0")
      >>> is_cut_off(ps, {ps: "a"}, {ps: "a"}), is_cut_off(ps, {ps: "a"}, {ps: "b"})
      (True, False)
    """
    return named in ready and ready[named] == began.get(named)
