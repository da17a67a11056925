"""A run whose master looks after its workers, as long as it is the master."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from jgraph.client.cluster import connect
from jgraph.coordination.run.supervisor import (
    Event,
    LoopEnded,
    LoopLost,
    RoundEnded,
    WorkerAnswered,
    WorkerReady,
)
from jgraph.errors import DataError, FencedError, JGError, TaskLostError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame
from jgraph.server.runs import run_loops
from jgraph.server.runs.copies import RunCopies
from jgraph.server.runs.journal import Journal
from jgraph.server.runs.peers import LoopPeers
from jgraph.server.runs.ps_setup import PsSetup
from jgraph.server.runs.rescaling.stand_ins import RunStandIns
from jgraph.server.runs.rescaling.survivors import RunSurvivors
from jgraph.server.runs.rollback import Rollback
from jgraph.server.runs.run_loops import LoopOrders
from jgraph.server.runs.supervisor import RunSupervisor
from jgraph.server.runs.worker_setup import WorkerSetup
from jgraph.train.strategies.async_runner import AsyncPS
from tests.support.counting import BATCH, IDS, after, trainer
from tests.support.loop_orders import SetClock, contributing, deciding
from tests.support.run_async import run_async
from tests.support.servers import Servers
from tests.support.stopping import once

pytestmark = pytest.mark.usefixtures("nothing_is_left")

PS, WORKERS = "/job:ps/task:0", ("/job:worker/task:0", "/job:worker/task:1")


@pytest.mark.row(20)
def test_master_that_was_replaced_takes_no_worker_back(
    servers: Servers,
) -> None:
    """A worker ends in order, and answers; another one has heard of the next master."""
    here, there = (servers.server(task).target for task in (WORKERS[0], PS))
    with connect(here) as cluster, connect(there) as other:

        def replace_master() -> None:
            (info,) = [run for run in other.runs() if run.state == "running"]
            for order in (
                pb.StopLoop(task=WORKERS[0], run=info.name, term=2),
                pb.StopLoop(task=WORKERS[1], loop=f"{info.name}-1"),
            ):
                other.call("Master.StopLoop", frame(stop_loop=order))

        counting = trainer(cluster, AsyncPS())
        run = counting.fit(
            IDS,
            steps=20_000,  # a second has some 2,000; nobody could stop more
            batch_size=BATCH,
            callbacks=[
                after(20, replace_master),
                once(lambda run: cluster.master != WORKERS[0]),
            ],
            progress=False,
            detached=True,
        )
        # The next master is lost, it seems: a standby is the one after it.
        assert run.state == "stopped"
        (info,) = other.runs()
        assert info.term > 2
        assert info.master != WORKERS[0]
        counting.close()


class Replaced:
    """A door to tasks that have heard of another master."""

    task = PS

    def __init__(self) -> None:
        self.asked: list[str] = []

    def tasks(self) -> list[str]:
        """Returns those of the cluster."""
        return [PS, *WORKERS]

    async def call(self, task: str, method: str, request: Frame, **_: Any) -> Frame:
        """Refuses what a master orders."""
        self.asked.append(method)
        raise FencedError("master 2 has taken over")


async def refuse_to_save() -> None:
    """What is not done any more."""
    raise AssertionError("another master saves the run")


def test_master_that_was_replaced_gives_no_ps_its_state_again() -> None:
    async def main() -> None:
        door, clock = Replaced(), SetClock()
        peers = cast("LoopPeers", door)
        order = pb.OpenRun(run="r", info='{"container": "c"}')
        workers = WorkerSetup(order, peers)
        ps, copies = PsSetup(order, peers, workers), RunCopies(order, peers, workers)
        record = Journal(TaskName(PS), order, clock)
        stand_ins = RunStandIns(
            *(order, peers, copies, LoopOrders(), record, None), note=lambda: None
        )
        survivors = RunSurvivors(order, peers, workers, copies, LoopOrders())
        rollback = Rollback(
            *(order, peers, workers, ps, copies, stand_ins, survivors, record),
            *(lambda: None, None, clock),
            save_for_client=refuse_to_save,
            is_stopped=lambda: False,
        )
        with pytest.raises(FencedError):
            await rollback.go_back(TaskLostError("gone"), {}, [], "back.1.1")
        assert set(door.asked) == {"StopLoop"}  # which asks who the master is

    run_async(main())


class Ajar:
    """A door to tasks that take long to open a gate, and answer nothing else.

    Attributes:
      refusal: ends the opening of a gate, once it is set; None: the gate opens.
      begun: the loops that were begun.
      asked: methods of calls, in order.
      refused: of a loop that is told something; None: nobody refuses.
      told: what loops were told.
      news: of the cluster.
    """

    task = WORKERS[0]

    def __init__(self) -> None:
        self.news: list[tuple[str, str]] = []
        self.opening = asyncio.Event()
        self.refusal: asyncio.Future[JGError | None] = asyncio.Future()
        self.begun: list[str] = []
        self.asked: list[str] = []
        self.refused: JGError | None = None
        self.told: asyncio.Queue[pb.StopLoop] = asyncio.Queue()

    def tasks(self) -> list[str]:
        """Returns those of the cluster."""
        return [PS, *WORKERS]

    async def call(self, task: str, method: str, request: Frame, **_: Any) -> Frame:
        """Answers when a loop is told something."""
        self.asked.append(method)
        if method == "OpenGate":
            self.opening.set()
            if (refusal := await self.refusal) is not None:
                raise refusal
            return frame(empty=pb.Empty())
        told = body_of(request)
        if method != "StopLoop" or not told.loop:
            raise TaskLostError("no answer")
        self.told.put_nowait(told)
        if self.refused is not None:
            raise self.refused
        return frame(empty=pb.Empty())

    def note(self, kind: str, text: str) -> None:
        """Notes an event."""
        self.news.append((kind, text))

    def loop(self, order: pb.RunLoop) -> AsyncIterator[Frame]:
        """Begins none that is to say more."""
        self.begun.append(order.loop)
        raise TaskLostError("no answer")


def beginning(door: Ajar, *events: Event) -> RunSupervisor:
    """Returns a run that begins its next row, after a worker was lost."""
    crew = RunSupervisor(
        pb.OpenRun(run="r", info="{}"), cast("LoopPeers", door), SetClock()
    )
    first, second = contributing("w-0"), contributing("w-1")
    second.replica, last = 1, deciding("d-2")
    last.sync.shards.append(PS)
    ended = LoopEnded(0, "stopped"), RoundEnded("paused")
    lost = LoopLost(1, TaskLostError("gone"))
    for order in (first, second, last):
        crew.loops.take(order)
    crew.resume([lost, *ended, *events])
    return crew


@pytest.mark.parametrize("asked", ["pause", "stop"])
def test_row_whose_gates_open_is_told_what_comes_and_not_the_row_before(
    asked: str,
) -> None:
    """Two workers come back within milliseconds; or the user stops the run."""

    async def main() -> None:
        door = Ajar()
        back: list[Event] = [WorkerAnswered(1), WorkerReady(1)]
        crew = beginning(door, *(back if asked == "pause" else []))
        if asked == "stop":
            crew.stop()
        told = await door.told.get()
        assert told.loop.startswith("d-2~")
        assert told.pause == (asked == "pause")
        await door.opening.wait()
        crew.close()

    run_async(main(), timeout_s=20)


@pytest.mark.row(35)
@pytest.mark.parametrize("lost", [PS, WORKERS[1]])
def test_row_that_never_begins_as_a_gate_does_not_open_is_told_nothing(
    lost: str,
) -> None:
    """If it is a ps that was lost the run goes back, were there a checkpoint."""

    async def main() -> None:
        door = Ajar()
        crew = beginning(door)
        await door.opening.wait()
        door.refusal.set_result(TaskLostError("gone", task=TaskName(lost)))
        await crew.record.news
        assert crew.record.row().state == "failed"
        assert crew.record.error is not None
        # A lost task has ended the run: it has failed, and not just ended.
        assert door.news == [("failed", f"run 'r' failed: {crew.record.error}")]
        goes_back = "did not go on by itself" in crew.record.error.message
        assert goes_back == (lost == PS)
        await asyncio.sleep(0)  # who tells a loop does so at once
        await asyncio.sleep(0)
        assert door.told.empty()
        crew.close()

    run_async(main(), timeout_s=20)


def test_row_of_a_run_that_failed_while_its_gates_opened_does_not_begin() -> None:
    async def main() -> None:
        door = Ajar()
        crew = beginning(door)
        await door.opening.wait()
        crew.fail(DataError("no more batches"))
        door.refusal.set_result(None)
        for _ in range(20):
            await asyncio.sleep(0)
        assert door.begun == []
        crew.close()

    run_async(main(), timeout_s=20)


def test_programs_of_a_run_that_is_over_stay_whoever_is_lost_then() -> None:
    """They are those of the client's next run."""

    async def main() -> None:
        door = Ajar()
        crew = beginning(door)
        await door.opening.wait()
        lost = TaskLostError("gone", task=TaskName(WORKERS[0]))
        await crew._leave_out(contributing("w-0"), lost)
        assert "UnregisterProgram" in door.asked
        crew.fail(DataError("no more batches"))
        door.asked.clear()
        await crew._leave_out(contributing("w-0"), lost)
        assert "UnregisterProgram" not in door.asked
        crew.close()

    run_async(main(), timeout_s=20)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_loop_that_says_that_its_master_was_replaced_is_told_once(
    is_replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_loops, "_AGAIN_S", 0.0)

    async def main() -> None:
        door = Ajar()
        lost = TaskLostError("no answer")
        door.refused = FencedError("replaced") if is_replaced else lost
        crew = beginning(door)
        crew.stop()
        for _ in range(20):
            await asyncio.sleep(0)
        assert (door.told.qsize() == 1) == is_replaced
        crew.close()

    run_async(main(), timeout_s=20)
