"""Master methods about gates: forwarded to every task that has the gate."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import final

from jgraph.cluster.calls import CONTROL_S, SILENCE_S
from jgraph.cluster.door import Peers
from jgraph.cluster.task_loops import Method
from jgraph.failpoints import failpoint
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame


@final
@dataclass(frozen=True, slots=True)
class GateMethods:
    """Passes calls about gates on to the tasks that have them.

    Args:
      door: to the tasks.
    """

    door: Peers

    @property
    def methods(self) -> Mapping[str, Method]:
        """The calls, by name."""
        return {"Master.OpenGate": self._open, "Master.GateReport": self._report}

    async def _open(self, request: Frame) -> AsyncIterator[Frame]:
        failpoint("gates.opening")
        await self._each("OpenGate", request, SILENCE_S)
        failpoint("gates.opened")
        yield frame(empty=pb.Empty())

    async def _report(self, request: Frame) -> AsyncIterator[Frame]:
        replies = await self._each("GateReport", request, CONTROL_S)
        rows = [row for reply in replies for row in body_of(reply).rows]
        yield frame(gate_table=pb.GateTable(rows=rows))

    async def _each(self, method: str, request: Frame, timeout_s: float) -> list[Frame]:
        shards = map(TaskName, body_of(request).shards)
        call = self.door.call
        calls = (call(s, method, request, timeout_s=timeout_s) for s in shards)
        return await asyncio.gather(*calls)
