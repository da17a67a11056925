"""Workers of a run that are prepared while it goes on, and what is left of that."""

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from jgraph.coordination.run.supervisor import Event, WorkerNotReady
from jgraph.errors import TaskLostError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.server.runs.copies import RunCopies
from jgraph.server.runs.journal import Journal
from jgraph.server.runs.losses import RunLosses
from jgraph.server.runs.peers import LoopPeers
from jgraph.server.runs.run_client import Restarters
from jgraph.server.runs.run_loops import LoopOrders
from jgraph.server.runs.worker_setup import WorkerSetup
from jgraph.server.runs.workers import RunJoiners, RunWorkers
from tests.support.loop_orders import WORKER, SetClock, contributing
from tests.support.run_async import run_async


class Nobody:
    """A door to a cluster without tasks, but for the master."""

    task = WORKER

    def __init__(self) -> None:
        self.news: list[str] = []

    def tasks(self) -> list[TaskName]:
        """Returns none."""
        return []

    def workers(self) -> dict[TaskName, str]:
        """Returns none that stays."""
        return {}

    def note(self, kind: str, text: str) -> None:
        """Notes an event."""
        self.news.append(text)


class Setup:
    """Gives a worker its program; meanwhile the run ends, or the worker is lost."""

    ps = 0

    def __init__(self, record: Journal, lost: TaskLostError | None = None) -> None:
        self.record, self.lost = record, lost
        self.programs: set[str] = set()

    async def prepare(self, loop: pb.RunLoop, number: int) -> str:
        """Returns the handle of its program."""
        self.programs.add(handle := self.next_handle(loop, number))
        if self.lost is not None:
            raise self.lost
        self.record.end("stopped", None)
        return handle

    def next_handle(self, loop: pb.RunLoop, number: int) -> str:
        """Returns the handle that ``prepare`` gives."""
        return f"{loop.handle}~{number}"

    async def drop(self, handle: str) -> None:
        """Lets all tasks forget a program."""
        self.programs.discard(handle)


LOST = TaskLostError("it went away again")


@pytest.mark.parametrize(
    ("joins", "lost", "event"),
    [
        (False, None, None),
        (True, None, None),
        (False, LOST, WorkerNotReady(0)),
        (True, LOST, WorkerNotReady(0)),
    ],
    ids=["is over", "joins one that is over", "is lost", "joins and is lost"],
)
def test_a_worker_that_does_not_take_part_after_all_keeps_no_program_of_the_run(
    joins: bool, lost: TaskLostError | None, event: Event | None
) -> None:
    async def main() -> None:
        order, door, clock = pb.OpenRun(run="r", info="{}"), Nobody(), SetClock()
        peers, record = cast("LoopPeers", door), Journal(WORKER, order, clock)
        setup, loops = Setup(record, lost), LoopOrders()
        loops.take(contributing("w"))
        ready = cast("WorkerSetup", setup)
        working, events = list[asyncio.Task[None]](), list[Event]()

        def do(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            working.append(asyncio.ensure_future(work))
            return working[-1]

        workers = RunWorkers(
            RunJoiners(order, peers, ready, record, clock),
            *(loops, RunCopies(order, peers, ready), RunLosses(order, peers)),
            *(Restarters(None), events.append, do),
        )
        workers.prepare(0, joins=joins)
        while any(not one.done() for one in working):
            await asyncio.gather(*working)
        assert not setup.programs
        assert (events, door.news) == ([] if event is None else [event], [])

    run_async(main(), timeout_s=20)
