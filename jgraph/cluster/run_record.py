"""What a master keeps of a run, so that it outlives the client that began it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, final

import numpy as np

from jgraph.clock import Clock
from jgraph.errors import JGError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.status import to_status
from jgraph.rpc.transport import Frame

_MOST_BYTES: Final = 256 << 20
"""What is kept of the reports of one run; beyond, the oldest go."""


@final
class RunRecord:
    """The loops of one run, followed whether or not somebody watches.

    Args:
      task: this one, the master.
      order: what the client says of it.
      clock: dates it.
    """

    def __init__(self, task: TaskName, order: pb.OpenRun, clock: Clock) -> None:
        self._task = task
        self._order = order
        self._clock = clock
        self._began = clock.now()
        self._seconds = 0.0
        self._steps = 0
        self.data_run = ""
        """Under which its data is dealt out."""
        self.position: str | None = None
        """Of synchronous training: where in the data it is, as JSON."""
        self._kept: deque[tuple[pb.LoopReport, Sequence[np.ndarray[Any, Any]]]]
        self._kept = deque()
        self._first = self._nbytes = 0
        self.loops: dict[str, TaskName] = {}
        """Those that go on, and where."""
        self._following: dict[str, asyncio.Task[None]] = {}
        self._helpers: set[str] = set()  # contribute; another loop tells of the steps
        self._told = ""  # state, by who tells of the steps
        self._ended: dict[str, JGError | None] = {}
        self._stopped = False
        self._news: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        """Whether all its loops have ended."""
        return bool(self._following) and not self.loops and self._told != "paused"

    def row(self) -> pb.RunRow:
        """Returns how it stands."""
        if not self.is_over:
            state = "running"
        elif self._stopped:
            state = "stopped"
        else:
            # Who was lost does not matter where others have done the rest.
            last = [*self._outcomes()][-1]
            state = "done" if last is None and self._told != "alone" else "failed"
        age_s = self._clock.now() - self._began
        return pb.RunRow(
            run=self._order.run,
            task=self._task,
            state=state,
            info=self._order.info,
            steps=self._steps,
            seconds=self._seconds if self.is_over else age_s,
            data_run=self.data_run,
            age_s=age_s,
        )

    @property
    def news(self) -> Awaitable[None]:
        """Done as soon as something happens after this."""
        return asyncio.shield(self._news)

    def follow(
        self, order: pb.RunLoop, reports: AsyncIterator[Frame]
    ) -> AsyncIterator[Frame]:
        """Follows a loop from now to its end; returns its reports for who asked."""
        self.loops[order.loop] = TaskName(order.task)
        if order.HasField("sync"):
            self._told, self.position = "running", order.sync.data_position
        elif order.batch_feed:
            self._helpers.add(order.loop)
        self.data_run = order.data_run
        self._following[order.loop] = asyncio.ensure_future(
            self._follow(order.loop, order.replica, reports)
        )
        return self._of(order.loop)

    async def _follow(
        self, name: str, replica: int, reports: AsyncIterator[Frame]
    ) -> None:
        try:
            async for report in reports:
                body: pb.LoopReport = body_of(report)
                body.loop, body.replica = name, replica
                self._keep(body, report.tensors)
            self._ended[name] = None
        except JGError as error:
            lost = pb.LoopReport(
                state="lost", loop=name, replica=replica, error=to_status(error)
            )
            self._keep(lost, (np.empty(0, np.int64), np.empty(0)))
            self._ended[name] = error
        finally:
            del self.loops[name]
            self._seconds = self._clock.now() - self._began
            self._tell()

    def _keep(
        self, body: pb.LoopReport, tensors: Sequence[np.ndarray[Any, Any]]
    ) -> None:
        if body.loop not in self._helpers:
            self._steps += len(tensors[0])
            self._stopped = self._stopped or body.state == "stopped"
            self._told = body.state
            self.position = body.data_position or self.position
        self._kept.append((body, tensors))
        self._nbytes += sum(tensor.nbytes for tensor in tensors)
        while self._nbytes > _MOST_BYTES and len(self._kept) > 1:
            _, oldest = self._kept.popleft()
            self._first += 1
            self._nbytes -= sum(tensor.nbytes for tensor in oldest)
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.get_running_loop().create_future()
        news.set_result(None)

    async def _of(self, name: str) -> AsyncIterator[Frame]:
        async for report in self._each(lambda: name in self._ended):
            body = body_of(report)
            if body.loop == name and not body.HasField("error"):
                yield report
        error = self._ended[name]
        if error is not None:
            raise error

    async def all(self) -> AsyncIterator[Frame]:
        """Yields what is kept of all reports, and those to come, to the end."""
        async for report in self._each(lambda: self.is_over):
            body = body_of(report)
            if body.loop not in self._helpers or body.HasField("error"):
                yield report

    async def _each(self, is_over: Callable[[], bool]) -> AsyncIterator[Frame]:
        at = 0
        while True:
            news, ends = self.news, is_over()
            at = max(at, self._first)
            while at < self._first + len(self._kept):
                body, tensors = self._kept[at - self._first]
                yield frame(loop_report=body, tensors=tensors)
                at = max(at + 1, self._first)
            if ends:
                return
            await news

    def _outcomes(self) -> Iterator[JGError | None]:
        """Yields how each loop that tells of steps ended, the last one last."""
        for name, error in self._ended.items():
            if name not in self._helpers:
                yield error

    def close(self) -> None:
        """Follows no loop any more."""
        for following in self._following.values():
            following.cancel()
