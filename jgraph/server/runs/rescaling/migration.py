"""Migration of a run's variables to another number of ps: programs, copies, bytes."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import final

from jgraph.cluster.loop_messages import first_handle
from jgraph.errors import ClusterUnreachableError, JGError, TaskLostError
from jgraph.failpoints import failpoint
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.server.runs.copies import NextCopies, RunCopies
from jgraph.server.runs.peers import LoopPeers, check_master, ready_tasks
from jgraph.server.runs.ps_setup import ps_task
from jgraph.server.runs.rescaling.arrangements import RunArrangements, Transfer
from jgraph.server.runs.rescaling.mover import Mover
from jgraph.server.runs.run_loops import LoopOrders
from jgraph.server.runs.worker_setup import WorkerSetup


@final
@dataclass(slots=True)
class Migration:
    """Variables of a run on their way to another number of ps.

    Attributes:
      ps: how many there are to be.
      name: of this time.
      transfers: what goes where.
      began_s: when it was asked.
      handles: of the programs of the next loops, by the first ones.
      preparing: gives programs.
      rested_s: since when no loop runs.
      has_dropped: programs of the loops of before are dropped.
      left_out: workers that could not be given their program.
      copies: that will be kept of the ps; None: none are.
    """

    ps: int
    name: str
    transfers: Sequence[Transfer]
    began_s: float
    handles: dict[str, str] = field(default_factory=dict)
    preparing: "asyncio.Task[None] | None" = None
    rested_s: float = 0.0
    has_dropped: bool = False
    left_out: set[str] = field(default_factory=set)
    copies: NextCopies | None = None

    @property
    def sent_bytes(self) -> int:
        """That were copied so far."""
        return sum(one.sent_bytes for one in self.transfers)


@final
class RunMigrations:
    """Moves the variables of one run, and what belongs to them, to other ps.

    Args:
      order: what the client said of the run; changes at a switch.
      peers: to the tasks.
      ready: gives programs.
      loops: what each loop of the run does; gets other programs at a switch.
      copies: what is kept of the ps.
      next_name: makes a name for something of the run.
      term: of this master.

    Attributes:
      arrangements: where variables lie on how many ps.
    """

    def __init__(
        self,
        order: pb.OpenRun,
        peers: LoopPeers,
        ready: WorkerSetup,
        loops: LoopOrders,
        copies: RunCopies,
        *,
        next_name: Callable[[str], str],
        term: Callable[[], int],
    ) -> None:
        self._order = order
        self._peers = peers
        self._ready = ready
        self._loops = loops
        self._copies = copies
        self._next_name = next_name
        self._term = term
        self.arrangements = RunArrangements(order)
        self._mover = Mover(order, peers)

    def adopt(self) -> int:
        """Takes note of how many ps the run has, as the order says; returns that."""
        self._ready.ps = self._order.ps.now
        return self._ready.ps

    async def tidy(self, number: int) -> None:
        """Makes the ps what the order says, after the master of before was lost.

        Args:
          number: of the last switch.
        """
        await self._mover.tidy(self.arrangements.most)
        await self._mover.forget(self.arrangements.elsewhere())
        await self._copies.tidy(self.arrangements.most, number + 1)
        await self._renew()

    # ------------------------------------------------------------ before the switch

    def begin(self, ps: int, now: float) -> Migration:
        """Returns one to so many ps, of which nothing is done yet."""
        transfers = self.arrangements.transfers(ps)
        return Migration(ps, self._next_name(f"ps{ps}"), transfers, now)

    async def prepare(self, attempt: Migration, number: int) -> None:
        """Gives all tasks the programs for other ps, while training goes on.

        Args:
          attempt: of which.
          number: of the last switch.

        Raises:
          JGError: a task does not take what it is given.
        """
        await check_master(self._peers, self._order.run, self._term())
        ready = await ready_tasks(self._peers)
        lacks = [t for t in map(ps_task, range(attempt.ps)) if t not in ready]
        if lacks:
            what = f"{', '.join(lacks)} takes no new work"
            raise TaskLostError(what, task=lacks[0])
        await self._mover.begin(attempt.transfers)
        await self._give_programs(attempt)
        attempt.copies = self._copies.next(attempt.ps, number + 1)
        if attempt.copies is not None:
            await self._copies.ready(attempt.copies)
        failpoint("rescale.prepared")
        await self._mover.copy_ahead(attempt.transfers)
        failpoint("rescale.ahead")

    async def _give_programs(self, attempt: Migration) -> None:
        """Gives the programs of loops that have none for these ps yet."""
        loops = list(self._loops.newest)
        for loop in loops:
            await self._give(attempt, loop.handle, loop.task)
        if loops and attempt.left_out.issuperset(loop.task for loop in loops):
            # So no program was given to any ps, which may not be able to take one.
            what = f"{loops[0].task} is lost, and so are all that train"
            raise TaskLostError(what, task=loops[0].task)
        if self._order.saves.snapshot:
            await self._give(attempt, self._order.saves.snapshot, "")

    async def _give(self, attempt: Migration, handle: str, task: str) -> None:
        first = first_handle(handle)
        if first in attempt.handles:
            return
        try:
            new = await self._ready.give(
                handle,
                attempt.name,
                attempt.ps,
                all_sizes=not attempt.rested_s,  # else the loops would wait for that
            )
        except (ClusterUnreachableError, TaskLostError) as error:
            if error.details.get("task") != task or not task:
                raise
            attempt.left_out.add(task)  # the others go on
        else:
            attempt.handles[first] = new
            attempt.left_out.discard(task)

    async def move(self, attempt: Migration) -> None:
        """Copies the rest, as no loop runs, and opens gates where variables are to be.

        Raises:
          JGError: a task is lost, or takes no more.
        """
        await check_master(self._peers, self._order.run, self._term())
        failpoint("rescale.rested")
        attempt.has_dropped = True
        drops = (
            self._ready.drop(loop.handle, settle=True) for loop in self._loops.newest
        )
        await asyncio.gather(*drops)
        await self._give_programs(attempt)
        await self._mover.copy(attempt.transfers)
        await self._open_gates(attempt.ps)
        await self._begin_copies(attempt)
        failpoint("rescale.moved")

    async def _begin_copies(self, attempt: Migration) -> None:
        """Keeps copies of what each ps is to have, beside those of what it had."""
        if (to := attempt.copies) is None:
            return
        leave = defaultdict[str, list[str]](list)
        for one in attempt.transfers:
            leave[one.src] += one.names
        await self._copies.begin(to, leave)
        for loop in self._loops.newest:
            handle = attempt.handles.get(first_handle(loop.handle))
            if handle is not None:
                await self._copies.admit(handle, int(loop.HasField("sync")), to)

    async def _open_gates(self, ps: int | None = None) -> None:
        """Opens the gates of asynchronous training on the ps of an arrangement."""
        gate = pb.OpenGate()
        gate.CopyFrom(self._order.gate)
        if not gate.shards:
            return  # the next round of synchronous training opens its own
        now = self._order.ps.now if ps is None else ps
        gate.shards[:] = self.arrangements.of(now).shards
        gate.opening = self._next_name(f"{self._order.run}-gate")
        for shard in gate.shards:
            request = frame(open_gate=gate)
            await self._peers.call(TaskName(shard), "OpenGate", request)

    async def drop(self, attempt: Migration) -> None:
        """Gives up a migration: what was made for it is forgotten."""
        if attempt.preparing is not None:
            attempt.preparing.cancel()
        for handle in attempt.handles.values():
            await self._ready.drop(handle)
        if attempt.copies is not None:
            await self._copies.drop(attempt.copies.streams)
        copies = attempt.has_dropped
        await self._mover.drop(attempt.transfers, copies=copies)
        if copies:
            await self._renew()

    async def _renew(self) -> None:
        """Gives gates and programs for the ps of now again: they may be dropped."""
        with suppress(JGError):  # of a ps that is lost, which its loops will tell
            await self._open_gates()
        suffix = self._next_name("ps")
        for loop in self._loops.newest:
            with suppress(JGError):
                loop.handle = await self._ready.renew(loop.handle, suffix)
                await self._record_again(loop)

    async def _record_again(self, loop: pb.RunLoop) -> None:
        try:
            await self._copies.admit(loop.handle, int(loop.HasField("sync")))
        except JGError:
            # What it would do is recorded nowhere: so it begins with a loss of state.
            await self._ready.drop(loop.handle)
            raise

    # ------------------------------------------------------------ the switch

    def about(self, attempt: Migration, switch: pb.RunRescaled) -> None:
        """Says in a switch what the run has from then on; copies of now are dropped."""
        switch.handles.update(attempt.handles)
        switch.copies.extend([] if attempt.copies is None else attempt.copies.streams)
        attempt.copies = None if attempt.copies is None else self._kept_so_far()

    def _kept_so_far(self) -> NextCopies:
        """Returns the streams of now, which are dropped when others are kept."""
        copies = pb.RunCopies()
        copies.CopyFrom(self._order.copies)
        return NextCopies(self._order.ps.now, list(copies.streams))

    def apply(self, switch: pb.RunRescaled) -> None:
        """Makes the order, and those of the loops, what they are after a switch."""
        ps, handles = switch.ps, dict(switch.handles)
        if switch.copies:
            self._copies.switch(switch.copies, switch.step)
        arrangement = self.arrangements.of(ps)
        self._order.ps.now = self._ready.ps = ps
        if self._order.gate.shards:
            self._order.gate.shards[:] = arrangement.shards
        if arrangement.HasField("saves"):
            self._order.saves.CopyFrom(arrangement.saves)
        if self._order.saves.snapshot:
            first = first_handle(self._order.saves.snapshot)
            self._order.saves.snapshot = handles.get(first, first)
        if self._loops.arbiter is not None:
            self._loops.arbiter.sync.shards[:] = arrangement.shards
        for loop in self._loops.newest:
            loop.handle = handles.get(first_handle(loop.handle), loop.handle)

    async def retire(self, attempt: Migration, leavers: Sequence[TaskName]) -> None:
        """Lets the ps of before forget what has moved, after a switch."""
        if attempt.copies is not None:
            await self._copies.drop(attempt.copies.streams)
        await self._mover.drop(attempt.transfers, copies=False)
        await self._mover.forget((one.src, one.names) for one in attempt.transfers)
        await self._mover.forget_all(leavers)
