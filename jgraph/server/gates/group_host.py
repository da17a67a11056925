"""Host of collective groups: what their members need of the task that they are on.

Each server has one. What it has its children do is loaded with the first group.
"""

from dataclasses import dataclass
from typing import final

from jgraph.cluster.events import EventLog
from jgraph.cluster.transport_choice import is_loopback
from jgraph.errors import ConfigError, InsecureError, UnknownDeviceError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.shared_memory.memory_files import is_supported
from jgraph.server.task_context import TaskContext


@final
@dataclass(frozen=True, slots=True)
class GroupHost:
    """What groups need of their task.

    Args:
      context: says where tasks are, and whether strangers may listen.
      events: of the task.
    """

    context: TaskContext
    events: EventLog

    def check(self, order: pb.CollectiveGroup) -> None:
        """Refuses a group that has to be none here.

        Args:
          order: says who is in it.

        Raises:
          ConfigError: this system cannot lend memory to a child.
          InsecureError: others would read, and could change, what is summed.
          UnknownDeviceError: a member is no task of the cluster, or cannot be dialled.
        """
        if not is_supported():
            raise ConfigError(
                "SyncPS(dense='xla') lends memory to child processes, which needs "
                "Linux; write dense='workers'"
            )
        for part in order.parts:
            host = self.host(TaskName(part.task))
            if not (is_loopback(host) or self.context.insecure_i_accept):
                task = self.context.task
                raise InsecureError(
                    f"SyncPS(dense='xla'): XLA's collectives travel without "
                    f"encryption and ask nobody who he is, and {part.task} is at "
                    f"'{host}', beyond this machine; write dense='workers', which is "
                    f"encrypted, or, in a network that is yours alone, start {task} "
                    "and all other workers with --insecure-i-accept",
                    task=task,
                )

    def host(self, task: TaskName) -> str:
        """Returns where others reach a task.

        Raises:
          UnknownDeviceError: they do not.
        """
        address = self.context.addresses.get(task, "")
        if not address:
            raise UnknownDeviceError(
                f"SyncPS(dense='xla'): nobody knows where {task} listens, and workers "
                "dial each other's children; write dense='workers'",
                task=task,
            )
        return address.rpartition(":")[0]
