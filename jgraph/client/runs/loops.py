"""Handle of replica loops that are no run: sends requests, yields reports.

Nobody looks after such loops: the loss of any task ends them all.
"""

import concurrent.futures
import queue
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final, TypeAlias, final

from jgraph.client.connection import Connection, unique
from jgraph.cluster import event_loop
from jgraph.cluster.deadlines import loop_timeout_s
from jgraph.cluster.loop_messages import (
    LoopReport,
    LoopRequest,
    loop_order,
    plain,
    report_of,
)
from jgraph.errors import DeadlineError, JGError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame

_SILENCE_S: Final = 30.0
"""How much later than a step may take a loop is missed."""
_Item: TypeAlias = tuple[int, LoopReport] | JGError


@final
class LoopHandle:
    """Loops under way: iterate for their reports until all have ended.

    Iterating raises the first error of any loop, after asking the others to stop.

    Args:
      cluster: of their tasks.
      requests: what they do.
      session: has their programs, which go with it: it stays as long as this.
    """

    def __init__(
        self,
        cluster: Connection,
        requests: Sequence[LoopRequest],
        session: object = None,
    ) -> None:
        self._cluster, self._session = cluster, session
        self._name = unique("loop")
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._running: dict[int, LoopRequest] = dict(enumerate(requests))
        self._is_stopped = False
        # A worker reports at least once per step; silence beyond that is an error.
        longest_s = max(
            (r.step_timeout_s + r.report_every_s for r in requests), default=0.0
        )
        self._silence_s = _SILENCE_S + longest_s
        arbiter = next((r for r in requests if r.sync is not None), None)
        self._calls: list[concurrent.futures.Future[None]] = [
            event_loop.start(self._follow(number, request, arbiter))
            for number, request in enumerate(requests)
        ]

    def __iter__(self) -> Iterator[LoopReport]:
        try:
            while self._running:
                item = self._next()
                if isinstance(item, JGError):
                    raise item
                number, report = item
                if report.state != "running":
                    del self._running[number]
                yield report
        finally:
            if self._running:
                self.stop()

    def stop(self) -> None:
        """Asks all loops to end after their steps in flight; returns at once."""
        if self._is_stopped:
            return
        self._is_stopped = True
        for request in list(self._running.values()):
            order = pb.StopLoop(loop=self._loop_of(request), task=request.task)
            with suppress(JGError):
                self._cluster.call("Master.StopLoop", frame(stop_loop=order))

    def _loop_of(self, request: LoopRequest) -> str:
        return f"{self._name}-{request.replica}"

    def _next(self) -> _Item:
        try:
            return self._items.get(timeout=self._silence_s)
        except queue.Empty:
            tasks = sorted({request.task for request in self._running.values()})
            raise DeadlineError(
                f"no report from the training loops for {self._silence_s:g} s, and "
                f"these have not ended: {', '.join(tasks)}; look at these tasks with "
                "cluster.status()"
            ) from None

    async def _follow(
        self, number: int, request: LoopRequest, arbiter: LoopRequest | None
    ) -> None:
        order = loop_order(request)
        order.loop = self._loop_of(request)
        if arbiter is not None and arbiter.sync is not None:
            order.data_run, order.dealer = self._loop_of(arbiter), arbiter.task
            order.data_plan = order.data_plan or plain(arbiter.sync.plan)
        try:
            async for reply in self._cluster.transport.call(
                *(self._cluster.address, "Master.RunLoop", frame(run_loop=order)),
                timeout_s=loop_timeout_s(request.steps, request.step_timeout_s),
            ):
                self._items.put((number, report_of(request, reply)))
        except JGError as error:
            self._items.put(error)
