"""Says what this process waits for, once that takes longer than people wait quietly.

Only in the main thread, and only where somebody looks: in a notebook's cell, or a
terminal. Imports no JAX.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from html import escape
from typing import Any, Final, final

from jgraph.clock import SystemClock

QUIET_S: Final = 1.0
"""Nobody wonders for so long."""

_EVERY_S: Final = 1.0

Show = Callable[[str], None]
"""Shows a text in place of the one before; an empty one takes it away."""

_is_said: ContextVar[bool] = ContextVar("jgraph_is_said", default=False)


@contextmanager
def saying(what: str, show: Show | None = None) -> Iterator[None]:
    """Shows ``what`` and the seconds, every second from the first one on.

    Args:
      what: this process waits for; what is inside is not said besides.
      show: where to; where the user looks if unset.

    Example:
      >>> with saying("starting 2 tasks", print):
      ...     pass  # nothing: it took no time
    """
    show = show or _place()
    if show is None or _is_said.get():
        yield
        return
    token, over = _is_said.set(True), threading.Event()
    teller = threading.Thread(
        target=_tell, args=(what, show, over), name="jgraph-patience", daemon=True
    )
    teller.start()
    try:
        yield
    finally:
        _is_said.reset(token)
        over.set()
        teller.join()


@contextmanager
def unsaid() -> Iterator[None]:
    """Says nothing inside: something else is shown, or nothing is wanted."""
    token = _is_said.set(True)
    try:
        yield
    finally:
        _is_said.reset(token)


def _tell(what: str, show: Show, over: threading.Event) -> None:
    clock = SystemClock()
    began, is_shown = clock.now(), False
    while not over.wait(_EVERY_S if is_shown else QUIET_S):
        is_shown = True
        show(f"{what} … {clock.now() - began:.0f} s")
    if is_shown:
        show("")


def _place() -> Show | None:
    if threading.current_thread() is not threading.main_thread():
        return None
    shell = sys.modules.get("IPython")
    if shell is not None and hasattr(shell.get_ipython(), "kernel"):
        return _Cell()
    return _Terminal() if sys.stderr.isatty() else None


@final
class _Cell:
    """A line of the running cell."""

    def __init__(self) -> None:
        self._handle: Any = None

    def __call__(self, text: str) -> None:
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

    def __call__(self, text: str) -> None:
        from rich.console import Console
        from rich.status import Status

        if self._status is None:
            self._status = Status(text, console=Console(stderr=True))
        if text:
            self._status.update(text)
            self._status.start()
        else:
            self._status.stop()
