"""Batches of a loop: read ahead of its steps, two at most, in the order dealt."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from jgraph.clock import SystemClock
from jgraph.cluster.loop_messages import deal_of
from jgraph.coordination.data.dispatch import Dispatch
from jgraph.coordination.data.slots import Lease, Part, Rows, Shuffle, SlotPlan
from jgraph.errors import MalformedMessageError, SourceError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.runtime.cost import Cost
from jgraph.runtime.data.batches import ArrayReader, Field
from jgraph.server.loops.data_feed import (
    BatchReader,
    DataFeed,
    NumberedBatch,
    deal_alone,
)
from jgraph.server.steps.task_host import TaskHost
from jgraph.server.task_context import TaskContext
from jgraph.testing.in_process_transport import InProcessNetwork
from tests.support.run_async import run_async

BATCHES = 20


class WatchedReader:
    """Arrays, each read of which is told before it is made."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._arrays, self._tell = ArrayReader({"x": np.arange(BATCHES)}), tell
        self.parts: tuple[Part, ...] = self._arrays.parts
        self.fields: Mapping[str, Field] = self._arrays.fields
        self.shuffle: Shuffle = "examples"

    def read(self, part: int, rows: Rows) -> dict[str, Any]:
        self._tell()
        return self._arrays.read(part, rows)


def test_next_batches_are_read_while_a_step_computes_and_never_more_than_two() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        begun = asyncio.Semaphore(0)
        reads: list[int] = []  # batches taken before each
        taken: list[NumberedBatch] = []

        def tell() -> None:
            reads.append(len(taken))
            loop.call_soon_threadsafe(begun.release)

        reader = WatchedReader(tell)
        plan = SlotPlan(reader.parts, 1, seed=0)
        dispatch = Dispatch(plan, budget=BATCHES, workers=1)
        task = TaskName("/job:worker/task:0")
        transport, clock = InProcessNetwork().transport(task), SystemClock()
        shell = TaskHost(TaskContext(task, transport, clock))
        batches = BatchReader(plan, reader, shell)
        feed = DataFeed(batches, deal_alone(dispatch), clock)

        async def take() -> bool:
            over = loop.create_future()

            def then(batch: NumberedBatch | BaseException | None) -> None:
                if isinstance(batch, NumberedBatch):
                    taken.append(batch)
                over.set_result(batch is None)

            feed.take(then)
            ended: bool = await over
            return ended

        await take()
        for _ in range(3):  # the second and the third while the first is computed
            await begun.acquire()
        feed.acknowledge(0)
        while not await take():
            feed.acknowledge(len(taken) - 1)
        assert [batch.number for batch in taken] == list(range(BATCHES))
        order = plan.rows(0, 0).tolist() + plan.rows(0, 1).tolist()
        assert [int(batch.fields["x"][0]) for batch in taken] == order
        ahead = [read - before for read, before in enumerate(reads)]
        assert max(ahead) <= 2
        feed.close()
        shell.close()

    run_async(main())


class Files:
    """One file that is read a lease at a time."""

    def __init__(self) -> None:
        self._arrays = ArrayReader({"x": np.arange(BATCHES)})
        self.parts: tuple[Part, ...] = self._arrays.parts
        self.fields: Mapping[str, Field] = self._arrays.fields
        self.shuffle: Shuffle = "slots"

    def read(self, part: int, rows: Rows) -> dict[str, Any]:
        return self._arrays.read(part, rows)


class Costs:
    """A shell that runs all at once, and remembers whose cost it was."""

    def __init__(self) -> None:
        self.seen: list[Cost] = []

    def submit(
        self, work: Callable[[], Any], then: Callable[..., None], cost: Cost
    ) -> None:
        self.seen.append(cost)
        then(work())


def test_a_batch_that_is_cut_out_of_what_was_read_costs_not_what_reading_does() -> None:
    reader, costs = Files(), Costs()
    plan = SlotPlan(reader.parts, 2, seed=0, shuffle="slots", slot_batches=5)
    batches = BatchReader(plan, reader, cast(TaskHost, costs))
    for slot in range(2):
        for index in range(5):
            batches.read(Lease(0, slot, 0, 5), index, lambda read: None)
    read, cut = costs.seen[0], costs.seen[1]
    assert read is not cut
    assert costs.seen == [read, *[cut] * 4] * 2


SLOT = 5
"""Batches of a lease of the files below: four leases in all."""


class WatchedFiles:
    """Files, each lease of which is told before it is read."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._files, self._tell = Files(), tell
        self.parts: tuple[Part, ...] = self._files.parts
        self.fields: Mapping[str, Field] = self._files.fields
        self.shuffle: Shuffle = "slots"

    def read(self, part: int, rows: Rows) -> dict[str, Any]:
        self._tell()
        return self._files.read(part, rows)


class Taker:
    """Takes the batches of a feed, one after the other."""

    def __init__(self, tell: Callable[[], None]) -> None:
        reader = WatchedFiles(tell)
        plan = SlotPlan(reader.parts, 1, seed=0, shuffle="slots", slot_batches=SLOT)
        leases = [Lease(0, slot, 0, SLOT) for slot in range(len(plan))]
        self.deals = [deal_of(tuple(leases))]
        self.order = [row for slot in range(len(plan)) for row in plan.rows(0, slot)]

        async def ask(done: int, batches: int, idle: bool, received: int) -> Any:
            return self.deals.pop() if self.deals else deal_of(None)

        task = TaskName("/job:worker/task:0")
        transport, clock = InProcessNetwork().transport(task), SystemClock()
        self.shell = TaskHost(TaskContext(task, transport, clock))
        self.feed = DataFeed(BatchReader(plan, reader, self.shell), ask, clock)
        self.asked = 0  # for how many batches
        self.taken: list[int] = []

    async def take(self) -> BaseException | None:
        """Takes a batch whose step is over at once; returns why there is none."""
        over: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.asked += 1
        self.feed.take(over.set_result)
        batch = await over
        if not isinstance(batch, NumberedBatch):
            assert batch is None or isinstance(batch, BaseException)
            return batch
        self.taken.append(int(batch.fields["x"][0]))
        self.feed.acknowledge(len(self.taken) - 1)
        return None

    def close(self) -> None:
        self.feed.close()
        self.shell.close()


def test_a_deal_of_more_than_there_is_ends_the_loop() -> None:
    async def main() -> None:
        taker = Taker(lambda: None)
        column = pb.DataColumn(first=0, apart=2, batches=1 << 30)
        taker.deals.append(pb.DataDeal(column=column))
        error = await taker.take()
        assert isinstance(error, MalformedMessageError)
        taker.close()

    asyncio.run(main())


def test_a_lease_is_read_while_the_batches_of_the_one_before_are_taken() -> None:
    async def main() -> None:
        loop, begun = asyncio.get_running_loop(), asyncio.Semaphore(0)
        reads: list[int] = []  # batches asked for before each

        def tell() -> None:
            reads.append(taker.asked)
            loop.call_soon_threadsafe(begun.release)

        taker = Taker(tell)
        while len(taker.taken) < BATCHES:
            assert await taker.take() is None
            if len(taker.taken) % SLOT == 3:  # before the last two, which are ready
                read = min(len(taker.taken) // SLOT + 2, BATCHES // SLOT)
                async with asyncio.timeout(20):
                    while len(reads) < read:
                        await begun.acquire()
        taker.close()
        assert taker.taken == taker.order
        assert len(reads) == BATCHES // SLOT, "each lease once"
        # The third was read when the first was used up, but for what was ready.
        for number, before in enumerate(reads):
            assert before >= SLOT * (number - 1) - 2, "two leases in memory at most"

    run_async(main())


def test_a_lease_that_cannot_be_read_ends_the_feed_behind_the_batches_before() -> None:
    async def main() -> None:
        reads: list[int] = []

        def tell() -> None:
            reads.append(len(taker.taken))
            if len(reads) > 2:
                raise SourceError("the third lease is damaged")

        taker = Taker(tell)
        error = None
        while error is None and len(taker.taken) < BATCHES:
            error = await taker.take()
        taker.close()
        assert isinstance(error, SourceError)
        assert taker.taken == taker.order[: 2 * SLOT]

    run_async(main())
