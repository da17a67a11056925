"""Setup of a parameter server: programs, gate, data and variables of a run, again."""

import asyncio
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from jgraph.cluster.deadlines import bulk_timeout_s
from jgraph.cluster.methods import reading
from jgraph.cluster.shard_messages import shard_from, sums_in
from jgraph.errors import JGError
from jgraph.graph.device import is_ps
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.runtime.files.blocks import Sums
from jgraph.runtime.files.shard_files import read_proof
from jgraph.server.runs.peers import Peers, holds_state
from jgraph.server.runs.saving.checkpointer import STEP
from jgraph.server.runs.worker_setup import WorkerSetup

_LOG = logging.getLogger("jgraph.recover")


@final
@dataclass(frozen=True, slots=True)
class PsSetup:
    """Gives the ps of one run what their processes before had.

    Args:
      order: what the client said of the run; names what is saved of it.
      peers: to the tasks.
      workers: has the programs.
    """

    order: pb.OpenRun
    peers: Peers
    workers: WorkerSetup

    @property
    def tasks(self) -> list[TaskName]:
        """All that hold the state of the run: the ps, and owners among the workers."""
        held = [t for t in self.peers.tasks() if holds_state(self.order, t)]
        # One that is lost is no member of the cluster; it is to come back.
        ps = map(ps_task, range(self.order.ps.now))
        return [*held, *(task for task in ps if task not in held)]

    async def open_gate(self, task: TaskName) -> None:
        """Opens the gate of asynchronous training, if the ps has one.

        Raises:
          JGError: the ps does not answer.
        """
        if task in self.order.gate.shards:
            await self.peers.call(task, "OpenGate", frame(open_gate=self.order.gate))

    async def give_data(self, task: TaskName, loops: Iterable[pb.RunLoop]) -> None:
        """Gives a task the data of its own loop.

        And the first ps what it keeps for workers that are lost.

        Raises:
          JGError: nobody has the data.
        """
        keeps = not (self.order.source or self.order.client.gives_data)
        keeps = keeps and task == next(filter(is_ps, self.tasks), None)
        named = {one.data for one in loops if keeps or one.task == task}
        for name in sorted(filter(None, named)):
            await self.workers.give_data(task, name)

    async def load(
        self, task: TaskName, path: Path, *, check_only: bool = False
    ) -> list[tuple[str, Sums]]:
        """Gives a ps its variables from a checkpoint.

        Args:
          task: the ps.
          path: of the checkpoint.
          check_only: it reads them, and stores nothing.

        Returns:
          For each part of an array that it read, the array and the checksums.

        Raises:
          CheckpointCorruptError: it cannot be read.
          JGError: the ps does not answer.
        """
        held = [own.shards for own in self.order.saves.tasks if own.task == task]
        files = pb.ShardFiles(
            directory=str(path),
            proof=await asyncio.to_thread(read_proof, path),
            shards=[shard for shards in held for shard in shards],
            check_only=check_only,
        )
        if not files.shards:
            return []
        container = container_of(self.order)
        for shard in files.shards:
            shard.container = container  # it was a copy that was saved
        shards = [shard_from(task, shard) for shard in files.shards]
        nbytes = sum(shard.variable.type.nbytes for shard in shards)
        reply = await self.peers.call(
            task,
            "LoadShards",
            frame(shard_files=files),
            timeout_s=bulk_timeout_s(nbytes),
        )
        arrays = [shard.rows.array for shard in shards]
        return list(zip(arrays, sums_in(reply, len(arrays)), strict=True))


def ps_task(index: int) -> TaskName:
    """Returns the name of a ps."""
    return TaskName(f"/job:ps/task:{index}")


def container_of(order: pb.OpenRun) -> str:
    """Returns where the variables of a run are.

    Raises:
      MalformedMessageError: it is not said.
    """
    with reading("what is said of a run"):
        return str(json.loads(order.info)["container"])


def first_step_of(order: pb.OpenRun) -> int:
    """Returns how many updates there were before a run.

    Raises:
      MalformedMessageError: it is no number.
    """
    with reading("what is said of a run"):
        return int(dict(json.loads(order.info)).get("first_step", 0))


async def version_of(peers: Peers, order: pb.OpenRun) -> int:
    """Returns how often the variable that counts the updates of a run was written.

    Raises:
      JGError: a ps does not say, and it may be the one that counts.
    """
    query = frame(variable_query=pb.VariableQuery(containers=[container_of(order)]))
    ps = [task for task in peers.tasks() if holds_state(order, task)]
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
