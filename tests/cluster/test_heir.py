"""A run whose client and master are both gone goes on with the master's heir."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import numpy as np
import pytest

from jgraph.clock import SystemClock
from jgraph.cluster.client import Cluster, connect
from jgraph.cluster.heir import Heir, HeirDoor
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame
from jgraph.train.async_ps import AsyncPS
from jgraph.train.progress import Report
from jgraph.train.run import Run
from jgraph.train.strategies import Strategy
from jgraph.train.sync_ps import SyncPS
from tests.cluster.conftest import Servers
from tests.faults.counting import BATCH, IDS, Ledger, after, trainer
from tests.rpc.run_async import run_async
from tests.train.ledger import examples_counted, examples_due

MASTER, PS = "/job:worker/task:1", "/job:ps/task:0"


@pytest.fixture
def own_servers() -> Iterator[Servers]:
    servers = Servers(ps=2, worker=2)
    yield servers
    servers.stop()


@pytest.fixture
def client(own_servers: Servers) -> Iterator[Cluster]:
    with connect(own_servers.server(MASTER).target, timeout_s=20) as cluster:
        yield cluster


@pytest.mark.parametrize("strategy", [AsyncPS(), SyncPS()], ids=["async", "sync"])
def test_client_of_a_detached_run_follows_it_to_the_heir_of_its_master(
    own_servers: Servers, client: Cluster, strategy: Strategy
) -> None:
    there = trainer(client, strategy)
    run = there.fit(
        IDS,
        steps=300,
        batch_size=BATCH,
        callbacks=[after(100, lambda: own_servers.lose(MASTER))],
        progress=False,
        detached=True,
    )
    assert run.state == "done"
    (info,) = client.runs()
    assert (info.master, info.epoch, info.state) == (PS, 2, "done")
    assert client.master == PS
    # What the lost worker had told of, but not as done, comes again; what it had done
    # and not told of is counted by the ps alone.
    assert run.steps >= info.step >= 300
    if isinstance(strategy, SyncPS):
        assert run.steps == 300
        position = there.current_position()
        np.testing.assert_array_equal(examples_counted(run), examples_due(position))
    else:
        ledger = Ledger()
        ledger.add(run)
        ledger.check(there, lost=1)


def test_client_that_attached_follows_the_run_to_the_heir(
    own_servers: Servers, client: Cluster
) -> None:
    """It is connected to the master that is lost, as the client that began the run."""
    there = trainer(client, AsyncPS())
    begun, found, lost = threading.Event(), threading.Event(), list[int]()

    def lose_and_stop(run: Run, report: Report) -> None:
        begun.set()
        if found.is_set() and not lost:
            lost.append(report.step)
            own_servers.lose(MASTER)
        if lost and report.step > lost[0] + 200:
            run.stop()

    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=[lose_and_stop],
        progress=False,
        detached=True,
        block=False,
    )
    assert begun.wait(20)
    with connect(own_servers.server(MASTER).target, timeout_s=20) as other:
        watching = trainer(other, AsyncPS())
        watched = watching.attach()
        found.set()
        watched.wait(40)
        run.wait(40)
        assert other.master == PS
        (info,) = client.runs()
        for one in (run, watched):
            assert one.state == "stopped"
            assert one.steps >= info.step  # the ps counts what nobody was told of
        assert watched.steps == run.steps
        seen = [one.metrics("seen")["value"].sum(0) for one in (run, watched)]
        np.testing.assert_array_equal(*seen)
        assert watching.current_position() == there.current_position()


@pytest.mark.parametrize("by", ["who began it", "who attached"])
def test_stop_that_a_lost_master_did_not_hear_is_told_to_its_heir(
    own_servers: Servers, client: Cluster, by: str
) -> None:
    begun = threading.Event()
    run = trainer(client, AsyncPS()).fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=[lambda run, report: begun.set()],
        progress=False,
        detached=True,
        block=False,
    )
    assert begun.wait(20)
    with connect(own_servers.server(PS).target, timeout_s=20) as other:
        stopping = run if by == "who began it" else trainer(other, AsyncPS()).attach()
        own_servers.lose(MASTER)
        stopping.stop()
        assert stopping.wait(40).state == "stopped"
        assert run.wait(40).state == "stopped"


class LeavingMaster:
    """A door to a cluster whose master is told to end: of one loop, and no data."""

    task, dealers = TaskName(PS), None

    def __init__(self) -> None:
        self.is_held = False
        self.held_at: list[bool] = []
        self.let_go = asyncio.Event()

    def tasks(self) -> list[str]:
        """Returns those of the cluster."""
        return [PS, MASTER]

    async def call(self, task: str, method: str, request: Frame, **_: Any) -> Frame:
        """Answers what an heir asks."""
        told = body_of(request)
        if method != "StopLoop":
            return frame(task_status=pb.TaskStatus(task=task, state="ready"))
        if not told.loop:  # who is the master from here on
            return frame(empty=pb.Empty())
        await asyncio.sleep(0)  # what was let go would end here
        self.held_at.append(self.is_held)
        report = pb.LoopReport(loop=told.loop, state="done")
        return frame(loop_report=report, tensors=[np.arange(0), np.ones(0)])

    async def stream(
        self, task: str, method: str, request: Frame
    ) -> AsyncIterator[Frame]:
        """Tells the journal, and of the end; is held until nobody listens."""
        if method == "RunJournal":
            yield frame(run_loop=pb.RunLoop(loop="w", task=MASTER, run="r", epoch=1))
            await asyncio.Event().wait()
        self.is_held = True
        try:
            for _ in range(2):
                yield frame(empty=pb.Empty())
                await asyncio.sleep(0)
            await asyncio.Event().wait()
        finally:
            self.is_held = False
            self.let_go.set()


def test_heir_holds_a_master_that_is_told_to_end_until_that_has_told_all() -> None:
    async def main() -> None:
        door, saved = LeavingMaster(), list[str]()
        order = pb.OpenRun(run="r", info="{}", master=MASTER)
        heir = Heir(
            *(order, cast("HeirDoor", door), SystemClock()),
            begins=lambda order, crew: None,
            saves=lambda order, crew: saved.append(order.run),
        )
        await heir.work()
        assert (door.held_at, saved) == ([True], ["r"])
        await door.let_go.wait()

    run_async(main(), timeout_s=20)
