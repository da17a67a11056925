"""Gates of synchronous training whose arbiter, or whose ps, is lost."""

import asyncio
import json

import pytest

from jgraph.clock import SystemClock
from jgraph.cluster.driver import StepDriver
from jgraph.cluster.gates import Gates
from jgraph.cluster.loop_orders import plain
from jgraph.cluster.sync_loop import SyncLoop
from jgraph.coordination.slots import Part, SlotPlan
from jgraph.coordination.sync_data import SyncData
from jgraph.errors import JGError, TaskLostError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.inprocess import InProcessNetwork
from jgraph.runtime.gate import Gate
from tests.runtime.tasks import Tasks

FIRST, OTHER = TaskName("/job:ps/task:0"), TaskName("/job:ps/task:1")
OPEN = pb.OpenGate(gate="g", synchronous=True, shards=[FIRST, OTHER])


def test_who_waits_at_a_gate_is_told_when_who_decides_is_lost() -> None:
    opened, refused = dict[str, Gate](), list[JGError]()
    gates = Gates(OTHER, InProcessNetwork().transport(OTHER), opened)
    gates.open(OPEN)
    gates.peer_lost(FIRST)
    opened["g"].ask(("w0", 1), lambda: None, refused.append)
    assert isinstance(refused[0], TaskLostError)
    assert refused[0].details["task"] == FIRST


def test_who_decides_ends_when_a_ps_is_lost_that_has_contributions() -> None:
    async def run() -> None:
        transport = InProcessNetwork().transport(FIRST)
        plan = SlotPlan([Part("data", 8)], 1, seed=0)
        order = pb.RunLoop(steps=5, step_timeout_s=60, data_plan=plain(plan))
        order.sync.gate, order.sync.wanted = "g", 1
        order.sync.shards.extend([FIRST, OTHER])
        order.sync.handles.append("w0")
        order.sync.tasks.append("/job:worker/task:0")
        order.sync.data_position = json.dumps(SyncData(plan, ["w0"]).state())
        runtime = Tasks(FIRST).runtimes[FIRST]
        driver = StepDriver(runtime, transport, {})
        loop = SyncLoop(order, driver, Gates(FIRST, transport, {}), SystemClock())
        loop.peer_lost(OTHER)
        with pytest.raises(TaskLostError, match=OTHER):
            async for _ in loop.reports():
                pass

    asyncio.run(run())
