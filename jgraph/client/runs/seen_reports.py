"""Deduplication of a run's reports: a new master tells all of them again."""

from collections import Counter
from typing import final

from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame


@final
class ReportDeduplicator:
    """Of one replica of a run that outlives its client."""

    def __init__(self) -> None:
        self._past_loops: set[str] = set()  # loops of which nothing new will come
        self._loop = ""
        self._number = 0
        self._next_step = 0
        self._last_numbers: Counter[str] = Counter()  # of what is told of the run

    def unseen(self, report: Frame) -> Frame | None:
        """Returns what is new in a report, which counts as seen from here on.

        An account of a loop has all of its last reports in one, so some of its steps
        may have been told of. None: all of it was.
        """
        body, (steps, seconds, *fetches) = body_of(report), report.tensors
        if (numbered := _numbered(body)) is not None:
            kind, number = numbered
            is_new = number > self._last_numbers[kind]
            self._last_numbers[kind] = max(self._last_numbers[kind], number)
            return report if is_new else None
        if body.loop in self._past_loops:
            return None
        if body.loop != self._loop:
            self._past_loops.add(self._loop)
            self._loop, self._number, self._next_step = body.loop, 0, 0
        elif body.state == "lost":
            self._past_loops.add(body.loop)
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


def _numbered(body: pb.LoopReport) -> tuple[str, int] | None:
    """Returns what a report tells of the run, and its number; None: it is of a loop."""
    if body.HasField("restored"):
        return "restored", body.restored.number
    if body.HasField("rescaled"):
        kind = "given up" if body.rescaled.why else "rescaled"
        return kind, body.rescaled.number
    if body.HasField("homes"):
        return "homes", body.homes.number
    return None
