"""Gates of synchronous training whose arbiter, or whose ps, is lost."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

from jgraph.clock import SystemClock
from jgraph.cluster.loop_messages import plain
from jgraph.coordination.data.slots import Part, SlotPlan
from jgraph.coordination.data.sync_data import SyncData
from jgraph.coordination.sync.aggregation import Contributed
from jgraph.errors import JGError, RunOverError, TaskLostError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.status import to_status
from jgraph.rpc.transport import Frame
from jgraph.runtime.gate import Gate
from jgraph.server.gates.gates import Decides, Gates
from jgraph.server.gates.step_columns import slots_of
from jgraph.server.gates.sync_gate import SyncGateShell
from jgraph.server.loops.arbiter_loop import ArbiterLoop
from jgraph.server.steps.driver import StepDriver
from jgraph.server.steps.messages import StepMessages
from jgraph.testing.in_process_transport import InProcessNetwork
from tests.support.tasks import Tasks

FIRST, OTHER = TaskName("/job:ps/task:0"), TaskName("/job:ps/task:1")
TASKS = [FIRST, OTHER]
OPEN = pb.OpenGate(gate="g", synchronous=True, shards=TASKS)


class Host:
    """A task with gates, and nothing else."""

    def __init__(
        self, network: InProcessNetwork, task: TaskName, opened: dict[str, Gate]
    ) -> None:
        self.task = task
        self.transport = network.transport(task)
        self.gates = Gates(task, self.transport, opened)

    def frame_received(self, src: TaskName, frame: Frame) -> None:
        self.gates.received(src, body_of(frame))

    def peer_lost(self, peer: TaskName, error: JGError) -> None:
        self.gates.peer_lost(peer)

    def handle_call(self, method: str, request: Frame) -> AsyncIterator[Frame]:
        raise AssertionError(f"gates only post, and {method} is a call")


def test_who_waits_at_a_gate_is_told_when_who_decides_is_lost() -> None:
    async def run() -> None:
        opened, refused = dict[str, Gate](), list[JGError]()
        host = Host(InProcessNetwork(), OTHER, opened)
        await host.transport.start(host)
        host.gates.open(OPEN)
        host.gates.peer_lost(FIRST)
        opened["g"].ask(("w0", 1), lambda: None, refused.append)
        assert isinstance(refused[0], TaskLostError)
        assert refused[0].details["task"] == FIRST
        await host.transport.close()

    asyncio.run(run())


def test_a_gate_takes_nothing_that_was_said_to_the_one_before() -> None:
    opened, refused = dict[str, Gate](), list[JGError]()
    gates = Gates(OTHER, InProcessNetwork().transport(OTHER), opened)
    closed = pb.GateEvent(gate="g", opening="1", closed=to_status(RunOverError("over")))
    order = pb.OpenGate(gate="g", synchronous=True, shards=TASKS)
    for opening in ("1", "2"):
        order.opening = opening
        gates.open(order)
        gates.received(FIRST, closed)  # the second time it was overtaken
        opened["g"].ask(("w0", 1), lambda: None, refused.append)
        assert len(refused) == 1


def test_who_decides_hears_from_a_ps_that_it_was_lost_to_it() -> None:
    async def run() -> None:
        network, heard = InProcessNetwork(), asyncio.Queue[TaskName]()
        hosts = [Host(network, task, {}) for task in TASKS]
        peers = {h.task: await h.transport.start(h) for h in hosts}
        for host in hosts:
            host.transport.set_peers(peers)
            host.gates.open(OPEN)
        decides = Decides(lambda _: None, heard.put_nowait)
        hosts[0].gates.listen("g", decides)
        for _ in range(2):  # said once: it may be gone, and then is lost again
            hosts[1].gates.peer_lost(FIRST)
        async with asyncio.timeout(10):
            assert await heard.get() == OTHER
        for host in hosts:
            await host.transport.close()
        assert heard.empty()

    asyncio.run(run())


def test_a_gate_that_may_not_have_heard_of_its_end_is_told_again() -> None:
    """Else the steps that wait there would do so until their time is up."""
    posted: list[tuple[TaskName, str]] = []
    later: list[Callable[[], None]] = []

    class Noting:
        def post(self, dst: TaskName, frame: Frame) -> None:
            posted.append((dst, str(body_of(frame).WhichOneof("kind"))))

    transport: Any = Noting()
    call_later: Any = lambda seconds, callback: later.append(callback)
    gates = Gates(FIRST, transport, {}, call_later)
    gates.open(OPEN)
    gates.peer_lost(OTHER)
    assert not later  # it goes on
    gates.close("g", RunOverError("over"))
    gates.peer_lost(TaskName("/job:worker/task:0"))
    assert not later
    for times in range(2, 30):
        gates.peer_lost(OTHER)
        later.pop()()
        assert posted == [(OTHER, "closed")] * min(times, 21)  # it may be gone for good
    gates.open(OPEN)
    gates.close("g", RunOverError("over"))
    gates.peer_lost(OTHER)
    gates.open(OPEN)
    posted.clear()
    later.pop()()
    assert not posted  # it is of the gate before


def test_a_ps_tells_who_decides_of_all_contributions_in_one_frame() -> None:
    """Of the second update on: so many are told together as the last one took."""
    posted: list[pb.GateEvent] = []

    class Noting:
        def post(self, dst: TaskName, frame: Frame) -> None:
            assert dst == FIRST
            posted.append(body_of(frame))

    opened: dict[str, Gate] = {}
    transport: Any = Noting()
    gates = Gates(OTHER, transport, opened)
    gates.open(OPEN)
    gate = opened["g"]
    assert isinstance(gate, SyncGateShell)

    async def update(number: int) -> list[int]:
        posted.clear()
        steps = [(f"w{worker}", number) for worker in range(50)]
        for slot, step in enumerate(steps):
            gate.ask(step, lambda: None, lambda _: None)
            gate.contribute(step, slot, {})
        gate.decided(tuple(steps))
        assert len(gate.chosen().contributions) == len(steps)
        gate.applied()
        return [len(slots_of(event.contributed.slots)) for event in posted]

    assert asyncio.run(update(0)) == [1] * 50
    assert asyncio.run(update(1)) == [50]
    assert asyncio.run(update(2)) == [50]


def test_of_many_replicas_a_gate_takes_at_once_what_comes_in_a_turn() -> None:
    """Who contributed hears of the end, and may read again, after the update."""
    posted: list[pb.GateEvent] = []
    later: list[Callable[[], None]] = []
    heard: list[str] = []

    class Noting:
        def post(self, dst: TaskName, frame: Frame) -> None:
            posted.append(body_of(frame))

    opened: dict[str, Gate] = {}
    transport: Any = Noting()
    call_later: Any = lambda seconds, callback: later.append(callback)
    gates = Gates(OTHER, transport, opened, call_later)
    order = pb.OpenGate()
    order.CopyFrom(OPEN)
    order.handles.extend(f"w{worker}" for worker in range(100))
    gates.open(order)
    gate = opened["g"]
    assert isinstance(gate, SyncGateShell)

    def say(word: str, step: tuple[str, int]) -> Callable[..., None]:
        return lambda *_: heard.append(f"{word} {step[0]} {step[1]}")

    def step_of(number: int, handle: str, following: bool = True) -> None:
        step, after = (handle, number), (handle, number + 1)
        gate.contribute(step, number, {})
        gate.ended(step, done=True)
        gates.when_settled(step, say("settled", step))
        if following:
            gate.ask(after, say("reads", after), say("refused", after))

    for handle in order.handles:
        gate.ask((handle, 0), say("reads", (handle, 0)), say("refused", (handle, 0)))
    assert heard == [f"reads {handle} 0" for handle in order.handles]
    heard.clear()
    first, last = order.handles[:99], order.handles[99]
    for handle in first:
        step_of(0, handle)
    assert not posted
    (turn,) = later
    turn()
    gate.decided([(handle, 0) for handle in first])
    (told,) = posted
    assert len(slots_of(told.contributed.slots)) == 99
    step_of(0, last)  # too late
    assert not heard
    gate.chosen()
    gate.applied()  # which was after that
    gate.ended((last, 1), done=False)
    assert heard[:99] == [f"settled {handle} 0" for handle in first]
    assert heard[99] == f"settled {last} 0"
    assert sorted(heard[100:]) == sorted(f"reads {h} 1" for h in order.handles)
    heard.clear()
    for handle in first:
        step_of(1, handle, following=False)
    gate.ask(("w0", 2), say("reads", ("w0", 2)), say("refused", ("w0", 2)))
    gate.ended(("w0", 2), done=False)  # given up before the turn is over
    gates.drop_all()
    assert heard == [f"settled {handle} 1" for handle in first]
    for callback in later:
        callback()
    assert len(heard) == 99


def test_steps_read_in_turn_as_what_those_before_them_read_has_left() -> None:
    async def run() -> None:
        network, opened = InProcessNetwork(), dict[str, Gate]()
        host, other = Host(network, FIRST, opened), Host(network, OTHER, {})
        peers = {h.task: await h.transport.start(h) for h in (host, other)}
        host.transport.set_peers(peers)
        order = pb.OpenGate(readers=1, handles=["w0", "w1", "w2"])
        order.MergeFrom(OPEN)
        host.gates.open(order)
        gate, reads = opened["g"], asyncio.Queue[str]()
        for handle in order.handles:
            let_in = partial(reads.put_nowait, handle)
            gate.ask((handle, 0), let_in, lambda error: None)
        assert (reads.get_nowait(), reads.empty()) == ("w0", True)
        host.transport.post(OTHER, frame(gate_event=pb.GateEvent(gate="none")))
        gate.sent(("w0", 0), OTHER)
        assert reads.empty()  # it has not left yet
        async with asyncio.timeout(10):
            assert await reads.get() == "w1"
        gate.sent(("w1", 0), OTHER)
        host.gates.drop(["g"])
        left = asyncio.Event()
        host.transport.when_sent(OTHER, left.set)
        async with asyncio.timeout(10):
            await left.wait()
        assert reads.empty()  # nobody reads at a gate that is no more
        for each in (host, other):
            await each.transport.close()

    asyncio.run(run())


def test_a_contribution_waits_a_moment_for_others_to_be_told_with() -> None:
    heard: asyncio.Queue[Contributed] = asyncio.Queue()
    opened: dict[str, Gate] = {}
    gates = Gates(FIRST, InProcessNetwork().transport(FIRST), opened)
    gates.open(OPEN)
    gates.listen("g", Decides(heard.put_nowait, lambda _: None))
    gate = opened["g"]
    assert isinstance(gate, SyncGateShell)

    async def run() -> None:
        for number, count in enumerate((2, 1)):
            for worker in range(count):
                step = f"w{worker}", number
                gate.ask(step, lambda: None, lambda _: None)
                gate.contribute(step, worker, {})
                if count == 1:
                    assert heard.empty()
            async with asyncio.timeout(10):
                chosen = [(await heard.get()).steps[0] for _ in range(count)]
            gate.decided(tuple(chosen))
            gate.chosen()
            gate.applied()

    asyncio.run(run())


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
        driver = StepDriver(runtime, StepMessages(transport))
        loop = ArbiterLoop(
            order, driver, Gates(FIRST, transport, {}), SystemClock(), asyncio.to_thread
        )
        loop.peer_lost(OTHER)
        with pytest.raises(TaskLostError, match=OTHER):
            async for _ in loop.reports():
                pass

    asyncio.run(run())
