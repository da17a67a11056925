"""Report streams of a run's replica loops, merged in one queue at the client."""

import asyncio
import concurrent.futures
import queue
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, TypeAlias, TypeVar, final

from jgraph.client.connection import Connection
from jgraph.client.runs.loop_items import Item, Loop
from jgraph.cluster import event_loop
from jgraph.cluster.deadlines import loop_timeout_s
from jgraph.cluster.loop_messages import LoopReport, LoopRequest, report_of
from jgraph.errors import DeadlineError, JGError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame

_SILENCE_S: Final = 30.0
"""How much later than a step may take a loop is missed."""
T = TypeVar("T")
Judge: TypeAlias = Callable[[Loop, JGError, TaskName, int], Item]
"""Says what the end of a loop's reports means: the loop, why, the master, the term."""


@final
class ReportStreams:
    """Follows the loops of one run.

    Args:
      cluster: its client.
      judge: called in the event loop's thread.
      requests: the loops.
      came: is given each report as it comes, in the event loop's thread.
    """

    def __init__(
        self,
        cluster: Connection,
        judge: Judge,
        requests: Sequence[LoopRequest],
        came: Callable[[Loop, LoopReport], LoopReport],
    ) -> None:
        self._cluster = cluster
        self._judge = judge
        self._came = came
        # A worker reports at least once per step; silence beyond that is an error.
        longest_s = max(
            (r.step_timeout_s + r.report_every_s for r in requests), default=0.0
        )
        self._silence_s = _SILENCE_S + longest_s
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._calls: list[concurrent.futures.Future[None]] = []
        self._beside: set[concurrent.futures.Future[Any]] = set()

    def put(self, item: Item) -> None:
        """Adds what else happened; from any thread."""
        self._items.put(item)

    def next(self, timeout_s: float) -> Item:
        """Returns what came next.

        Raises:
          queue.Empty: nothing, within ``timeout_s``.
        """
        return self._items.get(timeout=timeout_s)

    def report(self, running: Iterable[TaskName]) -> Item:
        """Returns what came next.

        Args:
          running: tasks whose loops have not ended, for the message.

        Raises:
          DeadlineError: nothing, for longer than a step takes.
        """
        try:
            return self.next(self._silence_s)
        except queue.Empty:
            raise DeadlineError(
                f"no report from the training loops for {self._silence_s:g} s, and "
                f"these have not ended: {', '.join(sorted(running))}; look at these "
                "tasks with cluster.status()"
            ) from None

    def begin(self, one: Loop, order: pb.RunLoop) -> None:
        """Sets a loop going, and follows it."""
        following = self._follow(one, order, self._cluster.master)
        self._calls.append(self.beside(following))

    def beside(self, work: Coroutine[None, None, T]) -> concurrent.futures.Future[T]:
        """Does something meanwhile, without waiting for it."""
        future = event_loop.start(work)
        self._beside.add(future)
        future.add_done_callback(self._beside.discard)
        return future

    def cut(self, wait_s: float) -> list[Item]:
        """Ends all calls that do not end within ``wait_s``; returns what had come."""
        concurrent.futures.wait(self._calls, timeout=wait_s)
        for call in self._calls:
            call.cancel()
        self._calls = []
        # Behind the cancelling: nothing comes of them now.
        event_loop.run(asyncio.sleep(0))
        return [self._items.get_nowait() for _ in range(self._items.qsize())]

    async def _follow(self, one: Loop, order: pb.RunLoop, master: TaskName) -> None:
        asked = one.request
        try:
            async for reply in self._cluster.transport.call(
                *(self._cluster.address, "Master.RunLoop", frame(run_loop=order)),
                timeout_s=loop_timeout_s(asked.steps, asked.step_timeout_s),
            ):
                self._items.put((one, self._came(one, report_of(asked, reply))))
        except JGError as error:
            self._items.put(self._judge(one, error, master, order.term))
