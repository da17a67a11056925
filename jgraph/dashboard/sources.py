"""Sources of a dashboard: a cluster that is asked, or a journal of one."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from jgraph import __version__
from jgraph.client.inspect import ClusterInspector
from jgraph.clock import WallClock
from jgraph.coordination.watch.facts import clean
from jgraph.dashboard.journaled_board import JournaledBoard, ReplayedBoard
from jgraph.dashboard.model_poll import ModelPoller
from jgraph.dashboard.poll import Poller
from jgraph.dashboard.timeline_view import timeline_view
from jgraph.errors import HttpRequestError

_LOOK_BACK_S = 10.0


@final
class LiveSource:
    """A cluster, as it is now.

    Args:
      visit: asks it.
      target: its address.
      journal: where all that it tells is written; None: nowhere.
      every_s: between two looks.
      models: addresses of model servers that are watched as well.
      models_token: that these want to see.

    Raises:
      AddressError: an address is none.
      JournalError: that is another file.
      OSError: it cannot be written.
    """

    def __init__(
        self,
        visit: ClusterInspector,
        target: str,
        journal: Path | None = None,
        every_s: float = 1.0,
        models: Sequence[str] = (),
        models_token: str = "",
    ) -> None:
        clock = WallClock()
        self.board = JournaledBoard(clock, journal)
        self.poller = Poller(visit, self.board.take, clock, every_s)
        self._models = ModelPoller(
            models, models_token, self.board.take, clock, every_s
        )
        self._visit = visit
        self._target = target
        self._journal = journal

    def start(self) -> None:
        """Begins to ask."""
        self.poller.start()
        self._models.start()

    @property
    def changes(self) -> int:
        """Grows with each fact."""
        return self.board.changes

    def config(self) -> Mapping[str, Any]:
        """Returns what it is."""
        journal = None if self._journal is None else str(self._journal)
        plain = {"address": self._target, "journal": journal}
        return {"kind": "live", "jgraph": __version__, **plain}

    def is_ready(self) -> bool:
        """Whether the cluster has answered."""
        return self.poller.first_answer.is_set()

    def view(self, at: float | None) -> Mapping[str, Any]:
        """Returns the view of now."""
        return self.board.view()

    def curves(self, at: float | None) -> Mapping[str, Any]:
        """Returns the series."""
        return self.board.curves()

    def timeline(self) -> Mapping[str, Any]:
        """Returns the last steps, and what steps wait for.

        Raises:
          JGError: no task answers.
        """
        trace, _ = self._visit.trace(None, _LOOK_BACK_S)
        return clean(timeline_view(trace))  # type: ignore[no-any-return]  # as it was

    def trace(self, last_s: float) -> bytes:
        """Returns what tasks did in the last seconds, as Perfetto takes it.

        Raises:
          JGError: no task answers.
        """
        trace, _ = self._visit.trace(None, last_s)
        return trace.to_perfetto()

    def log(self, task: str, after: int, lines: int) -> tuple[int, list[str]]:
        """Returns lines of a task's log, and the number of the last.

        Raises:
          JGError: it does not answer.
        """
        address = self.board.view()["tasks"][task]["address"]
        return self._visit.lines(address, after, lines)

    def close(self) -> None:
        """Asks no more."""
        self.poller.stop()
        self._models.stop()
        self.board.close()


@final
class ReplaySource:
    """A cluster of the past.

    Args:
      path: of the journal.
      at: the time that is shown first; None: the end.

    Raises:
      JournalError: it is no journal.
    """

    changes = 0

    def __init__(self, path: Path, at: float | None = None) -> None:
        self._path = path
        self._board = ReplayedBoard(path)
        self._first_at = at
        self._lock = threading.Lock()

    def config(self) -> Mapping[str, Any]:
        """Returns what it is."""
        return {
            "kind": "replay",
            "jgraph": __version__,
            "journal": str(self._path),
            "first": self._board.first,
            "last": self._board.last,
            "at": self._board.last if self._first_at is None else self._first_at,
            "skipped": self._board.skipped,
        }

    def is_ready(self) -> bool:
        """Whether there is something to see: always."""
        return True

    def view(self, at: float | None) -> Mapping[str, Any]:
        """Returns the view of a time."""
        with self._lock:
            return self._board.at(self._first_at if at is None else at).view()

    def curves(self, at: float | None) -> Mapping[str, Any]:
        """Returns the series until a time."""
        with self._lock:
            return self._board.at(self._first_at if at is None else at).curves()

    def timeline(self) -> Mapping[str, Any]:
        """Refuses: a journal has no timeline.

        Raises:
          HttpRequestError: always.
        """
        raise HttpRequestError("a journal has the facts of tasks and no timeline")

    def trace(self, last_s: float) -> bytes:
        """Refuses, as ``timeline``.

        Raises:
          HttpRequestError: always.
        """
        raise HttpRequestError("a journal has the facts of tasks and no timeline")

    def log(self, task: str, after: int, lines: int) -> tuple[int, list[str]]:
        """Refuses: a journal has no logs.

        Raises:
          HttpRequestError: always.
        """
        raise HttpRequestError("a journal has the facts of tasks and not their logs")
