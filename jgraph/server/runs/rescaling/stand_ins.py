"""Stand-ins of a run's lost owners on its master: parts go to others, and return."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, final

from jgraph.cluster.loop_messages import first_handle
from jgraph.coordination.run.stand_ins import stand_ins
from jgraph.errors import JGError
from jgraph.failpoints import failpoint
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.server.runs.copies import RunCopies
from jgraph.server.runs.journal import Journal
from jgraph.server.runs.peers import Peers, stand_ins_of
from jgraph.server.runs.rescaling.arrangements import Transfer
from jgraph.server.runs.rescaling.mover import Mover
from jgraph.server.runs.run_client import RunClient
from jgraph.server.runs.run_loops import LoopOrders

_TELL_S: Final = 10.0
"""So long loops wait for a client that is there, and does not answer."""


@final
@dataclass(slots=True)
class RunStandIns:
    """Lets tasks of one run have the parts of owners that are away.

    A part goes to who has its copy, and back to its owner when that is there again. No
    loop runs meanwhile.

    Args:
      order: what the client said of the run; says who stands in for whom.
      peers: to the tasks.
      copies: what is kept of the parts.
      loops: what each loop of the run does.
      record: of the run.
      client: told where the parts lie; None: there is none.
      note: keeps what is known of the run for the standbys.
    """

    order: pb.OpenRun
    peers: Peers
    copies: RunCopies
    loops: LoopOrders
    record: Journal
    client: RunClient | None
    note: Callable[[], None]

    @property
    def by(self) -> dict[TaskName, TaskName]:
        """Who has the part of each owner that is away."""
        return stand_ins_of(self.order)

    def heirs(
        self, lost: Collection[TaskName], there: Collection[TaskName]
    ) -> Mapping[TaskName, TaskName] | None:
        """Returns who is to have the part of each owner; None: these are waited for.

        Args:
          lost: who hold something, and do not answer.
          there: who answer, and are the processes that they were.
        """
        if not (self.order.owners and self.copies.is_kept):
            return None
        return stand_ins(lost, self.copies.backups, self.by, there)

    async def parts(self, lost: Iterable[TaskName]) -> list[pb.StandIn]:
        """Returns what lost owners hold, and who has the copy of it.

        Raises:
          JGError: that one does not answer.
        """
        return await asyncio.gather(*map(self.copies.part_of, lost))

    def take(
        self, by: Mapping[TaskName, TaskName], parts: Sequence[pb.StandIn]
    ) -> None:
        """Takes note that parts lie with their heirs now.

        Args:
          by: who has the part of each owner that is away.
          parts: of those that were lost now; what they had of others is among it.
        """
        whole, ins = {part.task: part for part in parts}, self.order.stand_ins
        if not ins.shards and self.loops.arbiter is not None:
            ins.shards[:] = self.loops.arbiter.sync.shards
        others = {name for part in ins.parts for name in part.variables}
        for part in ins.parts:
            part.by = by[TaskName(part.task)]
        for part in whole.values():
            own = [name for name in part.variables if name not in others]
            new = ins.parts.add()
            new.CopyFrom(part)
            new.variables[:] = own
        self._arrange()
        for saved in self.order.saves.tasks:
            saved.task = by.get(TaskName(saved.task), saved.task)
        ins.number += 1
        self.note()

    def away(self, tasks: Collection[str]) -> list[pb.StandIn]:
        """Returns the parts of those of these tasks that are on other ones."""
        parts = [part for part in self.order.stand_ins.parts if part.task in tasks]
        found = [pb.StandIn() for _ in parts]
        for one, part in zip(found, parts, strict=True):
            one.CopyFrom(part)
        return found

    async def copy_back(self, parts: Sequence[pb.StandIn]) -> None:
        """Gives owners copies of their parts; these stay where they are, too.

        Args:
          parts: of these owners.

        Raises:
          JGError: a part could not be copied.
        """
        transfers = [
            Transfer(TaskName(p.by), TaskName(p.task), list(p.variables), p.nbytes)
            for p in parts
            if p.variables
        ]
        await Mover(self.order, self.peers).copy_at_rest(transfers)
        failpoint("stand_in.copied")

    def returned(self, owners: Collection[str]) -> None:
        """Takes note that owners have their parts again."""
        ins = self.order.stand_ins
        back = self.away(owners)
        rest = [part for part in ins.parts if part.task not in owners]
        home = {name: part.task for part in back for name in part.variables}
        for saved in self.order.saves.tasks:
            names = {shard.name for shard in saved.shards}
            saved.task = next((home[n] for n in names if n in home), saved.task)
        others = pb.StandIns(parts=rest)
        del ins.parts[:]
        ins.parts.extend(others.parts)
        ins.number += 1
        self._arrange()

    async def forget(self, parts: Iterable[pb.StandIn]) -> None:
        """Lets tasks forget parts that are with their owners again."""
        there = [(TaskName(part.by), list(part.variables)) for part in parts]
        await Mover(self.order, self.peers).forget(there)

    def adopt(self) -> None:
        """Lets loops do what the order says, of the master before."""
        handles = self.order.stand_ins.handles
        for loop in self.loops.newest:
            loop.handle = handles.get(first_handle(loop.handle), loop.handle)
        if self.order.stand_ins.shards:
            self._arrange()

    def _arrange(self) -> None:
        """Makes the next loops talk to who holds the parts now."""
        arbiter, by = self.loops.arbiter, self.by
        if arbiter is None:
            return
        shards = (by.get(TaskName(s), s) for s in self.order.stand_ins.shards)
        arbiter.sync.shards[:] = dict.fromkeys(shards)
        arbiter.task = arbiter.sync.shards[0]
        if arbiter.sync.HasField("host_sums"):
            arbiter.sync.host_sums.by.clear()
            arbiter.sync.host_sums.by.update(by.items())
        for loop in self.loops.replicas.values():
            loop.dealer = arbiter.task

    async def tell(self, loops: Iterable[pb.RunLoop]) -> None:
        """Tells where the parts lie: the standbys, and the client if it answers soon.

        Args:
          loops: the next ones.
        """
        ins = self.order.stand_ins
        ins.handles.update({first_handle(loop.handle): loop.handle for loop in loops})
        self.note()
        self.record.moved(self._homes())
        failpoint("stand_in.noted")
        await self.tell_client()

    async def tell_client(self) -> None:
        """Tells the client where the parts lie, if it is there and answers soon."""
        if self.client is None or self.client.is_gone:
            return
        if not self.order.stand_ins.number:
            return
        with suppress(JGError, TimeoutError):  # else it reads so in the reports
            async with asyncio.timeout(_TELL_S):
                await self.client.ask("moved", homes=self._homes())

    def _homes(self) -> pb.RunHomes:
        homes = pb.RunHomes(number=self.order.stand_ins.number)
        homes.homes.update(self.by.items())
        return homes
