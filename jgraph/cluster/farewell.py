"""Graceful drain: a task that is told to stop waits until all its users let go.

Whoever needs what a task has holds a call of ``Farewell`` there. The task answers, and
again when it is told to end; it goes on as before until all have hung up. Who died has
hung up, too. Who only lost the link holds it again.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import aclosing, suppress
from typing import Final, final

from jgraph.cluster import loop
from jgraph.cluster.calls import CONTROL_S, bounded_s
from jgraph.cluster.connection import Connection
from jgraph.errors import JGError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.transport import Frame

SHARE: Final = 2 / 3
"""Of the grace; the rest is for what runs on the task."""
HOLD_RETRY_S: Final = 1.0
"""Until a task is held again: that its link is back shows only by asking it."""


@final
class Farewell:
    """Of one task: who would be told of its end."""

    def __init__(self) -> None:
        self._said = asyncio.Event()
        self._held = 0
        self._free = asyncio.Event()
        self._free.set()

    async def held(self, request: Frame) -> AsyncIterator[Frame]:
        """Answers at once, and when the task is told to end.

        Holds it until the caller hangs up.
        """
        self._held += 1
        self._free.clear()
        try:
            yield frame(empty=pb.Empty())
            await self._said.wait()
            yield frame(empty=pb.Empty())
            await asyncio.Event().wait()
        finally:
            self._held -= 1
            if not self._held:
                self._free.set()

    async def say(self, limit_s: float) -> None:
        """Tells all of the end, and waits until they have let go, or ``limit_s``."""
        self._said.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._free.wait(), limit_s)


async def holding(
    call: Callable[[], AsyncIterator[Frame]],
) -> AsyncGenerator[str, None]:
    """Holds a task until it is told to end, also after a link that was broken for long.

    Yields what became of it: "held", "lost" before it is held again, "told" at last.

    Args:
      call: makes the call of ``Farewell``.
    """
    while True:
        replies, said = call(), ""
        with suppress(JGError):  # it is lost, which others tell, or the link is
            async for _ in replies:
                said = "told" if said else "held"
                yield said
        if said == "told":
            return
        await asyncio.sleep(HOLD_RETRY_S)
        yield "lost"


@final
class DrainHolds:
    """Holds the ps and the master for a client; used by one thread.

    Args:
      cluster: theirs.
    """

    def __init__(self, cluster: Connection) -> None:
        self._cluster = cluster
        self._calls: dict[TaskName, Future[None]] = {}
        self._told: set[TaskName] = set()
        self._tell: Callable[[TaskName], None] = lambda task: None
        self.hold(self._needed())

    def hold(self, tasks: Iterable[TaskName]) -> None:
        """Holds these too; returns when they know, or do not answer."""
        begun: list[Future[None]] = []
        for task in tasks:
            if task not in self._calls or self._calls[task].done():
                held = Future[None]()
                self._calls[task] = asyncio.run_coroutine_threadsafe(
                    self._hold(task, held), loop.event_loop()
                )
                begun.append(held)
        wait(begun, timeout=CONTROL_S)

    def listen(self, tell: Callable[[TaskName], None]) -> None:
        """Calls ``tell`` for each task that ends, from the event loop's thread.

        At once for those that have told so already, and are held still.
        """

        async def begin() -> None:
            self._tell = tell
            for task in sorted(self._told):
                tell(task)

        loop.run(begin())

    def let_go(self, tasks: Iterable[TaskName]) -> None:
        """Lets tasks end."""

        async def hang_up(calls: list[Future[None]]) -> None:
            for call in calls:
                call.cancel()

        gone = [task for task in tasks if task in self._calls]
        loop.run(hang_up([self._calls.pop(task) for task in gone]))
        self._told.difference_update(gone)

    @property
    def told(self) -> frozenset[TaskName]:
        """Held tasks that have told of their end."""
        return frozenset(self._told)

    def close(self) -> None:
        """Lets all go."""
        self.let_go(list(self._calls))

    def _needed(self) -> list[TaskName]:
        return [*self._cluster.tasks("ps"), self._cluster.master]

    async def _hold(self, task: TaskName, held: Future[None]) -> None:
        address = self._cluster.spec.address(task)
        call = lambda: self._cluster.transport.call(
            address, "Farewell", frame(empty=pb.Empty()), timeout_s=bounded_s(0.0)
        )
        try:
            async with aclosing(holding(call)) as news:
                async for said in news:
                    if not held.done():
                        held.set_result(None)
                    if task not in self._needed():
                        return  # a master that was replaced may end
                    if said == "told":
                        self._told.add(task)
                        self._tell(task)
        finally:
            if not held.done():
                held.set_result(None)
