"""Rolling restart of a ps: pauses the run, saves it, restores the new process.

A ps that is told to end waits for those who hold it. The run is saved when its loops
have ended; then the ps may go, and its next process gets what the last one had.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, final

from jgraph.clock import Clock
from jgraph.cluster.deadlines import bulk_timeout_s
from jgraph.cluster.drain import holding, told_to_end
from jgraph.cluster.methods import reading
from jgraph.cluster.shard_messages import shard_from, sums_in
from jgraph.coordination.run.supervisor import WAIT_S
from jgraph.errors import (
    CheckpointCorruptError,
    ClusterUnreachableError,
    JGError,
    TaskLostError,
)
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.runtime.files.shard_files import read_proof
from jgraph.server.runs.checkpointer import STEP, RunCheckpointer, Saved
from jgraph.server.runs.peers import Peers, ready_tasks
from jgraph.server.runs.worker_setup import WorkerSetup

_LOG = logging.getLogger("jgraph.recover")
_POLL_S: Final = 0.5
"""Between two looks: that a ps is there again shows only by asking it."""


@final
@dataclass(slots=True)
class RollingRestart:
    """Holds the ps of a run that is saved; gives those back what they had.

    Args:
      order: what the client said of the run.
      peers: to the tasks; a run does not outlive its own.
      ready: gives the programs.
      saver: saves the run.
      clock: limits how long a ps is waited for.
      tell: called when a ps is told to end.
    """

    order: pb.OpenRun
    peers: Peers
    ready: WorkerSetup
    saver: RunCheckpointer
    clock: Clock
    tell: Callable[[], None]
    _held: dict[TaskName, asyncio.Task[None]] = field(init=False, default_factory=dict)
    _leaving: set[TaskName] = field(init=False, default_factory=set)

    def hold(self) -> None:
        """Holds all ps from now on."""
        if self.saver.record.is_over:
            return  # nobody would let them go
        for task in self._ps():
            if task not in self._held and task != self.peers.task:
                self._held[task] = asyncio.ensure_future(self._hold(task))

    @property
    def is_asked(self) -> bool:
        """Whether a ps that is held was told to end."""
        return bool(self._leaving)

    async def close(self) -> None:
        """Lets all go, as soon as a run that is over is saved."""
        await self.saver.rest()
        self.hang_up()

    def hang_up(self) -> None:
        """Lets all go, whether or not the run is over."""
        self.let_go(list(self._held))

    def let_go(self, tasks: Iterable[TaskName]) -> None:
        """Holds these no more."""
        for task in tasks:
            if task in self._held:
                self._held.pop(task).cancel()

    async def __call__(
        self, known: dict[TaskName, str], loops: Sequence[pb.RunLoop], number: int
    ) -> None:
        """Saves the run, and returns when all ps hold what they held.

        Args:
          known: which process of each task the run knows; those of ps are changed.
          loops: what each did last; gets the handle for the next one.
          number: of this time.

        Raises:
          JGError: it is not saved, or a ps does not come back.
        """
        saved = await self.saver.save_at_rest()
        version = await version_of(self.peers, self.order)
        if self.order.records:  # what it recorded is with its client alone
            raise told_to_end(*sorted(self._leaving))
        _LOG.warning(
            "%s told to end; the run is saved in %s, and goes on when all ps are there",
            *(" and ".join(sorted(self._leaving)), saved.path),
        )
        deadline, now = self.clock.now() + WAIT_S, version
        while not self.saver.record.is_over:
            self.let_go(self._leaving)
            ready = await ready_tasks(self.peers)
            lost = [task for task in self._ps() if task not in ready]
            new = [t for t in self._ps() if t in ready and ready[t] != known.get(t)]
            try:
                for task in new:
                    await self._give_programs(task, loops, number)
                    await self._give_variables(task, saved)
                    await self.ready.begin(task, f"rest.{number}.{task}")
                    known[task] = ready[task]
                    self._leaving.discard(task)
                    self.let_go([task])  # the new process is held anew
                if not (lost or self._leaving):
                    self.hold()
                    now = await version_of(self.peers, self.order)
                    break
            except (ClusterUnreachableError, TaskLostError) as error:
                _LOG.info("it went away again: %s", error.message)
            if self.clock.now() >= deadline:
                who = " and ".join(sorted({*lost, *self._leaving}))
                raise TaskLostError(
                    f"{who} did not come back in {WAIT_S:g} s; go on with another run, "
                    f"from trainer.restore('{self.order.saves.directory}')",
                    task=who,
                )
            await asyncio.sleep(_POLL_S)
        if self.saver.record.is_over:
            return  # it was told to stop, and holds nobody any more
        self.order.version += now - version
        told = pb.OpenRun()
        told.CopyFrom(self.order)
        self.saver.record.note(frame(open_run=told))  # for the standby of this master

    def _ps(self) -> list[TaskName]:
        return [task for task in self.peers.tasks() if task.startswith("/job:ps/")]

    async def _hold(self, task: TaskName) -> None:
        """Holds a task; tells when it is told to end."""
        nothing = frame(empty=pb.Empty())
        async for said in holding(lambda: self.peers.stream(task, "Farewell", nothing)):
            if said == "told":
                self._leaving.add(task)
                self.tell()

    async def _give_programs(
        self, task: TaskName, loops: Sequence[pb.RunLoop], number: int
    ) -> None:
        saves = self.order.saves
        for loop in loops:
            loop.handle = await self._program(loop.handle, loop.task, task, number)
        saves.snapshot = await self._program(saves.snapshot, saves.driver, task, number)
        if task in self.order.gate.shards:
            await self.peers.call(task, "OpenGate", frame(open_gate=self.order.gate))
        if task == self._ps()[0] and not self.order.source:
            # It has the data for workers that are lost.
            for name in sorted({loop.data for loop in loops if loop.data}):
                await self.ready.give_data(task, name)

    async def _program(
        self, handle: str, driver: str, ps: TaskName, number: int
    ) -> str:
        """Gives a ps its part of a program; returns the program's handle then."""
        if driver == ps:
            return await self.ready.renew(handle, f"rest.{number}")
        await self.ready.again(handle, ps)
        return handle

    async def _give_variables(self, task: TaskName, saved: Saved) -> None:
        held = [own.shards for own in self.order.saves.tasks if own.task == task]
        files = pb.ShardFiles(
            directory=str(saved.path),
            proof=await asyncio.to_thread(read_proof, saved.path),
            shards=[shard for shards in held for shard in shards],
        )
        if not files.shards:
            return
        container = container_of(self.order)
        for shard in files.shards:
            shard.container = container  # it was a copy that was saved
        nbytes = sum(shard_from(task, s).variable.type.nbytes for s in files.shards)
        reply = await self.peers.call(
            task,
            "LoadShards",
            frame(shard_files=files),
            timeout_s=bulk_timeout_s(nbytes),
        )
        if sums_in(reply, len(files.shards)) != saved.sums[task]:
            raise CheckpointCorruptError(
                f"what {task} read of {saved.path} is not what it wrote there",
                path=str(saved.path),
            )
        _LOG.warning("%s is there again, with what it held", task)


def container_of(order: pb.OpenRun) -> str:
    """Returns where the variables of a run are.

    Raises:
      MalformedMessageError: it is not said.
    """
    with reading("what is said of a run"):
        return str(json.loads(order.info)["container"])


async def version_of(peers: Peers, order: pb.OpenRun) -> int:
    """Returns how often the variable that counts the updates of a run was written.

    Raises:
      JGError: a ps does not say, and it may be the one that counts.
    """
    query = frame(variable_query=pb.VariableQuery(containers=[container_of(order)]))
    ps = [task for task in peers.tasks() if task.startswith("/job:ps/")]
    calls = (peers.call(task, "Variables", query) for task in ps)
    rows = [
        row
        for reply in await asyncio.gather(*calls)
        for row in body_of(reply).variables
    ]
    return max((row.version for row in rows if row.name == STEP), default=0)


async def version_if_known(peers: Peers, order: pb.OpenRun) -> int:
    """Returns the same, or 0 if a ps does not say: the run goes on."""
    try:
        return await version_of(peers, order)
    except JGError as error:
        why = error.message
        _LOG.warning("run '%s' cannot say which batches it repeats: %s", order.run, why)
        return 0
