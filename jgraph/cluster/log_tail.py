"""Log tail: the newest log lines of this process, kept in memory for remote readers."""

import functools
import logging
import threading
from collections import deque
from itertools import islice
from typing import Final, final

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""How tasks write their logs."""

_LINES: Final = 1000
_LETTERS: Final = 2000


@final
class NewestLines:
    """Keeps the newest lines, and numbers them from 1 on; from any thread.

    Example:
      >>> kept = NewestLines()
      >>> for text in ("one", "two", "three"):
      ...     kept.add(text)
      >>> kept.after(1, limit=10)
      (3, ['two', 'three'])
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._lines: deque[str] = deque(maxlen=_LINES)

    @property
    def count(self) -> int:
        """The number of the newest line; 0: there is none."""
        with self._lock:
            return self._count

    def add(self, line: str) -> None:
        """Keeps a line."""
        with self._lock:
            self._lines.append(line[:_LETTERS])
            self._count += 1

    def after(self, number: int, limit: int) -> tuple[int, list[str]]:
        """Returns the number of the newest line, and lines after ``number``.

        Args:
          number: of the last line that is known. One that is not there yet is of
            another process: then all lines are news.
          limit: how many of the newest.
        """
        with self._lock:
            new = self._count - (number if number <= self._count else 0)
            count = min(new, limit, len(self._lines))
            first = len(self._lines) - count
            return self._count, list(islice(self._lines, first, None))


@final
class TailHandler(logging.Handler):
    """Keeps the newest lines of a log.

    Attributes:
      lines: these.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FORMAT))
        self.lines = NewestLines()

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a record."""
        self.lines.add(self.format(record))


@functools.cache
def log_tail() -> NewestLines:
    """Returns the log of this process, kept from the first call on."""
    handler = TailHandler()
    logging.getLogger().addHandler(handler)
    return handler.lines
