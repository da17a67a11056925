"""Address of a task that listens nowhere: a name for the streams that it offers."""

from typing import Final

from jgraph.graph.device import TaskName
from jgraph.rpc.transport import Address

_END: Final = ".dial-only:1"


def dial_only_address(task: TaskName, incarnation: int) -> Address:
    """Returns what stands for the address of a process that only dials.

    Each process has its own, so nobody takes another one of the task for it.

    Example:
      >>> dial_only_address(TaskName("/job:worker/task:3"), 255)
      'worker-3.ff.dial-only:1'
    """
    job, _, index = task.removeprefix("/job:").partition("/task:")
    return f"{job}-{index}.{incarnation:x}{_END}"


def is_dial_only(address: Address) -> bool:
    """Whether nothing listens at an address, and its task dials.

    Example:
      >>> is_dial_only("worker-3.ff.dial-only:1"), is_dial_only("nodeA:8470")
      (True, False)
    """
    return address.endswith(_END)
