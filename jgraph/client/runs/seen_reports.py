"""Deduplication of a run's reports after a new master, and their order at a restore."""

from collections import Counter
from collections.abc import Collection, Iterator
from typing import TypeAlias, final

from jgraph.client.runs.loop_items import Loop
from jgraph.cluster.loop_messages import LoopReport
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame


@final
class ReportDeduplicator:
    """Of one replica of a run that outlives its client."""

    def __init__(self) -> None:
        self._over: set[str] = set()  # loops of which nothing new will come
        self._loop = ""
        self._number = 0
        self._next_step = 0
        self._restored = 0

    def unseen(self, report: Frame) -> Frame | None:
        """Returns what is new in a report, which counts as seen from here on.

        An account of a loop has all of its last reports in one, so some of its steps
        may have been told of. None: all of it was.
        """
        body, (steps, seconds, *fetches) = body_of(report), report.tensors
        if body.HasField("restored"):
            is_new = body.restored.number > self._restored
            self._restored = max(self._restored, body.restored.number)
            return report if is_new else None
        if body.loop in self._over:
            return None
        if body.loop != self._loop:
            self._over.add(self._loop)
            self._loop, self._number, self._next_step = body.loop, 0, 0
        elif body.state == "lost":
            self._over.add(body.loop)
            return report
        elif body.number <= self._number:
            return None
        self._number = max(self._number, body.number)
        if not len(steps):
            return report
        new = steps >= self._next_step
        self._next_step = max(self._next_step, int(steps[-1]) + 1)
        if new.all():
            return report
        tensors = [tensor[new] for tensor in (steps, seconds, *fetches)]
        return frame(loop_report=body, tensors=tensors)


_Told: TypeAlias = tuple[Loop, LoopReport]


@final
class RestoreBarrier:
    """Puts what replicas tell in order around "restored", which each of them tells.

    What came before a restore in one stream is passed on before what comes after it in
    another.
    """

    def __init__(self) -> None:
        self._restored = 0  # how often, as far as was passed on
        self._passed = Counter[Loop]()
        self._behind: list[_Told] = []
        self._report: _Told | None = None

    def take(
        self, loop: Loop, report: LoopReport, loops: Collection[Loop]
    ) -> Iterator[_Told]:
        """Yields what may be passed on now.

        Args:
          loop: tells it.
          report: what.
          loops: all that tell something.
        """
        if self._passed[loop] > self._restored:
            self._behind.append((loop, report))
        elif report.restored is None:
            yield loop, report
        elif report.number > self._restored:
            self._passed[loop], self._report = report.number, (loop, report)
            yield from self.go_on(loops)

    def go_on(self, loops: Collection[Loop]) -> Iterator[_Told]:
        """Yields what no loop holds up any more."""
        if self._report is None:
            return
        if any(self._passed[each] <= self._restored for each in loops):
            return
        told, self._report = self._report, None
        self._restored = told[1].number
        yield told
        behind, self._behind = self._behind, []
        for loop, report in behind:
            yield from self.take(loop, report, loops)
