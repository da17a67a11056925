"""The runs of one master that outlive their clients: calls about them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, final

from jgraph.clock import Clock
from jgraph.cluster.run_record import RunRecord
from jgraph.cluster.run_saver import RunSaver
from jgraph.cluster.task_loops import Method
from jgraph.errors import ConfigError, JGError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame

_KEPT: Final = 16
"""Runs that are over and can still be looked at."""


@final
class Runs:
    """Adds the calls about runs to a master.

    Args:
      task: where it is.
      clock: dates what happens.
      call: calls a task.
      tasks: returns all tasks of the cluster.
      position: says where in its data a run is.

    Attributes:
      methods: the calls, by name.
    """

    def __init__(
        self,
        task: TaskName,
        clock: Clock,
        call: Callable[..., Awaitable[Frame]],
        tasks: Callable[[], Iterable[TaskName]],
        position: Callable[[RunRecord], Mapping[str, Any]],
    ) -> None:
        self._task = task
        self._clock = clock
        self._call = call
        self._tasks = tasks
        self._position = position
        self._records: dict[str, RunRecord] = {}
        self._savers: dict[str, RunSaver] = {}
        self.methods: Mapping[str, Method] = {
            "Runs": self._own,
            "Master.Runs": self._all,
            "Master.OpenRun": self._open,
            "Master.Attach": self._attach,
            "Master.StopRun": self._stop,
        }

    def find(self, run: str) -> RunRecord | None:
        """Returns the record of a run; None of one that ends with its client."""
        return self._records.get(run)

    def close(self) -> None:
        """Follows no run any more."""
        for saver in self._savers.values():
            saver.close()
        for record in self._records.values():
            record.close()

    async def _open(self, request: Frame) -> AsyncIterator[Frame]:
        order = body_of(request)
        if order.run not in self._records:
            record = RunRecord(self._task, order, self._clock)
            if order.HasField("saves"):
                self._save(order, record)
            self._records[order.run] = record
        over = [name for name, record in self._records.items() if record.is_over]
        for name in over[: max(0, len(self._records) - _KEPT)]:
            del self._records[name]
            self._savers.pop(name, None)
        yield frame(empty=pb.Empty())

    def _save(self, order: pb.OpenRun, record: RunRecord) -> None:
        where = lambda: self._position(record)
        saver = RunSaver(self._task, order.saves, record, self._call, where)
        saver.start()
        self._savers[order.run] = saver

    async def _own(self, request: Frame) -> AsyncIterator[Frame]:
        rows = [record.row() for record in self._records.values()]
        yield frame(run_table=pb.RunTable(runs=rows))

    async def _all(self, request: Frame) -> AsyncIterator[Frame]:
        calls = (self._call(task, "Runs", request) for task in self._tasks())
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
        async for report in self._get(body_of(request).run).all():
            yield report

    async def _stop(self, request: Frame) -> AsyncIterator[Frame]:
        record = self._get(body_of(request).run)
        for loop, task in list(record.loops.items()):
            order = frame(stop_loop=pb.StopLoop(loop=loop, task=task))
            await self._call(task, "StopLoop", order)
        yield frame(empty=pb.Empty())

    def _get(self, run: str) -> RunRecord:
        if run not in self._records:
            raise ConfigError(
                f"{self._task} is not the master of a run '{run[:80]}'; `jgraph runs` "
                "shows which runs there are"
            )
        return self._records[run]
