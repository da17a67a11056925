"""Mover: copies variables of a run from one ps to another, beside what is there.

Rows are copied while training goes on, and again where they were written meanwhile;
under the fence what is left, and variables that each step writes whole.
"""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from jgraph.cluster.deadlines import bulk_timeout_s
from jgraph.coordination.run.rescale import goes_on
from jgraph.errors import CopyLostError
from jgraph.failpoints import failpoint
from jgraph.graph.ir import TaskName
from jgraph.plan.program.accumulate import MEAN
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.server.runs.peers import Peers
from jgraph.server.runs.ps_setup import container_of, ps_task
from jgraph.server.runs.rescaling.arrangements import Transfer


@final
@dataclass(frozen=True, slots=True)
class Mover:
    """Copies variables of one run between its ps.

    Args:
      order: what the client said of the run.
      peers: to the tasks.
    """

    order: pb.OpenRun
    peers: Peers

    async def begin(self, transfers: Sequence[Transfer]) -> None:
        """Lets tasks note from now on what changes of that which moves.

        Raises:
          RescaleError: a ps has no room for what is to come.
          JGError: a ps does not answer.
        """
        await self._forget_streams(transfers)
        for one in transfers:
            nbytes = sum(other.nbytes for other in transfers if other.dst == one.dst)
            take = pb.TakeRecords(stream=self._stream(one), src=one.src, nbytes=nbytes)
            await self.peers.call(one.dst, "TakeRecords", frame(take_records=take))
            await self._send(one, begins=True)

    async def copy_ahead(self, transfers: Sequence[Transfer]) -> None:
        """Copies what moves while training goes on, until little of it is left.

        Raises:
          JGError: a ps does not answer, or has no room.
        """
        for one in transfers:
            remainders = list[int]()
            while not remainders or goes_on(remainders):
                remainders.append((await self._send(one)).left)

    async def copy(self, transfers: Sequence[Transfer]) -> None:
        """Copies what is left, and makes the copies variables of the run.

        Raises:
          CopyLostError: a copy is not whole.
          JGError: a ps does not answer, or has no room.
        """
        await asyncio.gather(*(self._copy(one) for one in transfers))
        failpoint("rescale.copied")
        for dst in sorted({one.dst for one in transfers}):
            for one in transfers:
                if one.dst == dst:
                    move = pb.MoveVariables(
                        container=self._stream(one),
                        into=container_of(self.order),
                        beside=True,
                    )
                    await self.peers.call(
                        dst, "MoveVariables", frame(move_variables=move)
                    )

    async def copy_at_rest(self, transfers: Sequence[Transfer]) -> None:
        """Copies all that moves, while nothing changes.

        Raises:
          CopyLostError: a copy is not whole.
          JGError: a ps does not answer, or has no room.
        """
        try:
            await self.begin(transfers)
            await self.copy(transfers)
        finally:
            await self._forget_streams(transfers)

    async def drop(self, transfers: Sequence[Transfer], *, copies: bool) -> None:
        """Drops what was copied.

        Args:
          transfers: what was to go where.
          copies: some may be variables of the run already.
        """
        await self._forget_streams(transfers)
        if copies:
            await self.forget((one.dst, one.names) for one in transfers)

    async def tidy(self, most: int) -> None:
        """Drops what a master before was copying between so many ps, if it was."""
        every = itertools.permutations(map(ps_task, range(most)), 2)
        await self._forget_streams([Transfer(src, dst) for src, dst in every])

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

    def _stream(self, one: Transfer) -> str:
        ends = (one.src.removeprefix("/job:"), one.dst.removeprefix("/job:"))
        src, dst = (task.replace("/task:", "") for task in ends)
        return f"{self.order.run}-moves-{src}-{dst}"

    async def _send(self, one: Transfer, **how: bool) -> pb.CopyAhead:
        """Lets a task copy to a container of another, which nobody reads."""
        order = pb.CopyAhead(
            stream=self._stream(one),
            container=container_of(self.order),
            backup=one.dst,
            names=one.names,
            **how,
        )
        limit_s = bulk_timeout_s(one.nbytes)
        request = frame(copy_ahead=order)
        reply = await self.peers.call(one.src, "CopyAhead", request, timeout_s=limit_s)
        copied: pb.CopyAhead = body_of(reply)
        one.sent_bytes += copied.sent
        return copied

    async def _copy(self, one: Transfer) -> None:
        limit_s = bulk_timeout_s(one.nbytes)
        number = (await self._send(one, ends=True)).number
        ends = frame(end_records=pb.EndRecords(stream=self._stream(one)))
        reply = await self.peers.call(one.dst, "EndRecords", ends, timeout_s=limit_s)
        if (came := body_of(reply).number) != number:
            raise CopyLostError(
                f"{one.dst} has {came} of {number} records that {one.src} gave it",
                task=one.dst,
            )

    async def _forget_streams(self, transfers: Sequence[Transfer]) -> None:
        streams: defaultdict[TaskName, list[str]] = defaultdict(list)
        for one in transfers:
            for task in (one.src, one.dst):
                streams[task].append(self._stream(one))
        calls = [
            self.peers.call(task, "Reset", frame(reset=pb.Reset(containers=names)))
            for task, names in streams.items()
        ]
        # Of a task that is gone nothing is left.
        await asyncio.gather(*calls, return_exceptions=True)
