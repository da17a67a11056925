"""What a task tells of itself since its start: calls, traffic, gates and saves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from jgraph.errors import JGError, UnknownMethodError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame
from jgraph.runtime.gate import Gate
from jgraph.server.call_counts import CallCounts
from jgraph.server.gates.gates import Gates
from jgraph.server.state_service import SaveCounts
from jgraph.testing.in_process_transport import InProcessNetwork
from tests.support.in_process import cluster_of

PS, WORKER = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:0")
EMPTY = frame(empty=pb.Empty())


class Hand:
    """A clock that somebody sets."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


async def statuses(client: Any, address: str) -> dict[str, pb.TaskStatus]:
    reply = await client.ask(address, "Master.Status", EMPTY, timeout_s=10)
    return {task.task: task for task in body_of(reply).tasks}


def test_calls_are_counted_by_method_with_their_errors() -> None:
    async def run() -> None:
        async with cluster_of([PS, WORKER]) as (client, services):
            at = services[PS].context.address
            bad = frame(run_step=pb.RunStep(handle="nobody"))
            with pytest.raises(JGError):
                await client.ask(at, "Master.RunStep", bad, timeout_s=10)
            with pytest.raises(JGError):
                await client.ask(at, "RunStep", bad, timeout_s=10)
            with pytest.raises(UnknownMethodError):
                await client.ask(at, "Nonsense", EMPTY, timeout_s=10)
            await statuses(client, at)
            told = await statuses(client, at)
            calls = {row.method: row for row in told[PS].calls}
            assert "Nonsense" not in calls
            assert calls["RunStep"].errors == 1
            assert sum(calls["RunStep"].buckets) == 1
            assert sum(calls["Master.Status"].buckets) == 1  # not the one under way
            assert calls["Master.Status"].errors == 0
            assert calls["Master.Status"].seconds > 0
            (asked,) = [r for r in told[WORKER].calls if r.method == "TaskStatus"]
            assert sum(asked.buckets) >= 1
            assert told[PS].up_s > 0

    asyncio.run(run())


def test_a_call_that_is_given_up_is_over_and_no_error() -> None:
    async def run() -> None:
        clock, ended = Hand(), []
        counts = CallCounts(clock)

        async def replies() -> AsyncIterator[Frame]:
            try:
                while True:
                    yield EMPTY
            finally:
                ended.append(True)

        stream: Any = counts.counted("RunLoop", replies())
        await anext(stream)
        clock.time += 0.3
        await stream.aclose()
        (row,) = counts.rows()
        assert ended
        assert (row.errors, round(row.seconds, 6), sum(row.buckets)) == (0, 0.3, 1)
        assert row.buckets[8] == 1  # at most half a second

    asyncio.run(run())


def test_traffic_is_told_for_each_peer() -> None:
    async def run() -> None:
        async with cluster_of([PS, WORKER]) as (client, services):
            abort = frame(abort_step=pb.AbortStep(handle="h", step_id=1))
            transport = services[WORKER].context.transport
            transport.post(PS, abort)
            at = services[PS].context.address
            async with asyncio.timeout(10):
                told: list[pb.PeerTraffic] = []
                while not told:
                    told = list((await statuses(client, at))[PS].traffic)
            (row,) = told
            assert (row.peer, row.frames_received) == (WORKER, 1)
            assert row.bytes_received > 0

    asyncio.run(run())


def test_a_bounded_gate_tells_who_waits_and_how_old_updates_were() -> None:
    async def run() -> None:
        clock, opened = Hand(), dict[str, Gate]()
        network = InProcessNetwork()
        gates = Gates(PS, network.transport(PS), opened, clock=clock)
        order = pb.OpenGate(gate="g", shards=[PS], max_staleness=0)
        gates.open(order)
        for handle in ("a", "b"):
            gates.step_started(
                TaskName(f"/job:worker/task:{'ab'.index(handle)}"), handle
            )
        gate, read = opened["g"], list[str]()
        for handle in ("a", "b"):
            gate.ask((handle, 1), lambda: read.append("in"), lambda _: None)
        assert read == ["in"]  # the bound lets one in at a time
        clock.time += 2.0
        (told,) = gates.statuses()
        assert (told.waiting, told.oldest_s, told.max_staleness) == (1, 2.0, 0)
        gate.ended(("a", 1), done=True)
        gate.ended(("b", 1), done=True)
        (told,) = gates.statuses()
        assert (told.waiting, told.waits, told.wait_s) == (0, 2, 2.0)
        assert [(row.task, dict(row.updates)) for row in told.senders] == [
            ("/job:worker/task:0", {0: 1}),
            ("/job:worker/task:1", {0: 1}),
        ]

    asyncio.run(run())


def test_updates_of_any_age_fit_in_a_status() -> None:
    opened = dict[str, Gate]()
    gates = Gates(PS, InProcessNetwork().transport(PS), opened)
    gates.open(pb.OpenGate(gate="g", shards=[PS]))
    gate = opened["g"]
    gate.ask(("slow", 1), lambda: None, lambda _: None)
    for step in range(500):
        gate.ask(("fast", step), lambda: None, lambda _: None)
        gate.ended(("fast", step), done=True)
    gate.ended(("slow", 1), done=True)
    (told,) = gates.statuses()
    assert not told.HasField("max_staleness")
    assert {row.task: dict(row.updates) for row in told.senders} == {
        "fast": {0: 500},
        "slow": {64: 1},
    }


def test_saves_of_shards_are_counted_with_what_failed() -> None:
    async def run() -> None:
        clock = Hand()
        counts = SaveCounts(clock)
        assert counts.status().saves == 0
        assert counts.status().age_s == 0
        kind = pb.TensorType(dtype="float32", shape=[10])
        shard = pb.ShardFile(name="w", type=kind, rows=10, block_rows=10, step=1)
        request = frame(shard_files=pb.ShardFiles(shards=[shard]))

        async def replies(error: JGError | None) -> AsyncIterator[Frame]:
            clock.time += 1.5
            if error is not None:
                raise error
            yield EMPTY

        async for _ in counts.counted(request, replies(None)):
            pass
        clock.time += 7.0
        with suppress(JGError):
            async for _ in counts.counted(request, replies(JGError("no room"))):
                pass
        told = counts.status()
        assert (told.saves, told.failures, told.nbytes) == (1, 1, 40)
        assert (told.seconds, told.age_s) == (1.5, 8.5)

    asyncio.run(run())
