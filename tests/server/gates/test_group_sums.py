"""A group of children, at the gate of one task: who may have one, and who says what."""

import asyncio
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from jgraph.clock import SystemClock
from jgraph.cluster.events import EventLog
from jgraph.errors import (
    ConfigError,
    InsecureError,
    MalformedMessageError,
    TaskMemoryError,
    UnknownDeviceError,
)
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.transport import Frame
from jgraph.runtime.gate import Gate
from jgraph.server.gates.gates import Gates
from jgraph.server.gates.group_host import GroupHost
from jgraph.server.gates.group_sums import GroupSums
from jgraph.server.gates.sync_gate import SyncGateShell
from jgraph.server.task_context import TaskContext
from jgraph.testing.in_process_transport import InProcessNetwork
from tests.support.collective_children import children_of
from tests.support.waiting import wait_until

ONE, TWO = (TaskName(f"/job:worker/task:{n}") for n in range(2))
HERE = {ONE: "127.0.0.1:1", TWO: "127.0.0.1:2"}


def order(opening: str = "") -> pb.OpenGate:
    parts = [
        pb.GroupPart(task=task, variables=[f"mean/{name}"], elements=[size])
        for task, name, size in ((ONE, "a", 3), (TWO, "b", 2))
    ]
    return pb.OpenGate(
        gate="g",
        synchronous=True,
        shards=[ONE, TWO],
        opening=opening,
        group=pb.CollectiveGroup(parts=parts, limit_s=60),
    )


class Told:
    """Keeps what a task posts; nothing leaves it."""

    def __init__(self) -> None:
        self.news: list[tuple[TaskName, str]] = []

    def post(self, dst: TaskName, frame: Frame) -> None:
        kind = frame.header.gate_event.group.WhichOneof("kind")
        self.news.append((dst, kind))


def gates(
    task: TaskName,
    addresses: dict[TaskName, str],
    opened: dict[str, Gate],
    **options: Any,
) -> tuple[Gates, Told]:
    told: Any = Told()
    transport = InProcessNetwork().transport(task)
    context = TaskContext(task, transport, SystemClock(), **options)
    context.addresses.update(addresses)
    host = GroupHost(context, EventLog(task))
    return Gates(task, told, opened, groups=host), told


def sums_of(opened: dict[str, Gate]) -> GroupSums:
    gate = opened["g"]
    assert isinstance(gate, SyncGateShell)
    assert gate.sums is not None
    return gate.sums


@pytest.mark.bad_input_row(28)
@pytest.mark.parametrize(
    ("where", "certificate_ends_s"), [("10.0.0.7:2", 0.0), ("elsewhere:2", 4e9)]
)
def test_no_child_listens_beyond_this_machine_unasked(
    where: str, certificate_ends_s: float
) -> None:
    """The gate of before stays. Certificates protect nothing of what a child says."""
    opened: dict[str, Gate] = {}
    addresses, ends_s = {**HERE, TWO: where}, certificate_ends_s
    there, told = gates(ONE, addresses, opened, certificate_ends_s=ends_s)
    there.open(pb.OpenGate(gate="g", synchronous=True, shards=[ONE]))
    before = opened["g"]
    with pytest.raises(InsecureError, match=r"without encryption .*--insecure-i-acc"):
        there.open(order())
    assert opened["g"] is before
    assert not told.news


def test_children_listen_beyond_this_machine_for_who_accepts_that() -> None:
    opened: dict[str, Gate] = {}
    addresses = {**HERE, TWO: "10.0.0.7:2"}
    there, told = gates(TWO, addresses, opened, insecure_i_accept=True)
    there.open(order())
    assert told.news == [(ONE, "opened")]
    there.drop_all()


@pytest.mark.bad_input_row(28)
def test_a_system_that_lends_no_memory_has_no_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    opened: dict[str, Gate] = {}
    there, told = gates(ONE, HERE, opened)
    with pytest.raises(ConfigError, match=r"needs Linux; write dense='workers'"):
        there.open(order())
    assert not opened
    assert not told.news


@pytest.mark.bad_input_row(28)
def test_who_cannot_be_dialled_can_be_in_no_group() -> None:
    there, _ = gates(ONE, {ONE: HERE[ONE]}, {})
    with pytest.raises(UnknownDeviceError, match=f"knows where {TWO} listens"):
        there.open(order())


def test_a_ps_has_no_part_in_a_group_of_workers() -> None:
    opened: dict[str, Gate] = {}
    ps = TaskName("/job:ps/task:0")
    there, told = gates(ps, HERE, opened)
    gate = order()
    gate.shards.append(ps)
    there.open(gate)
    assert isinstance(opened["g"], SyncGateShell)
    assert opened["g"].sums is None
    assert not told.news


def in_a_loop(act: Callable[[], None]) -> None:
    async def run() -> None:
        act()

    asyncio.run(run())


@pytest.mark.procs
def test_only_who_leads_begins_children_and_a_gate_that_ends_ends_its_own() -> None:
    def act() -> None:
        opened: dict[str, Gate] = {}
        there, told = gates(TWO, HERE, opened)
        there.open(order("new"))
        begin = pb.GroupNews(begun=pb.EpochBegun(epoch=1, port=1))
        for src, opening in ((ONE, "old"), (TaskName("/job:ps/task:0"), "new")):
            there.received(src, pb.GateEvent(gate="g", opening=opening, group=begin))
        assert not sums_of(opened).child
        there.received(ONE, pb.GateEvent(gate="g", opening="new", group=begin))
        child = sums_of(opened).child
        assert [one.pid for one in children_of(os.getpid())] == [child]
        there.drop_all()
        wait_until(lambda: not children_of(os.getpid()))
        assert told.news == [(ONE, "opened")]

    in_a_loop(act)


def test_a_part_of_another_size_is_refused_and_a_whole_set_is_averaged() -> None:
    def act() -> None:
        opened: dict[str, Gate] = {}
        there, _ = gates(TWO, HERE, opened)
        there.open(order())
        sums = sums_of(opened)
        news = pb.GroupNews(part=0)
        for wrong in (np.zeros(3, np.float32), np.zeros(16, np.float64)):
            with pytest.raises(MalformedMessageError, match=r"float32\[16\]"):
                sums.received(ONE, news, [wrong])
        a, b = np.ones(3, np.float32), np.array([[4], [6]], np.float32)
        kept = sums.memory.keep(
            0, {("g", "mean/a"): a, ("g", "mean/b"): b, ("g", "x"): a}
        )
        assert list(kept) == [("g", "x")]
        sums.received(ONE, news, [np.full(16, 2, np.float32)])
        sums.received(ONE, pb.GroupNews(gave_up=pb.Empty()), [])
        sums.all_contributed(0)
        joint = sums.memory.joined([{("g", "x"): a}, {("g", "x"): 3 * a}])
        assert joint["g", "mean/b"].tolist() == [[3], [4]]
        assert joint["g", "x"].tolist() == [2, 2, 2]
        there.drop_all()

    in_a_loop(act)


@contextmanager
def no_more_files() -> Iterator[None]:
    """This process can open none: no memory to lend, no port and no child."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_has_no_memory_to_lend_opens_no_gate() -> None:
    opened: dict[str, Gate] = {}
    there, told = gates(ONE, HERE, opened)
    with no_more_files(), pytest.raises(TaskMemoryError, match=r"192 B to lend"):
        there.open(order())
    assert not opened
    assert not told.news


async def turns_of_the_loop() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def test_a_member_whose_child_cannot_begin_tells_who_leads() -> None:
    async def run() -> None:
        there, told = gates(TWO, HERE, {})
        there.open(order())
        begin = pb.GroupNews(begun=pb.EpochBegun(epoch=1, port=1))
        with no_more_files():
            there.received(ONE, pb.GateEvent(gate="g", group=begin))
            await turns_of_the_loop()
        assert told.news == [(ONE, "opened"), (ONE, "failed")]
        there.drop_all()

    asyncio.run(run())


def test_a_leader_that_finds_no_free_port_gives_up_at_once() -> None:
    """Not when the time of three starts is over."""

    async def run() -> None:
        there, told = gates(ONE, HERE, {})
        there.open(order())
        with no_more_files():
            opened = pb.GroupNews(opened=pb.Empty())
            there.received(TWO, pb.GateEvent(gate="g", group=opened))
            await turns_of_the_loop()
        assert told.news == [(TWO, "asked"), (TWO, "gave_up")]
        there.drop_all()

    asyncio.run(run())
