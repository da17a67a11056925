"""Errors of XLA and of Python during a computation, as errors of ours."""

from typing import Final

from jgraph.errors import InternalError, JGError, TaskMemoryError
from jgraph.graph.ir import TaskName

_NO_MEMORY: Final = "RESOURCE_EXHAUSTED: "
"""What XLA says first when a device, or the process, gives no memory."""


def as_error(error: BaseException, task: TaskName, lost: str = "") -> JGError:
    """Returns ``error`` as one of ours.

    Args:
      error: of a segment, or already ours.
      task: where it happened.
      lost: names of variables that have no value any more.

    Example:
      >>> print(as_error(MemoryError(), TaskName("/job:ps/task:0"), lost="w")
      ...     .message.partition(";")[0])
      /job:ps/task:0 has no memory left (nothing more was given), and w lost the value
    """
    if isinstance(error, JGError) and not lost:
        return error
    first = (str(error).splitlines() or [""])[0][:300]
    if isinstance(error, MemoryError) or first.startswith(_NO_MEMORY):
        what = first.removeprefix(_NO_MEMORY).rstrip(".") or "nothing more was given"
        then = lost and f", and {lost} lost the value; restore a checkpoint"
        return TaskMemoryError(
            f"{task} has no memory left ({what}){then}; a smaller batch, more "
            "tasks, or fewer tasks on a machine need less; a plan shows what each has",
            task=task,
        )
    if lost:
        return InternalError(
            f"an update on {task} failed half-way and {lost} lost the value; restore a "
            f"checkpoint ({type(error).__name__}: {first})",
            task=task,
        )
    return InternalError(
        f"{task} failed while computing: {type(error).__name__}: {first}", task=task
    )
