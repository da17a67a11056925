"""Holds of a run's master on its parameter servers, which thus do not end unheard.

A ps that is told to end waits until those who hold it let it go. The master does when
the state of the run is kept elsewhere: saved, or in a copy or a log.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import final

from jgraph.cluster.drain import holding
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.server.runs.journal import Journal
from jgraph.server.runs.peers import Peers
from jgraph.server.runs.ps_setup import PsSetup


@final
@dataclass(slots=True)
class PsHolds:
    """Holds the ps of one run.

    Args:
      peers: to the tasks; a run does not outlive its own.
      ps: says which they are.
      record: how the run stands.
      tell: called when a ps is told to end.
    """

    peers: Peers
    ps: PsSetup
    record: Journal
    tell: Callable[[], None]
    _held: dict[TaskName, asyncio.Task[None]] = field(init=False, default_factory=dict)
    _leaving: set[TaskName] = field(init=False, default_factory=set)

    def hold(self) -> None:
        """Holds all ps from now on."""
        if self.record.is_over:
            return  # nobody would let them go
        for task in self.ps.tasks:
            if task not in self._held and task != self.peers.task:
                self._held[task] = asyncio.ensure_future(self._hold(task))

    def hold_again(self, tasks: Collection[TaskName]) -> None:
        """Holds the new processes of tasks that were lost, or were let go."""
        self.let_go(tasks)
        self._leaving.difference_update(tasks)
        self.hold()

    @property
    def leaving(self) -> list[TaskName]:
        """The ps that are held, and were told to end."""
        return sorted(self._leaving)

    def close(self) -> None:
        """Lets all go."""
        self.let_go(list(self._held))

    def let_go(self, tasks: Iterable[TaskName]) -> None:
        """Holds these no more."""
        for task in tasks:
            if task in self._held:
                self._held.pop(task).cancel()

    async def _hold(self, task: TaskName) -> None:
        """Holds a task; tells when it is told to end."""
        nothing = frame(empty=pb.Empty())
        call = lambda: self.peers.stream(task, "DrainHold", nothing)
        async for said in holding(call):
            if said == "told":
                self._leaving.add(task)
                self.tell()
