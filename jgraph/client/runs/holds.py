"""Holds of a client on the parameter servers and the master of its run."""

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import aclosing
from typing import final

from jgraph.client.connection import Connection
from jgraph.cluster import event_loop
from jgraph.cluster.deadlines import CONTROL_S, bounded_s
from jgraph.cluster.drain import holding
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame


@final
class DrainHolds:
    """Holds the ps and the master for a client; used by one thread.

    Args:
      cluster: theirs.
      owners: workers that hold variables, and are held as well.
      ps: how many ps are held, the first ones; None: all.
    """

    def __init__(
        self,
        cluster: Connection,
        owners: Sequence[TaskName] = (),
        ps: int | None = None,
    ) -> None:
        self._cluster = cluster
        self._owners = owners
        self._ps = ps
        self._calls: dict[TaskName, Future[None]] = {}
        self._ends: set[TaskName] = set()
        self.hold_needed()

    def hold(self, tasks: Iterable[TaskName]) -> None:
        """Holds these too; returns when they know, or do not answer."""
        answers: list[Future[None]] = []
        for task in tasks:
            if task not in self._calls or self._calls[task].done():
                answer = Future[None]()
                self._calls[task] = asyncio.run_coroutine_threadsafe(
                    self._hold(task, answer), event_loop.event_loop()
                )
                answers.append(answer)
        wait(answers, timeout=CONTROL_S)

    def hold_needed(self) -> None:
        """Holds what the run has now, and is not held."""
        self.hold(self.needed)

    def hold_ps(self, ps: int) -> None:
        """Holds so many ps from now on: the variables lie on these."""
        self._ps = ps
        self.hold_needed()
        self.let_go([task for task in self._calls if task not in self.needed])

    def let_go(self, tasks: Iterable[TaskName]) -> None:
        """Lets tasks end."""

        async def hang_up(calls: list[Future[None]]) -> None:
            for call in calls:
                call.cancel()

        releases = [task for task in tasks if task in self._calls]
        event_loop.run(hang_up([self._calls.pop(task) for task in releases]))
        self._ends.difference_update(releases)

    @property
    def leaving(self) -> frozenset[TaskName]:
        """Held tasks that have told of their end."""
        return frozenset(self._ends)

    def close(self) -> None:
        """Lets all go."""
        self.let_go(list(self._calls))

    @property
    def needed(self) -> list[TaskName]:
        """Who is to be held now."""
        ps = self._cluster.tasks("ps")[: self._ps]
        return [*ps, *self._owners, self._cluster.master]

    async def _hold(self, task: TaskName, answer: Future[None]) -> None:
        address = self._cluster.spec.address(task)
        call = lambda: self._cluster.transport.call(
            address, "DrainHold", frame(empty=pb.Empty()), timeout_s=bounded_s(0.0)
        )
        try:
            async with aclosing(holding(call)) as news:
                async for word in news:
                    if not answer.done():
                        answer.set_result(None)
                    if task not in self.needed:
                        return  # a master that was replaced may end
                    if word == "told":
                        self._ends.add(task)
        finally:
            if not answer.done():
                answer.set_result(None)
