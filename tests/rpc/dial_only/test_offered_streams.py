"""Streams that a task offers which only dials: what becomes of one that is taken."""

import asyncio
from typing import Any

from jgraph.graph.device import TaskName
from jgraph.rpc.dial_only.address import dial_only_address
from jgraph.rpc.dial_only.offered_streams import OfferedStreams
from tests.support.run_async import run_async

ADDRESS = dial_only_address(TaskName("/job:worker/task:3"), 255)


class SlowContext:
    """A stream on which nothing comes, and nothing that is written leaves."""

    def __init__(self) -> None:
        self.is_written = asyncio.Event()
        self.is_over = asyncio.Event()

    async def read(self) -> Any:
        await self.is_over.wait()

    async def write(self, chunk: bytes) -> None:
        del chunk
        self.is_written.set()
        await asyncio.Event().wait()


def test_stream_whose_taker_gives_up_ends_so_that_the_task_offers_another() -> None:
    async def main() -> None:
        streams, context = OfferedStreams(), SlowContext()
        offered = asyncio.create_task(streams.offer(ADDRESS, context))

        async def take() -> None:
            async with streams.take(ADDRESS, "Asks", (), 10):
                raise AssertionError("it has what it took")

        taking = asyncio.create_task(take())
        await context.is_written.wait()
        taking.cancel()
        async with asyncio.timeout(10):
            await offered
        context.is_over.set()
        await asyncio.wait([taking])
        assert taking.cancelled()

    run_async(main())


def test_stream_of_a_connection_that_may_have_broken_is_taken_last() -> None:
    async def main() -> None:
        streams, older, newer = OfferedStreams(), SlowContext(), SlowContext()
        offered = [
            asyncio.create_task(streams.offer(ADDRESS, context))
            for context in (older, newer)
        ]

        async def take() -> None:
            async with streams.take(ADDRESS, "Asks", (), 10):
                raise AssertionError("it has what it took")

        await streams.wait(ADDRESS, 10)
        taking = asyncio.create_task(take())
        async with asyncio.timeout(10):
            await newer.is_written.wait()
        assert not older.is_written.is_set()
        for one in (taking, *offered):
            one.cancel()
        older.is_over.set()
        newer.is_over.set()
        await asyncio.wait([taking, *offered])

    run_async(main())
