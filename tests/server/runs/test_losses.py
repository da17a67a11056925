"""What a run has lost when a worker is gone that holds variables of it, or none."""

import asyncio
from typing import Any, cast

import pytest

from jgraph.coordination.run.supervisor import LoopLost, StateLost
from jgraph.errors import TaskLostError, UnknownMethodError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.transport import Frame
from jgraph.server.runs.losses import RunLosses
from jgraph.server.runs.peers import Peers

OWNER, WORKER = TaskName("/job:worker/task:0"), TaskName("/job:worker/task:1")


class Answering:
    """The tasks of a cluster, of which some answer: by task the number of a process."""

    def __init__(self, processes: dict[TaskName, int]) -> None:
        self.processes = processes

    def tasks(self) -> list[TaskName]:
        """Returns all of the cluster."""
        return [OWNER, WORKER]

    async def call(self, task: TaskName, method: str, _: Frame, **__: Any) -> Frame:
        """Answers as the task that is asked."""
        if task not in self.processes:
            raise TaskLostError(f"{task} does not answer", task=task)
        if method == "TaskStatus":
            process = self.processes[task]
            status = pb.TaskStatus(task=task, state="ready", incarnation=process)
            return frame(task_status=status)
        if method == "Master.Status":
            return frame(cluster_status=pb.ClusterStatus())
        raise UnknownMethodError(method)


def losses(peers: Answering) -> RunLosses:
    order = pb.OpenRun(run="r", owners=[OWNER])
    found = RunLosses(order, cast("Peers", peers))
    found.known = {OWNER: "1", WORKER: "2"}
    return found


@pytest.mark.parametrize(
    ("lost", "answering", "event"),
    [
        (WORKER, [OWNER], LoopLost),
        (OWNER, [WORKER], StateLost),
        (OWNER, [OWNER, WORKER], LoopLost),  # no more than its link
    ],
    ids=["a worker", "an owner", "the link to an owner"],
)
def test_a_worker_that_holds_variables_is_lost_with_them(
    lost: TaskName, answering: list[TaskName], event: type
) -> None:
    processes = {OWNER: 1, WORKER: 2}
    peers = Answering({task: processes[task] for task in answering})
    loop = pb.RunLoop(task=lost, replica=3)
    error = TaskLostError(f"{lost} is gone", task=lost)
    found = asyncio.run(losses(peers).of(loop, error))
    assert isinstance(found, event)
    assert getattr(found, "replica", None) == 3


def test_an_owner_that_was_started_again_is_not_taken_back_as_a_worker() -> None:
    async def main() -> None:
        peers = Answering({OWNER: 7, WORKER: 8})
        found, ready = losses(peers), {OWNER: "7", WORKER: "8"}
        assert await found.is_back(WORKER, ready)
        assert not await found.is_back(OWNER, ready)
        error = await found.unreached_ps()
        assert error is not None
        assert "was started again, and what it held is lost" in error.message
        assert found.known == {OWNER: "1", WORKER: "8"}
        assert found.renewed == {WORKER}
        found.known = {}  # it did not answer when the run learned who is there
        assert await found.is_back(OWNER, ready)

    asyncio.run(main())
