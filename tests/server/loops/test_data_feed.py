"""Batches of a loop: read ahead of its steps, two at most, in the order dealt."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from jgraph.clock import SystemClock
from jgraph.coordination.data.dispatch import Dispatch
from jgraph.coordination.data.slots import Lease, Part, Rows, Shuffle, SlotPlan
from jgraph.graph.ir import TaskName
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
