"""Report buffer of a replica loop: gathers steps and streams them as reports."""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, final

import numpy as np

from jgraph.clock import Clock
from jgraph.errors import DeadlineError, JGError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.transport import Frame
from jgraph.server.steps.driver import Fetches

_Row: TypeAlias = tuple[int, float, Fetches]
_KEPT: Final = 64  # half a minute: longer than it takes to notice that a link is silent


@final
class LoopTimes:
    """Seconds by part, of all steps that were computed since the last report.

    Args:
      now_s: when the loop begins.

    Example:
      >>> times = LoopTimes(10.0)
      >>> own = times.add(10.5, wanted_s=10.0, started_s=10.1, parts={"compute": 0.25})
      >>> round(own["other"], 2)
      0.15
      >>> sorted(times.take())
      ['compute', 'input', 'other', 'wait']
      >>> times.take()
      {}
    """

    def __init__(self, now_s: float) -> None:
        self._computed_s = now_s
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def add(
        self,
        now_s: float,
        *,
        wanted_s: float,
        started_s: float,
        parts: Mapping[str, float],
    ) -> dict[str, float]:
        """Adds a step; returns its own seconds by part.

        Args:
          now_s: it is computed.
          wanted_s: it was to begin.
          started_s: it had its batch.
          parts: what it says of itself.
        """
        before = self._computed_s
        wanted = max(wanted_s, before)
        started = max(started_s, wanted)
        own = {"wait": wanted - before, "input": started - wanted, **parts}
        own["other"] = now_s - before - sum(own.values())
        for name, seconds in own.items():
            self._seconds[name] += seconds
        self._computed_s = now_s
        return own

    def take(self) -> dict[str, float]:
        """Returns the seconds by part, and begins anew."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return dict(seconds)


@final
class LoopReports:
    """Gathers the steps of one loop and makes reports of them.

    The last ones are kept: what was on its way when the watcher was lost can be asked
    for again.

    Args:
      clock: dates steps, in seconds since the loop began.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = self.reported_at = clock.now()
        self._rows: list[_Row] = []
        self._number = 0
        self._sent: deque[tuple[pb.LoopReport, list[_Row]]] = deque(maxlen=_KEPT)
        self._reports: asyncio.Queue[Frame | JGError | None] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._state = "stopped"

    def add(self, step: int, fetches: Fetches) -> None:
        """Takes a step that has been computed now."""
        self._rows.append((step, self._clock.now() - self._began, fetches))

    def send(self, header: pb.LoopReport) -> None:
        """Reports the steps since the last report, under ``header``."""
        rows, self._rows = self._rows, []
        self.reported_at = self._clock.now()
        self._number += 1
        header.number = self._number
        header.seconds = self.reported_at - self._began
        self._state = header.state
        self._sent.append((header, rows))
        self._reports.put_nowait(_report(header, rows))

    def tell(self, header: pb.LoopReport) -> None:
        """Reports nothing but ``header``, which nobody asks for again."""
        self._reports.put_nowait(_report(header, ()))

    async def account(self, after: int, timeout_s: float) -> Frame:
        """Waits for the end and returns the reports after number ``after`` as one.

        Those that are not kept any more are left out.

        Raises:
          DeadlineError: a step is still under way.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            raise DeadlineError(
                f"a loop that was told to stop did not end within {timeout_s:g} s; one "
                "of its steps is still under way"
            ) from None
        header, rows = (
            pb.LoopReport(state=self._state, number=self._number),
            list[_Row](),
        )
        for sent, of_it in self._sent:
            if sent.number > after:
                header.done.extend(sent.done)
                header.data_done = sent.data_done
                header.data_position = sent.data_position
                header.dropped.update(sent.dropped)
                header.pieces += sent.pieces
                header.rounds.extend(sent.rounds)
                rows += of_it
                for name, seconds in sent.times.items():
                    header.times[name] += seconds
        return _report(header, rows)

    def end(self, error: JGError | None = None) -> None:
        """Ends the stream of reports, with ``error`` if there is one."""
        self._state = self._state if error is None else "failed"
        self._reports.put_nowait(error)
        self._ended.set()

    async def stream(self) -> AsyncIterator[Frame]:
        """Yields reports as they are sent, to the end.

        Raises:
          JGError: what the loop ended with.
        """
        while (report := await self._reports.get()) is not None:
            if isinstance(report, JGError):
                raise report
            yield report


def _report(header: pb.LoopReport, rows: Sequence[_Row]) -> Frame:
    tensors: list[np.ndarray[Any, Any]] = [
        np.array([row[0] for row in rows], np.int64),
        np.array([row[1] for row in rows], np.float64),
    ]
    if rows:
        columns = zip(*(row[2] for row in rows), strict=True)
        tensors.extend(np.stack(column) for column in columns)
    return frame(loop_report=header, tensors=tensors)
