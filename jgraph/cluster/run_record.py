"""What a master keeps of a run, so that it outlives the client that began it."""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
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
_NOTHING: Final = (np.empty(0, np.int64), np.empty(0))


@final
class RunRecord:
    """The reports of one run, whether or not somebody watches.

    Args:
      task: this one, the master.
      order: what the client says of it.
      clock: dates it.

    Attributes:
      data_run: under which its data is dealt out.
      position: of synchronous training: where in the data it is, as JSON.
      error: what it failed with.
    """

    def __init__(self, task: TaskName, order: pb.OpenRun, clock: Clock) -> None:
        self.data_run = ""
        self.position: str | None = None
        self.error: JGError | None = None
        self._task = task
        self._order = order
        self._clock = clock
        self._began = clock.now()
        self._seconds = 0.0
        self._steps = 0
        self._state = "running"
        self._kept: deque[tuple[pb.LoopReport, Sequence[np.ndarray[Any, Any]]]]
        self._kept = deque()
        self._first = self._nbytes = 0
        self._helpers: set[str] = set()  # contribute; another loop tells of the steps
        # Came too late: of all loops of a replica, and of its last one.
        self._dropped: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._late: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._news: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._state != "running"

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self._clock.now() - self._began

    def row(self) -> pb.RunRow:
        """Returns how it stands."""
        age_s = self.seconds
        return pb.RunRow(
            run=self._order.run,
            task=self._task,
            state=self._state,
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

    def begins(self, order: pb.RunLoop) -> None:
        """Takes note of a loop of it, and tells of it."""
        if order.HasField("sync"):
            self.position = order.sync.data_position
        elif order.batch_feed:
            self._helpers.add(order.loop)
        self.data_run = order.data_run
        self._dropped[order.replica] += self._late.pop(order.replica, Counter())
        body = pb.LoopReport(
            state="running",
            loop=order.loop,
            replica=order.replica,
            handle=order.handle,
        )
        self._append(body, _NOTHING)

    def keep(self, order: pb.RunLoop, report: Frame, began_s: float) -> None:
        """Keeps what a loop tells.

        Args:
          order: of the loop.
          report: its seconds are those since the loop began.
          began_s: when that was, in seconds since the run began.
        """
        body: pb.LoopReport = body_of(report)
        steps, seconds, *fetches = report.tensors
        body.loop, body.replica = order.loop, order.replica
        if body.dropped:
            self._late[order.replica] = Counter(body.dropped)
        for task, count in self._dropped[order.replica].items():
            body.dropped[task] += count
        if order.loop not in self._helpers:
            self._steps += len(steps)
            self.position = body.data_position or self.position
        self._append(body, [steps, seconds + began_s, *fetches])

    def lost(self, order: pb.RunLoop, error: JGError) -> None:
        """Takes note that the worker of a loop is gone."""
        body = pb.LoopReport(
            state="lost",
            loop=order.loop,
            replica=order.replica,
            error=to_status(error),
        )
        self._append(body, _NOTHING)

    def end(self, state: str, error: JGError | None) -> None:
        """Ends it: "done", "stopped" or "failed"."""
        self._seconds = self.seconds
        self._state, self.error = state, error
        self._tell()

    def _append(
        self, body: pb.LoopReport, tensors: Sequence[np.ndarray[Any, Any]]
    ) -> None:
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

    async def of(self, replica: int) -> AsyncIterator[Frame]:
        """Yields all reports of the loops of a replica, to the end of the run.

        Raises:
          JGError: the run failed.
        """
        async for report in self._each(lambda body: body.replica == replica):
            yield report
        if self.error is not None:
            raise self.error

    async def all(self) -> AsyncIterator[Frame]:
        """Yields what is kept of all reports, and those to come, to the end."""
        async for report in self._each(self._tells):
            yield report

    def _tells(self, body: pb.LoopReport) -> bool:
        return body.loop not in self._helpers or body.HasField("error")

    async def _each(
        self, wanted: Callable[[pb.LoopReport], bool]
    ) -> AsyncIterator[Frame]:
        at = 0
        while True:
            news, ends = self.news, self.is_over
            at = max(at, self._first)
            while at < self._first + len(self._kept):
                body, tensors = self._kept[at - self._first]
                if wanted(body):
                    yield frame(loop_report=body, tensors=tensors)
                at = max(at + 1, self._first)
            if ends:
                return
            await news
