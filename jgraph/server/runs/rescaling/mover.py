"""Mover: copies variables of a run from one ps to another, beside what is there."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from jgraph.cluster.deadlines import COMPILE_S, bulk_timeout_s
from jgraph.errors import CopyLostError, JGError
from jgraph.failpoints import failpoint
from jgraph.graph.ir import TaskName
from jgraph.plan.program.accumulate import MEAN
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.server.runs.peers import Peers
from jgraph.server.runs.ps_setup import container_of
from jgraph.server.runs.rescaling.arrangements import Transfer


@final
@dataclass(frozen=True, slots=True)
class Mover:
    """Copies variables of one run between its ps while no step changes them.

    Args:
      order: what the client said of the run.
      peers: to the tasks.
    """

    order: pb.OpenRun
    peers: Peers

    async def copy(self, transfers: Sequence[Transfer], name: str) -> None:
        """Makes copies, which their tasks hold as variables of the run then.

        Args:
          transfers: what goes where.
          name: of this time.

        Raises:
          CopyLostError: a copy is not whole.
          JGError: a ps does not answer, or has no room.
        """
        await asyncio.gather(*(self._copy(one, name) for one in transfers))
        failpoint("rescale.copied")
        for dst in sorted({one.dst for one in transfers}):
            for one in transfers:
                if one.dst == dst:
                    move = pb.MoveVariables(
                        container=self._stream(one, name),
                        into=container_of(self.order),
                        beside=True,
                    )
                    await self.peers.call(
                        dst, "MoveVariables", frame(move_variables=move)
                    )
        await self._forget_streams(transfers, name)

    async def drop(self, transfers: Sequence[Transfer], name: str) -> None:
        """Drops copies, of which some may be made."""
        with suppress(JGError):
            await self._forget_streams(transfers, name)
        await self.forget((one.dst, one.names) for one in transfers)

    async def forget(self, where: Iterable[tuple[TaskName, Sequence[str]]]) -> None:
        """Drops variables of tasks that are not the ones to have them."""
        calls = [
            self._reset(task, [*names, *(MEAN + name for name in names)])
            for task, names in where
            if names
        ]
        # Of a task that is gone nothing is left.
        await asyncio.gather(*calls, return_exceptions=True)

    async def forget_all(self, tasks: Iterable[TaskName]) -> None:
        """Drops all that tasks have of the run, which needs them no more."""
        calls = [self._reset(task, []) for task in tasks]
        await asyncio.gather(*calls, return_exceptions=True)

    async def _reset(self, task: TaskName, names: Sequence[str]) -> None:
        """Drops variables of the run on a task; all if none are named."""
        reset = pb.Reset(containers=[container_of(self.order)], names=names)
        await self.peers.call(task, "Reset", frame(reset=reset))

    def _stream(self, one: Transfer, name: str) -> str:
        src, dst = (task.rpartition(":")[2] for task in (one.src, one.dst))
        return f"{self.order.run}-{name}-{src}-{dst}"

    async def _copy(self, one: Transfer, name: str) -> None:
        """Copies to a container of its own, which nobody reads."""
        stream, limit_s = self._stream(one, name), bulk_timeout_s(one.nbytes)
        take = frame(take_records=pb.TakeRecords(stream=stream, src=one.src))
        await self.peers.call(one.dst, "TakeRecords", take)
        keep = pb.KeepRecords(
            stream=stream,
            container=container_of(self.order),
            backup=one.dst,
            names=one.names,
        )
        keeps = frame(keep_records=keep)
        await self.peers.call(one.src, "KeepRecords", keeps, timeout_s=limit_s)
        ends = frame(end_records=pb.EndRecords(stream=stream))
        reply = await self.peers.call(one.dst, "EndRecords", ends, timeout_s=limit_s)
        if (came := body_of(reply).number) != len(one.names):
            raise CopyLostError(
                f"{one.dst} has {came} of {len(one.names)} variables that {one.src} is "
                "to give it",
                task=one.dst,
            )

    async def _forget_streams(self, transfers: Sequence[Transfer], name: str) -> None:
        for one in transfers:
            reset = frame(reset=pb.Reset(containers=[self._stream(one, name)]))
            for task in (one.src, one.dst):
                await self.peers.call(task, "Reset", reset, timeout_s=COMPILE_S)
