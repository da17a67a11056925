"""The runs of one master that outlive their clients: calls about them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, final

from jgraph.clock import Clock
from jgraph.cluster.run_crew import LoopDoor, RunCrew
from jgraph.cluster.run_record import RunRecord
from jgraph.cluster.run_saver import RunSaver
from jgraph.cluster.task_loops import Method
from jgraph.errors import ConfigError, JGError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame

_KEPT: Final = 16
"""Runs that are over and can still be looked at."""


@final
class Runs:
    """Adds the calls about runs to a master.

    Args:
      door: to the tasks.
      clock: dates what happens.
      position: says where in its data a run is.

    Attributes:
      methods: the calls, by name.
    """

    def __init__(
        self,
        door: LoopDoor,
        clock: Clock,
        position: Callable[[RunRecord], Mapping[str, Any]],
    ) -> None:
        self._door = door
        self._clock = clock
        self._position = position
        self._crews: dict[str, RunCrew] = {}
        self._savers: dict[str, RunSaver] = {}
        self.methods: Mapping[str, Method] = {
            "Runs": self._own,
            "Master.Runs": self._all,
            "Master.OpenRun": self._open,
            "Master.KeepProgram": self._keep,
            "Master.Attach": self._attach,
            "Master.StopRun": self._stop,
            "Master.RunSaved": self._saved,
        }

    def find(self, run: str) -> RunCrew | None:
        """Returns who looks after a run; None: it ends with its client."""
        return self._crews.get(run)

    def close(self) -> None:
        """Follows no run any more."""
        for saver in self._savers.values():
            saver.close()
        for crew in self._crews.values():
            crew.close()

    async def _open(self, request: Frame) -> AsyncIterator[Frame]:
        order = body_of(request)
        if order.run not in self._crews:
            crew = RunCrew(order, self._door, self._clock)
            if order.HasField("saves"):
                crew.take_leave(self._save(order, crew.record))
            self._crews[order.run] = crew
        over = [name for name, crew in self._crews.items() if crew.record.is_over]
        for name in over[: max(0, len(self._crews) - _KEPT)]:
            del self._crews[name]
            self._savers.pop(name, None)
        yield frame(empty=pb.Empty())

    async def _keep(self, request: Frame) -> AsyncIterator[Frame]:
        self._get(body_of(request).run).ready.keep(request)
        yield frame(empty=pb.Empty())

    def _save(self, order: pb.OpenRun, record: RunRecord) -> RunSaver:
        where = lambda: self._position(record)
        door = self._door
        saver = RunSaver(door.task, order.saves, record, door.call, where)
        saver.start()
        self._savers[order.run] = saver
        return saver

    async def _own(self, request: Frame) -> AsyncIterator[Frame]:
        rows = [crew.record.row() for crew in self._crews.values()]
        yield frame(run_table=pb.RunTable(runs=rows))

    async def _all(self, request: Frame) -> AsyncIterator[Frame]:
        calls = (self._door.call(t, "Runs", request) for t in self._door.tasks())
        replies = await asyncio.gather(*calls, return_exceptions=True)
        table = pb.RunTable()
        for reply in replies:
            if isinstance(reply, JGError):
                continue  # who does not answer is the master of nothing
            if isinstance(reply, BaseException):
                raise reply
            table.runs.extend(body_of(reply).runs)
        yield frame(run_table=table)

    async def _attach(self, request: Frame) -> AsyncIterator[Frame]:
        async for report in self._get(body_of(request).run).record.all():
            yield report

    async def _stop(self, request: Frame) -> AsyncIterator[Frame]:
        self._get(body_of(request).run).stop()
        yield frame(empty=pb.Empty())

    async def _saved(self, request: Frame) -> AsyncIterator[Frame]:
        run = body_of(request).run
        self._get(run)
        if run in self._savers:
            await self._savers[run].rest()
        yield frame(empty=pb.Empty())

    def _get(self, run: str) -> RunCrew:
        if run not in self._crews:
            raise ConfigError(
                f"{self._door.task} is not the master of a run '{run[:80]}'; `jgraph "
                "runs` shows which runs there are"
            )
        return self._crews[run]
