"""What a loop tells its watcher: rows of steps, gathered and sent as reports."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, final

import numpy as np

from jgraph.clock import Clock
from jgraph.cluster.driver import Fetches
from jgraph.errors import JGError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.transport import Frame


@final
class LoopReports:
    """Gathers the steps of one loop and makes reports of them.

    Args:
      clock: dates steps, in seconds since the loop began.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = self.reported_at = clock.now()
        self._rows: list[tuple[int, float, Fetches]] = []
        self._reports: asyncio.Queue[Frame | JGError | None] = asyncio.Queue()

    def add(self, step: int, fetches: Fetches) -> None:
        """Takes a step that has been computed now."""
        self._rows.append((step, self._clock.now() - self._began, fetches))

    def send(self, header: pb.LoopReport) -> None:
        """Reports the steps since the last report, under ``header``."""
        rows, self._rows = self._rows, []
        self.reported_at = self._clock.now()
        tensors: list[np.ndarray[Any, Any]] = [
            np.array([row[0] for row in rows], np.int64),
            np.array([row[1] for row in rows], np.float64),
        ]
        if rows:
            columns = zip(*(row[2] for row in rows), strict=True)
            tensors.extend(np.stack(column) for column in columns)
            header.steps_done = rows[-1][0] + 1
        header.seconds = self.reported_at - self._began
        self._reports.put_nowait(frame(loop_report=header, tensors=tensors))

    def end(self, error: JGError | None = None) -> None:
        """Ends the stream of reports, with ``error`` if there is one."""
        self._reports.put_nowait(error)

    async def stream(self) -> AsyncIterator[Frame]:
        """Yields reports as they are sent, to the end.

        Raises:
          JGError: what the loop ended with.
        """
        while (report := await self._reports.get()) is not None:
            if isinstance(report, JGError):
                raise report
            yield report
