"""Links of a run that are silent: what is waited for, and what is not."""

from typing import Any, cast

from jgraph.errors import TaskLostError, UnknownDeviceError
from jgraph.graph.ir import TaskName
from jgraph.rpc.transport import Address, Frame
from jgraph.server.runs.links import wait_reconnected
from jgraph.server.runs.peers import Peers
from tests.support.loop_orders import PS, WORKER, SetClock
from tests.support.run_async import run_async


class Without:
    """A cluster that the worker has left, and in which nobody answers."""

    def tasks(self) -> list[TaskName]:
        """Returns the others."""
        return [PS]

    def address(self, task: TaskName) -> Address:
        """Returns where a task of the cluster listens."""
        if task != PS:
            raise UnknownDeviceError(f"this cluster has no {task}")
        return Address("127.0.0.1:1")

    async def call(self, task: TaskName, method: str, _: Frame, **__: Any) -> Frame:
        """Answers nothing."""
        raise TaskLostError(f"{task} does not answer", task=task)


def test_a_task_that_has_left_the_cluster_is_not_waited_for() -> None:
    """A standby would end with the master whose place it is to take."""
    lost = TaskLostError(f"{WORKER} is gone", task=WORKER)
    peers = cast("Peers", Without())
    waits = wait_reconnected(WORKER, lost, peers, {WORKER: "1"}, SetClock())
    assert not run_async(waits, timeout_s=20)
