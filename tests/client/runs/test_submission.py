"""Submission of a run to a master that does not take all of it."""

import threading
from typing import Any, cast

import pytest

from jgraph.client.connection import Connection
from jgraph.client.runs.submission import submit_run
from jgraph.cluster.loop_messages import DealtData, LoopRequest, RunRequest
from jgraph.coordination.data.slots import Part, SlotPlan
from jgraph.errors import DeadlineError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame

PS = TaskName("/job:ps/task:0")


class Busy:
    """A master that has no time for the data of a run."""

    master = PS

    def __init__(self) -> None:
        self.runs: set[str] = set()

    def tasks(self) -> list[TaskName]:
        """Returns those of the cluster."""
        return [PS]

    def call(self, method: str, request: Frame, **_: Any) -> Frame:
        """Answers as a master does."""
        run = body_of(request).run
        if method == "Master.OpenDataRun":
            raise DeadlineError(f"'{method}' took too long")
        if method == "Master.OpenRun":
            self.runs.add(run)
        elif method == "Master.StopRun":
            self.runs.discard(run)
        return frame(empty=pb.Empty())


def test_a_run_that_could_not_be_told_to_its_end_is_forgotten() -> None:
    master = Busy()
    data = DealtData(SlotPlan([Part("data", 8)], 1, seed=0), 8, 1)

    def loops(run: str) -> tuple[list[LoopRequest], None]:
        return [], None

    with pytest.raises(DeadlineError):
        submit_run(
            cast("Connection", master),
            *(loops, RunRequest({}), data, threading.Event(), None),
            check=lambda: None,
        )
    assert not master.runs
