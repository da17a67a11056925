"""What a master says of a synchronous run, whose loops come one after the other."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from jgraph.cluster.run_record import RunRecord
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame


class SetClock:
    """Says what it is told."""

    at_s = 0.0

    def now(self) -> float:
        """Returns that."""
        return self.at_s


PS, WORKER = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:0")


async def reports(state: str, steps: int, position: str = "") -> AsyncIterator[Frame]:
    body = pb.LoopReport(state=state, data_position=position)
    yield frame(loop_report=body, tensors=[np.arange(steps), np.zeros(steps)])


def deciding(name: str) -> pb.RunLoop:
    return pb.RunLoop(loop=name, task=PS, sync=pb.SyncOrder(gate="g"))


def contributing(name: str) -> pb.RunLoop:
    return pb.RunLoop(loop=name, task=WORKER, batch_feed="slot")


@pytest.mark.parametrize(
    ("state", "said"), [("done", "done"), ("stopped", "stopped"), ("alone", "failed")]
)
def test_run_goes_on_while_it_is_paused_and_its_steps_are_those_that_were_decided(
    state: str, said: str
) -> None:
    async def run() -> None:
        clock = SetClock()
        record = RunRecord(WORKER, pb.OpenRun(run="r", info="{}"), clock)
        worker = record.follow(contributing("w-0"), reports("stopped", 9))
        first = record.follow(deciding("a-0"), reports("paused", 3, "[1]"))
        told = [body_of(report).state async for report in first]
        assert told == ["paused"]
        assert [len(report.tensors[0]) async for report in worker] == [9]
        assert (record.row().state, record.row().steps) == ("running", 3)
        assert record.position == "[1]"
        clock.at_s += 2.0
        last = record.follow(deciding("a-1"), reports(state, 2, "[2]"))
        assert [body_of(report).state async for report in last] == [state]
        clock.at_s += 5.0
        row = record.row()
        assert (row.state, row.steps, row.seconds, row.age_s) == (said, 5, 2.0, 7.0)
        assert record.position == "[2]"
        everything = [body_of(report).loop async for report in record.all()]
        assert everything == ["a-0", "a-1"]

    asyncio.run(run())
