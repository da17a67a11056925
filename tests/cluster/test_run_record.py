"""What a master keeps of a run and tells of it, whoever watches."""

import asyncio

import numpy as np

from jgraph.cluster.run_record import RunRecord
from jgraph.errors import TaskLostError
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


def report(steps: int, position: str = "", late: int = 0) -> Frame:
    body = pb.LoopReport(
        state="running",
        data_position=position,
        dropped={WORKER: late} if late else {},
    )
    return frame(loop_report=body, tensors=[np.arange(steps), np.ones(steps)])


def deciding(name: str) -> pb.RunLoop:
    return pb.RunLoop(loop=name, task=PS, replica=1, sync=pb.SyncOrder(gate="g"))


def contributing(name: str) -> pb.RunLoop:
    return pb.RunLoop(loop=name, task=WORKER, batch_feed="slot")


def test_steps_of_a_synchronous_run_are_those_that_were_decided_in_all_its_rows() -> (
    None
):
    async def run() -> None:
        clock = SetClock()
        record = RunRecord(WORKER, pb.OpenRun(run="r", info="{}"), clock)
        for loop, steps, late in [("a-0", 3, 2), ("a-1", 4, 5)]:
            record.begins(deciding(loop))
            record.begins(contributing("w" + loop))
            record.keep(contributing("w" + loop), report(9), record.seconds)
            told = report(steps, f"[{steps}]", late)
            record.keep(deciding(loop), told, record.seconds)
            assert record.position == f"[{steps}]"
            clock.at_s += 2.0
        assert (record.row().state, record.row().steps) == ("running", 7)
        record.end("done", None)
        clock.at_s += 5.0
        row = record.row()
        assert (row.state, row.seconds, row.age_s) == ("done", 4.0, 9.0)
        told_all = [one async for one in record.all() if len(one.tensors[0])]
        assert [body_of(one).loop for one in told_all] == ["a-0", "a-1"]
        # Times are those since the run began, and counts those of all rows.
        assert [one.tensors[1][0] for one in told_all] == [1.0, 3.0]
        assert [body_of(one).dropped[WORKER] for one in told_all] == [2, 7]

    asyncio.run(run())


def test_who_watches_a_replica_hears_of_all_its_loops_and_how_the_run_ended() -> None:
    async def run() -> None:
        record = RunRecord(WORKER, pb.OpenRun(run="r", info="{}"), SetClock())
        lost = TaskLostError("gone", task=WORKER)
        order = pb.RunLoop(loop="w", task=WORKER, handle="h")
        record.begins(order)
        record.keep(order, report(2), 0.0)
        record.lost(order, lost)
        again = pb.RunLoop(loop="w~1", task=WORKER, handle="h~1.1")
        record.begins(again)
        record.end("failed", lost)
        states, ended = [], None
        try:
            async for one in record.of(0):
                body = body_of(one)
                states.append((body.loop, body.handle, body.state, len(one.tensors[0])))
        except TaskLostError as error:
            ended = error
        assert ended is lost
        assert states == [
            ("w", "h", "running", 0),
            ("w", "", "running", 2),
            ("w", "", "lost", 0),
            ("w~1", "h~1.1", "running", 0),
        ]

    asyncio.run(run())
