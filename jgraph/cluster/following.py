"""The calls in which loops run, followed; what comes of them waits in one queue."""

import asyncio
import concurrent.futures
import queue
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, final

from jgraph.cluster import loop
from jgraph.cluster.calls import loop_timeout_s
from jgraph.cluster.loop_items import Item, Loop
from jgraph.cluster.loop_orders import report_of
from jgraph.errors import DeadlineError, JGError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame

if TYPE_CHECKING:
    from jgraph.cluster.client import Cluster


T = TypeVar("T")
Judge: TypeAlias = Callable[[Loop, JGError, TaskName, int], Item]
"""Says what the end of a loop's reports means: the loop, why, the master, the epoch."""


@final
class Following:
    """Follows the loops of one run.

    Args:
      cluster: its client.
      judge: called in the event loop's thread.
      to_the_end: tell also that the reports of a loop are over.
    """

    def __init__(self, cluster: "Cluster", judge: Judge, *, to_the_end: bool) -> None:
        self._cluster = cluster
        self._judge = judge
        self._to_the_end = to_the_end
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

    def report(self, silence_s: float) -> Item:
        """Returns what came next.

        Raises:
          DeadlineError: nothing, within ``silence_s``.
        """
        try:
            return self.next(silence_s)
        except queue.Empty:
            raise DeadlineError(
                f"no report from the training loops for {silence_s:g} s; look at the "
                "tasks with cluster.status()"
            ) from None

    def begin(self, one: Loop, order: pb.RunLoop) -> None:
        """Sets a loop going, and follows it."""
        following = self._follow(one, order, self._cluster.master)
        self._calls.append(self.beside(following))

    def beside(self, work: Coroutine[None, None, T]) -> concurrent.futures.Future[T]:
        """Does something meanwhile, without waiting for it."""
        future = loop.start(work)
        self._beside.add(future)
        future.add_done_callback(self._beside.discard)
        return future

    def cut(self, wait_s: float) -> list[Item]:
        """Ends all calls that do not end within ``wait_s``; returns what had come."""
        concurrent.futures.wait(self._calls, timeout=wait_s)
        for call in self._calls:
            call.cancel()
        self._calls = []
        loop.run(asyncio.sleep(0))  # behind the cancelling: nothing comes of them now
        return [self._items.get_nowait() for _ in range(self._items.qsize())]

    async def _follow(self, one: Loop, order: pb.RunLoop, master: TaskName) -> None:
        request = one.request
        try:
            replies = self._cluster.transport.call(
                self._cluster.address,
                "Master.RunLoop",
                frame(run_loop=order),
                timeout_s=loop_timeout_s(request.steps, request.step_timeout_s),
            )
            async for reply in replies:
                self._items.put((one, report_of(request, reply)))
            if self._to_the_end:
                self._items.put((one, None))
        except JGError as error:
            self._items.put(self._judge(one, error, master, order.epoch))
