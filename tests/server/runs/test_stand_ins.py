"""Stand-ins on the master: where parts are said to lie, and what loops are told."""

import json
from typing import Any, cast

from jgraph.clock import SystemClock
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame
from jgraph.server.runs.copies import RunCopies
from jgraph.server.runs.journal import Journal
from jgraph.server.runs.peers import LoopPeers, holds_state
from jgraph.server.runs.rescaling.stand_ins import RunStandIns
from jgraph.server.runs.run_loops import LoopOrders
from jgraph.server.runs.worker_setup import WorkerSetup
from tests.support.run_async import run_async

A, B, C = TASKS = [TaskName(f"/job:worker/task:{n}") for n in range(3)]


class Copies:
    """A door to tasks that have a copy each: of one variable of another."""

    task = A

    async def call(self, task: str, method: str, request: Frame, **_: Any) -> Frame:
        """Answers what a copy has; one of a worker's own is none of its part."""
        (stream,) = body_of(request).containers
        names = [f"params/{stream}", "residual/1/params/w"]
        rows = [pb.VariableInfo(name=name) for name in names]
        return frame(variable_table=pb.VariableTable(variables=rows))


def made() -> RunStandIns:
    """Three owners, of which each has the copy of the one before; the first decides."""
    order = pb.OpenRun(run="r", info=json.dumps({"container": "c"}), owners=TASKS)
    order.copies.updates = 1
    order.saves.tasks.add(task=B).shards.add(name="params/b")
    for task, backup, stream in zip(TASKS, (B, C, A), "abc", strict=True):
        order.copies.streams.add(task=task, backup=backup, stream=stream, undoes=True)
    peers, loops = cast("LoopPeers", Copies()), LoopOrders()
    loops.take(pb.RunLoop(task=A, handle="update", sync=pb.SyncOrder(shards=TASKS)))
    for number, task in enumerate(TASKS):
        loops.take(pb.RunLoop(task=task, handle=task, replica=number, dealer=A))
    copies = RunCopies(order, peers, WorkerSetup(order, peers))
    record = Journal(A, order, SystemClock())
    return RunStandIns(order, peers, copies, loops, record, None, lambda: None)


async def lose(there: RunStandIns, lost: TaskName) -> None:
    by = there.heirs([lost], [task for task in TASKS if task != lost])
    assert by is not None
    there.take(by, await there.parts([lost]))


def test_who_decides_and_who_holds_follow_from_who_stands_in() -> None:
    async def main() -> None:
        there = made()
        await lose(there, A)
        (part,) = there.away(TASKS)
        assert (part.task, part.by, list(part.variables)) == (A, B, ["params/a"])
        assert [holds_state(there.order, task) for task in TASKS] == [False, True, True]
        arbiter = there.loops.arbiter
        assert arbiter is not None
        assert (arbiter.task, list(arbiter.sync.shards)) == (B, [B, C])
        assert {loop.dealer for loop in there.loops.replicas.values()} == {B}
        there.returned([A])
        assert not there.away(TASKS)
        assert (arbiter.task, list(arbiter.sync.shards)) == (A, TASKS)
        assert {loop.dealer for loop in there.loops.replicas.values()} == {A}

    run_async(main())


def test_a_part_goes_on_from_a_stand_in_that_is_lost_and_is_saved_where_it_is() -> None:
    async def main() -> None:
        there = made()
        await lose(there, B)
        assert there.order.saves.tasks[0].task == C
        for stream in there.order.copies.streams:  # as they begin anew
            stream.backup = {A: C, C: A}.get(TaskName(stream.task), "")
        await lose(there, C)
        assert there.by == {B: A, C: A}
        names = {part.task: list(part.variables) for part in there.away(TASKS)}
        assert names == {B: ["params/b"], C: ["params/c"]}
        assert there.order.saves.tasks[0].task == A
        there.returned([B])
        assert there.by == {C: A}
        assert there.order.saves.tasks[0].task == B

    run_async(main())


def test_the_next_master_gives_loops_what_the_one_before_gave_them() -> None:
    async def main() -> None:
        there = made()
        await lose(there, A)
        await there.tell(
            [pb.RunLoop(handle="update~back.1"), pb.RunLoop(handle=f"{B}~back.1")]
        )
        heir = made()
        heir.order.CopyFrom(there.order)
        heir.adopt()
        handles = [loop.handle for loop in heir.loops.newest]
        assert handles == ["update~back.1", A, f"{B}~back.1", C]
        arbiter = heir.loops.arbiter
        assert arbiter is not None
        assert arbiter.task == B

    run_async(main())
