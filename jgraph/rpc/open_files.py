"""Limit on open files (``ulimit -n``), and a warning before none is left."""

import asyncio
import errno
import logging
import os
import sys
from typing import Final, final

if sys.platform != "win32":
    import resource

LOOK_EVERY_S: Final = 5.0
_SAY_EVERY_S: Final = 60.0
_PLENTY: Final = 1 << 16
_logger = logging.getLogger(__name__)


def file_limit() -> int:
    """Returns how many files this process may have open."""
    return _limits()[0]


def _limits() -> tuple[int, int]:
    """Returns the soft limit and the hard one."""
    if sys.platform == "win32":
        return _PLENTY, _PLENTY
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    no = resource.RLIM_INFINITY
    return _PLENTY if soft == no else soft, _PLENTY if hard == no else hard


def files_open() -> int:
    """Returns how many files are open, or fewer: those before the first free number.

    Of a system that has no more files for anybody, or does not tell, that is 0.

    Example:
      >>> 0 < files_open() <= file_limit()
      True
    """
    try:
        free = os.open(os.devnull, os.O_RDONLY)
    except OSError as error:  # whoever serves goes on, whatever the system says
        return file_limit() if error.errno == errno.EMFILE else 0
    os.close(free)
    return free


@final
class FileWatch:
    """Says that half of the files are open: once a minute at most."""

    def __init__(self) -> None:
        self._said_s: float | None = None

    def look(self, now: float) -> None:
        """Says so if it is time."""
        if self._said_s is not None and now - self._said_s < _SAY_EVERY_S:
            return
        count, limit = files_open(), file_limit()
        if 2 * count < limit:
            return
        self._said_s = now
        _logger.warning(
            "%d of the %d files that this process may open are open, and connections "
            "are refused when none is left; %s before you start it.",
            count,
            limit,
            _more(),
        )


def _more() -> str:
    """Returns what to type for more files."""
    most = min(_limits()[1], _PLENTY)
    if most > file_limit():
        return f"type 'ulimit -n {most}'"
    return f"type 'ulimit -n {4 * file_limit()}' as root"


_watch = FileWatch()
"""Files are of the process, and so is what was said of them."""


async def watch_files() -> None:
    """Looks now and then whether files run low; until it is cancelled."""
    now = asyncio.get_running_loop().time
    while True:
        _watch.look(now())
        await asyncio.sleep(LOOK_EVERY_S)
