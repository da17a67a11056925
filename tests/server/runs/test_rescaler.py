"""The number of ps of a run, as its master changes it."""

import asyncio
from collections.abc import Coroutine, Mapping
from types import SimpleNamespace
from typing import Any, cast

from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.server.runs.journal import Journal
from jgraph.server.runs.losses import RunLosses
from jgraph.server.runs.peers import LoopPeers
from jgraph.server.runs.rescaling.migration import Migration, RunMigrations
from jgraph.server.runs.rescaling.rescaler import RunRescaler
from tests.support.loop_orders import SetClock
from tests.support.run_async import run_async

WORKER = TaskName("/job:worker/task:0")


class Door:
    """A door to a cluster to which ps join."""

    task = WORKER

    def __init__(self) -> None:
        self.count = 1

    def ps(self) -> Mapping[int, bool]:
        """Returns the ps."""
        return dict.fromkeys(range(self.count), True)

    def note(self, *event: str, level: int) -> None:
        """Notes nothing."""


class Slow:
    """Migrations that take long to forget one that is given up.

    Attributes:
      drops: how many are being given up.
      moved: how many ps the variables moved to.
    """

    arrangements = SimpleNamespace(least=1, most=4)

    def __init__(self) -> None:
        self.drops: asyncio.Queue[int] = asyncio.Queue()
        self.moved: asyncio.Queue[int] = asyncio.Queue()
        self.may_go_on = asyncio.Event()

    def adopt(self) -> int:
        """Returns how many ps the run has."""
        return 1

    def begin(self, ps: int, now: float) -> Migration:
        """Returns one of which nothing is done."""
        return Migration(ps, f"ps{ps}", [], now)

    async def prepare(self, attempt: Migration, number: int) -> None:
        """Gives programs."""
        await self.may_go_on.wait()

    async def drop(self, attempt: Migration) -> None:
        """Gives one up."""
        if attempt.preparing is not None:
            attempt.preparing.cancel()
        self.drops.put_nowait(attempt.ps)
        await self.may_go_on.wait()

    async def move(self, attempt: Migration) -> None:
        """Moves all variables."""
        self.moved.put_nowait(attempt.ps)
        await asyncio.Event().wait()


def test_ps_that_join_while_a_move_is_given_up_are_those_that_the_run_has() -> None:
    """They join one by one; to forget what was begun for the first takes longer."""

    async def main() -> None:
        door, slow, working = Door(), Slow(), set[asyncio.Task[None]]()

        def do(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            working.add(task := asyncio.ensure_future(work))
            return task

        def rest() -> None:
            rescaler.rest()

        order = pb.OpenRun(run="r", info="{}")
        order.ps.now = 1
        peers = cast("LoopPeers", door)
        record = Journal(WORKER, order, SetClock())
        rescaler = RunRescaler(
            *(order, peers, cast("RunMigrations", slow), record),
            *(RunLosses(order, peers), None, SetClock()),
            fence=rest,
            go_on=lambda left_out: None,
            switched=lambda leavers: None,
            do=do,
        )
        rescaler.begin()
        for door.count in 2, 3:
            await asyncio.sleep(0)
            rescaler.look()
        assert await slow.drops.get() == 2
        door.count = 4
        rescaler.look()
        await asyncio.sleep(0)
        slow.may_go_on.set()
        assert await slow.moved.get() == 4
        rescaler.close()
        for task in working:
            task.cancel()

    run_async(main(), timeout_s=20)
