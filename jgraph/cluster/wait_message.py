"""Wait message: shows what a slow call waits for, and for how many seconds.

Only in the main thread: in a cell of a notebook, in a line of a terminal that is
redrawn, or else in lines on the standard error. Imports no JAX.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from html import escape
from typing import Any, Final, TypeAlias, final

from jgraph.clock import SystemClock

QUIET_S: Final = 1.0
"""Nobody wonders for so long."""

_EVERY_S: Final = 1.0

# Lines stay: they are fewer, and fewer still in a long wait.
_LINE_QUIET_S: Final = 2.0
_LINE_EVERY_S: Final = 5.0
_LINE_SHARE: Final = 0.5

Show: TypeAlias = Callable[[str], None]
"""Shows a text in place of the one before; an empty one takes it away."""

What: TypeAlias = str | Callable[[], str]
"""A text, or what returns the text of now."""

_is_said: ContextVar[bool] = ContextVar("jgraph_is_said", default=False)


@final
class WaitMessage:
    """A thread that shows what is waited for and the seconds, until it is ended.

    Args:
      what: is waited for.
      show: where to.
      lines: what is shown stays: the first line comes after two seconds, the others
        every five, and later when half as much time has passed again.
    """

    def __init__(self, what: What, show: Show, *, lines: bool) -> None:
        self._what = what
        self._show = show
        self._lines = lines
        self._end = threading.Event()
        self._thread = threading.Thread(
            target=self._tell, name="jgraph-wait-message", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Takes away what is shown, and returns when nothing more is shown."""
        self._end.set()
        self._thread.join()

    def _tell(self) -> None:
        clock = SystemClock()
        began, is_shown = clock.now(), False
        while not self._end.wait(self._pause_s(clock.now() - began, is_shown)):
            is_shown = True
            what = self._what if isinstance(self._what, str) else self._what()
            self._show(f"{what} … {clock.now() - began:.0f} s")
        if is_shown and not self._lines:
            self._show("")

    def _pause_s(self, waited_s: float, is_shown: bool) -> float:
        if self._lines:
            later = max(_LINE_EVERY_S, _LINE_SHARE * waited_s)
            return later if is_shown else _LINE_QUIET_S
        return _EVERY_S if is_shown else QUIET_S


@contextmanager
def show_wait(what: What, show: Show | None = None) -> Iterator[None]:
    """Shows ``what`` and the seconds, every second from the first one on.

    Where nothing can be redrawn these are lines, of which the first comes after two
    seconds, and the others every few.

    Args:
      what: this process waits for; what is inside is not said besides.
      show: where to; where the user looks if unset.

    Example:
      >>> with show_wait("starting 2 tasks", print):
      ...     pass  # nothing: it took no time
    """
    show = show or _place()
    if show is None or _is_said.get():
        yield
        return
    token = _is_said.set(True)
    telling = WaitMessage(what, show, lines=show is _line)
    try:
        yield
    finally:
        _is_said.reset(token)
        telling.end()


@contextmanager
def hide_wait() -> Iterator[None]:
    """Says nothing inside: something else is shown, or nothing is wanted."""
    token = _is_said.set(True)
    try:
        yield
    finally:
        _is_said.reset(token)


def _place() -> Show | None:
    if threading.current_thread() is not threading.main_thread():
        return None
    shell = sys.modules.get("IPython")
    if shell is not None and hasattr(shell.get_ipython(), "kernel"):
        return _Cell().show
    return _Terminal().show if sys.stderr.isatty() else _line


def _line(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@final
class _Cell:
    """A line of the running cell."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        """See ``Show``."""
        from IPython.display import HTML, DisplayHandle

        line: Any = HTML(f"<i>{escape(text)}</i>" if text else "")  # type: ignore[no-untyped-call]
        if self._handle is None:
            self._handle = DisplayHandle()  # type: ignore[no-untyped-call]
            self._handle.display(line)
        else:
            self._handle.update(line)


@final
class _Terminal:
    """A line of the terminal, beside what the program writes to a file."""

    def __init__(self) -> None:
        self._status: Any = None

    def show(self, text: str) -> None:
        """See ``Show``."""
        from rich.console import Console
        from rich.status import Status

        if self._status is None:
            self._status = Status(text, console=Console(stderr=True))
        if text:
            self._status.update(text)
            self._status.start()
        else:
            self._status.stop()
