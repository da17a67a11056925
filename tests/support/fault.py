"""One fault of a cluster: what the logs must say of it, and after how many seconds."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from jgraph.clock import SystemClock
from jgraph.launch.local.cluster import LocalCluster
from tests.support.stopping import once


class Fault:
    """One fault: its cluster, what it is called in the log, and how long it may take.

    Attributes:
      names: texts that the logs of client and tasks must have.
      is_noticed: a log must name it; else none may say that a task was lost.
      path: for checkpoints.
      records: for what tasks log of their updates.
    """

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.names: list[str] = []
        self.is_noticed = True
        self.path = path / "checkpoints"
        self.logs = path / "logs"
        self.records = path / "records"
        self._said = stack.enter_context(_saying())
        self._began = 0, Stopwatch()
        self._stack = stack

    def cluster(self, **options: Any) -> LocalCluster:
        """Starts a cluster, which ends with the test."""
        self.logs.mkdir(exist_ok=True)
        cluster = LocalCluster(log_dir=self.logs, **options)
        return self._stack.enter_context(cluster)

    def begins(self) -> None:
        """Takes note that it happens, or ends, at this moment."""
        self._began = len(self._said), Stopwatch()

    def stop_after(self, *texts: str, steps: int = 100) -> Any:
        """Returns a callback that stops a run as it has gone on after these lines.

        A run with a number of steps may be over before a fault is known.
        """

        def are_said(run: Any) -> bool:
            said = [line for line, _ in self._said]
            return all(any(text in line for line in said) for text in texts)

        return once(are_said, steps)

    def seconds_until(self, *texts: str) -> float:
        """Returns how long after it began this process logged one of these texts."""
        return self._first(*texts) - self._began[1].began

    def seconds_between(self, earlier: str, later: str) -> float:
        """Returns the time from one line of this process to another since then."""
        return self._first(later) - self._first(earlier)

    def _first(self, *texts: str) -> float:
        since = self._said[self._began[0] :]
        found = [when for line, when in since if any(text in line for text in texts)]
        assert found, f"nobody said {texts}: {since}"
        return found[0]


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self.began = self._clock.now()

    @property
    def seconds(self) -> float:
        return self._clock.now() - self.began


@contextmanager
def _saying() -> Iterator[list[tuple[str, float]]]:
    """Gives the lines that this process logs, and when."""
    said, clock = list[tuple[str, float]](), SystemClock()
    handler, logger = logging.Handler(), logging.getLogger("jgraph")
    handler.emit = lambda record: said.append(  # type: ignore[method-assign]
        (record.getMessage(), clock.now())
    )
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
