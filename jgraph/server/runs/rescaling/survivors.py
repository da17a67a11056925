"""Survivors on a run's master: workers give what a lost owner held."""

import asyncio
import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import final

import numpy as np

from jgraph.coordination.run.survivors import NotGiven, gift, made, unread
from jgraph.errors import ClusterUnreachableError, JGError
from jgraph.graph.device import is_worker
from jgraph.graph.ir import TaskName
from jgraph.plan.program.program import StoredVariable
from jgraph.plan.program.whole_reads import WholeRead, whole_reads, writings
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.server.runs.copies import RunCopies
from jgraph.server.runs.peers import Peers, holds_state
from jgraph.server.runs.ps_setup import container_of
from jgraph.server.runs.rescaling.arrangements import Transfer
from jgraph.server.runs.rescaling.mover import Mover
from jgraph.server.runs.run_loops import LoopOrders
from jgraph.server.runs.saving.checkpointer import STEP
from jgraph.server.runs.saving.state_source import StateSource
from jgraph.server.runs.worker_setup import WorkerSetup

_LOG = logging.getLogger("jgraph.recover")


@final
@dataclass(slots=True)
class _Round:
    """One round of updates, as it began: what is counted is counted from there."""

    loop: str
    version: int
    is_whole: bool
    writes: dict[TaskName, dict[str, int]]
    handle: str


@final
@dataclass(slots=True)
class RunSurvivors:
    """Lets workers keep what they read of owners, and give it where these are lost.

    Args:
      order: what the client said of the run.
      peers: to the tasks.
      workers: has the programs.
      copies: what is kept of the owners; if anything is, workers give nothing.
      loops: what each loop of the run does.
    """

    order: pb.OpenRun
    peers: Peers
    workers: WorkerSetup
    copies: RunCopies
    loops: LoopOrders
    _round: _Round | None = field(init=False, default=None)
    _keeping: dict[TaskName, tuple[str, str]] = field(init=False, default_factory=dict)

    @property
    def may_give(self) -> bool:
        """Whether there is anything that workers could give."""
        return self._is_used and self._round is not None

    @property
    def _is_used(self) -> bool:
        elastic = self.order.HasField("ps")
        return bool(self.order.owners) and not (self.copies.is_kept or elastic)

    async def begin(self, loop: pb.RunLoop) -> None:
        """Takes note of a loop that is about to begin: nothing of it has happened."""
        if not self._is_used:
            return
        with suppress(JGError):  # what is not noted is not given
            if loop.HasField("sync"):
                await self._begin_round(loop)
            elif loop.batch_feed:
                await self._begin_keeping(loop)

    async def _begin_round(self, loop: pb.RunLoop) -> None:
        self._round = None
        # Where an update can be without a worker it is not one reading of each.
        is_whole = loop.sync.wanted == len(self.loops.replicas)
        version, handle = loop.sync.version, loop.handle
        owners = [t for t in self.peers.tasks() if holds_state(self.order, t)]
        counts = await asyncio.gather(*map(self._writes, owners))
        writes = dict(zip(owners, counts, strict=True))
        self._round = _Round(loop.loop, version, is_whole, writes, handle)

    async def _begin_keeping(self, loop: pb.RunLoop) -> None:
        task = TaskName(loop.task)
        self._keeping.pop(task, None)
        program = self.workers.program(loop.handle)
        others = [part.task for part in program.partitions if part.task != task]
        reads = [read for owner in others for read in whole_reads(program, owner, task)]
        keys = sorted({read.key for read in reads})
        await self._keep(task, loop.handle, keys)
        self._keeping[task] = loop.loop, loop.handle

    async def _keep(self, task: TaskName, handle: str, keys: Sequence[str]) -> None:
        keep = pb.KeepReads(container=self._container, handle=handle, keys=keys)
        await self.peers.call(task, "KeepReads", frame(keep_reads=keep))

    @property
    def _container(self) -> str:
        return container_of(self.order)

    async def _writes(self, task: TaskName) -> dict[str, int]:
        query = pb.VariableQuery(containers=[self._container])
        reply = await self.peers.call(task, "Variables", frame(variable_query=query))
        return {row.name: row.version for row in body_of(reply).variables}

    async def close(self) -> None:
        """Lets workers keep nothing more."""
        calls = [self._keep(task, "", ()) for task in self._keeping]
        self._keeping.clear()
        await asyncio.gather(*calls, return_exceptions=True)

    # ------------------------------------------------------------ after a loss

    async def give(
        self, lost: Collection[TaskName], step: int, source: StateSource
    ) -> int | None:
        """Gives owners what they held, if workers have what is of now; says why not.

        No step of any program changes anything meanwhile.

        Args:
          lost: they have processes that hold nothing.
          step: updates that were told of.
          source: has what workers do not have, of some update before.

        Returns:
          How many updates that is of; None: nothing is given.

        Raises:
          JGError: they may have a part of it, and nobody else has changed.
        """
        if not self._is_used:
            return None
        by = await self._by(lost, step)
        if isinstance(by, str):
            _LOG.warning("workers cannot give what was lost: %s", by)
            return None
        rest_of = await source.load_part(lost)
        for owner, giver in by.items():
            await self._give(owner, giver, step)
        return rest_of

    async def _by(
        self, lost: Collection[TaskName], step: int
    ) -> dict[TaskName, TaskName] | str:
        """Returns who gives each part, or why nobody does."""
        now, arbiter = self._round, self.loops.arbiter
        if now is None or arbiter is None or arbiter.loop != now.loop:
            return "nobody has noted how the updates began"
        if not now.is_whole:
            return "updates are not of all workers"
        if not all(map(is_worker, lost)):
            return f"{min(lost)} is no worker"
        program = self.workers.program(now.handle)
        there = dict[TaskName, int | None]()
        for part in program.partitions:
            if (writes := writings(part)) is None:
                return f"{part.task} has a table that grows"
            if part.task in lost:
                if (name := self._unread(part.task, writes)) is not None:
                    return f"no worker reads '{name}'"
            elif writes:
                before = now.writes.get(part.task, {})
                there[part.task] = made(before, await self._writes(part.task), writes)
        reads = {w: await self._read(w, lost) for w in self._givers(lost)}
        found = gift(step - now.version, lost, there, reads)
        return found.why if isinstance(found, NotGiven) else dict(found.by)

    def _givers(self, lost: Collection[TaskName]) -> list[TaskName]:
        """Returns the workers that keep what they have read in this round."""
        found: list[TaskName] = []
        for loop in self.loops.replicas.values():
            task = TaskName(loop.task)
            name, _ = self._keeping.get(task, ("", ""))
            if name == loop.loop and task not in lost:
                found.append(task)
        return found

    def _unread(self, owner: TaskName, writes: Collection[str]) -> str | None:
        names = {v.name for w in self._keeping for v in self._named(owner, w)}
        return unread(writes, names, STEP)

    def _reads(self, owner: TaskName, worker: TaskName) -> list[WholeRead]:
        if worker == owner or worker not in self._keeping:
            return []
        program = self.workers.program(self._keeping[worker][1])
        return whole_reads(program, owner, worker)

    def _named(self, owner: TaskName, worker: TaskName) -> list[StoredVariable]:
        reads = self._reads(owner, worker)
        return [variable for read in reads for variable in read.variables]

    async def _read(
        self, worker: TaskName, lost: Collection[TaskName]
    ) -> dict[TaskName, int]:
        """Returns how often a worker has read all of the part of each owner."""
        give = pb.GiveReads(container=self._container)
        try:
            reply = await self.peers.call(worker, "GiveReads", frame(give_reads=give))
        except ClusterUnreachableError:
            return {}
        counts, found = body_of(reply).counts, dict[TaskName, int]()
        for owner in lost:
            each = {counts[read.key] for read in self._reads(owner, worker)}
            found[owner] = each.pop() if len(each) == 1 else 0
        return found

    async def _give(self, owner: TaskName, giver: TaskName, step: int) -> None:
        """Lets a worker give an owner its part, and tells that how many updates."""
        assert self._round is not None  # so somebody gives something
        count = step - self._round.version + 1
        give = pb.GiveReads(container=self._container)
        for read in self._reads(owner, giver):
            message = give.messages.add(key=read.key, count=count)
            _add(message, read.place, read.variables)
        names = self._named(owner, giver)
        nbytes = sum(variable.type.nbytes for variable in names)
        mover = Mover(self.order, self.peers)
        transfer = Transfer(giver, owner, [v.name for v in names], nbytes)
        try:
            await self.peers.call(giver, "GiveReads", frame(give_reads=give))
            await mover.copy_at_rest([transfer])
        finally:
            await mover.forget([(giver, transfer.names)])
        program = self.workers.program(self._round.handle)
        for variable in program.partition(owner).variables:
            if variable.name == STEP:
                await self._count(owner, variable, step)
        _LOG.info("%s gave %s the parameters of step %d", giver, owner, step)

    async def _count(self, owner: TaskName, counter: StoredVariable, step: int) -> None:
        give = pb.GiveReads(container=self._container)
        _add(give.messages.add(), 0, [counter])
        value = np.asarray(step, counter.type.np_dtype)
        request = frame(give_reads=give, tensors=[value])
        await self.peers.call(owner, "GiveReads", request)


def _add(
    message: pb.KeptMessage, place: int, variables: Sequence[StoredVariable]
) -> None:
    value = message.values.add(place=place)
    for variable in variables:
        type_ = pb.TensorType(dtype=variable.type.dtype, shape=variable.type.shape)
        value.variables.add(
            container=variable.container, name=variable.name, type=type_
        )
