"""Board with a journal, for several threads: takes facts, and tells those who wait."""

import math
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

from jgraph.client.watching import trouble_fact
from jgraph.clock import Clock
from jgraph.coordination.watch.board import Board
from jgraph.coordination.watch.facts import Fact
from jgraph.dashboard.journal import JournalReader, JournalWriter

_REPORTS_S: Final = 1.0


@final
class JournaledBoard:
    """Takes facts from the threads that ask a cluster; shows them to the page.

    Args:
      clock: in seconds since 1970.
      journal: where facts are written; None: nowhere.

    Attributes:
      changes: grows with each fact; of reports that come soon after another, not with
        each.

    Raises:
      JournalError: that is another file.
      OSError: it cannot be written.
    """

    def __init__(self, clock: Clock, journal: Path | None = None) -> None:
        self._clock = clock
        self._board = Board()
        self._lock = threading.Lock()
        self._journal = None if journal is None else JournalWriter(journal)
        self._view: dict[str, Any] | None = None
        self._changed_s = -math.inf
        self.changes = 0

    def take(self, fact: Fact) -> None:
        """Takes a fact; a journal that cannot be written is given up, and said so."""
        with self._lock:
            self._board.take(fact)
            self._view = None
            # Reports come in between looks, whose facts have what a report changes.
            if fact["kind"] != "report" or fact["time"] > self._changed_s + _REPORTS_S:
                self.changes, self._changed_s = self.changes + 1, fact["time"]
            if self._journal is None:
                return
            try:
                self._journal.write(fact)
            except OSError as error:
                journal, self._journal = self._journal, None
                what = f"the journal is not written any more: {error.strerror or error}"
                self._board.take(trouble_fact("journal", what, self._clock.now()))
                with suppress(OSError):  # the rest of it, again
                    journal.close()

    def view(self) -> dict[str, Any]:
        """Returns what there is to see; the caller changes nothing in it."""
        with self._lock:
            if self._view is None:
                self._view = self._board.view()
            return self._view

    def curves(self) -> dict[str, Any]:
        """Returns all series."""
        with self._lock:
            return self._board.curves()

    def close(self) -> None:
        """Ends the journal."""
        with self._lock:
            if self._journal is not None:
                self._journal.close()


@final
class ReplayedBoard:
    """A board of the past, at any time of a journal.

    Args:
      path: of the journal.

    Attributes:
      first: time of the first fact, in seconds since 1970.
      last: of the last one.
      skipped: lines that are no facts.

    Raises:
      JournalError: it is no journal.
    """

    def __init__(self, path: Path) -> None:
        self._reader = JournalReader(path)
        self._lock = threading.Lock()
        times = [fact["time"] for fact in self._reader]
        self.first, self.last = min(times, default=0.0), max(times, default=0.0)
        self.skipped = self._reader.skipped
        self._at = -1.0
        self._board = Board()
        self._facts = iter(self._reader)
        self._next: Fact | None = None

    def at(self, time: float | None = None) -> Board:
        """Returns the board of a time; of the end if none is given."""
        until = self.last if time is None else time
        with self._lock:
            if until < self._at:
                self._board, self._facts = Board(), iter(self._reader)
                self._next = None
            self._at = until
            fact = self._next or next(self._facts, None)
            while fact is not None and fact["time"] <= until:
                self._board.take(fact)
                fact = next(self._facts, None)
            self._next = fact
            return self._board
