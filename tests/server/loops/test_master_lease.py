"""Whether the arbiter hears from its master: in real time, with a lease of moments."""

import asyncio

import pytest

from jgraph.clock import SystemClock
from jgraph.coordination.liveness.master_lease import LeaseTracker
from jgraph.coordination.sync.aggregation import MasterHeard, MasterSilent
from jgraph.errors import ClusterUnreachableError
from jgraph.server.loops.master_lease import MasterLease

pytestmark = pytest.mark.usefixtures("nothing_is_left")

SILENT = ClusterUnreachableError("no answer", address="127.0.0.1:1")


@pytest.mark.row(22)
def test_the_silence_of_a_master_is_told_once_and_so_is_its_return() -> None:
    async def run() -> None:
        told: asyncio.Queue[MasterSilent | MasterHeard | Exception] = asyncio.Queue()
        answers = [False] * 3 + [True] * 5
        asked = asyncio.Event()

        async def ask() -> None:
            if not answers:
                asked.set()
            elif not answers.pop(0):
                await asyncio.wait_for(told_silent.wait(), 10)
                raise SILENT

        told_silent = asyncio.Event()

        def tell(event: MasterSilent | MasterHeard) -> None:
            told.put_nowait(event)
            told_silent.set()

        clock = SystemClock()
        supervision = LeaseTracker(clock.now(), lease_s=0.04)
        lease = MasterLease(
            lambda: lease.ask(ask, lambda answer: None),
            *(supervision, clock, told.put_nowait, tell),
        )
        lease.begin()
        await asyncio.wait_for(asked.wait(), 10)
        lease.close()
        assert [told.get_nowait() for _ in range(2)] == [MasterSilent(), MasterHeard()]

    asyncio.run(run())


def test_master_that_stays_silent_is_given_up_with_the_last_error() -> None:
    async def run() -> None:
        gave_up: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

        async def ask() -> None:
            raise SILENT

        clock = SystemClock()
        supervision = LeaseTracker(clock.now(), lease_s=0.04, end_s=0.2)
        lease = MasterLease(
            lambda: lease.ask(ask, lambda answer: None),
            *(supervision, clock, gave_up.set_result),
        )
        lease.begin()
        assert await asyncio.wait_for(gave_up, 10) is SILENT
        lease.close()

    asyncio.run(run())
