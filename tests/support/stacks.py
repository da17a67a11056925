"""Stacks of all threads, told before a test is ended that takes too long.

``faulthandler_timeout`` of pytest does that too, but reads the stacks while threads run
on: with some that were busy, Python 3.11 crashed at one of twenty to sixty such looks.
"""

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

_SHARE = 0.9
"""Of the time that a test has, after which it is late."""


def stacks() -> str:
    """Returns where each thread of this process is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
    )


@contextmanager
def told_when_late(test: str, limit_s: float, fd: int) -> Iterator[None]:
    """Writes the stacks to a file if what is done takes nearly as long as it may."""
    after_s = _SHARE * limit_s

    def tell() -> None:
        text = f"\n{test} has taken {after_s:g} s of its {limit_s:g} s\n{stacks()}"
        os.write(fd, text.encode(errors="replace"))

    timer = threading.Timer(after_s, tell)
    timer.name, timer.daemon = "late test", True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
