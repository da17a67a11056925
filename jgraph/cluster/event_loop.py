"""Event loop of the process: one asyncio thread for all its servers and clients.

gRPC's asyncio objects belong to the loop they are made in, so a process has one loop;
the blocking API (sessions, clusters) waits for coroutines that run there.
"""

import asyncio
import atexit
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from jgraph.cluster.wait_message import QUIET_S, show_wait

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None


def event_loop() -> asyncio.AbstractEventLoop:
    """Returns the process's loop, starting its thread on first use."""
    global _loop, _thread  # noqa: PLW0603  # one per process is the point
    with _lock:
        if _loop is None:
            _loop = new_loop()
            _thread = threading.Thread(
                target=_loop.run_forever, name="jgraph-loop", daemon=True
            )
            _thread.start()
        return _loop


@atexit.register  # when this module is loaded: after whatever may still need the loop
def _hold_still() -> None:
    """Lets the loop's thread wait for the end of the process.

    uvloop calls Python when a timer is due, which is a crash between the end of Python
    and that of its process. Ending the loop instead would tell of every task of it.
    """
    if _loop is None or _thread is None or not _thread.is_alive():
        return  # it is not in a forked child
    held = threading.Event()

    def hold() -> None:
        held.set()
        threading.Event().wait()  # nothing of Python runs any more

    _loop.call_soon_threadsafe(hold)
    held.wait(1.0)


def new_loop() -> asyncio.AbstractEventLoop:
    """Returns a loop of the kind that serves a process; nothing runs it yet."""
    try:
        import uvloop  # a message costs a quarter less with it
    except ImportError:  # there is none for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def start(coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Runs a coroutine on the loop, and does not wait."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop())


def run(coroutine: Coroutine[Any, Any, T], what: str = "waiting for the cluster") -> T:
    """Runs a coroutine on the loop and waits for its result.

    The coroutine keeps its own deadline. An interrupt (Ctrl-C, a stopped notebook
    cell) cancels it and is raised here.

    Args:
      coroutine: what to run.
      what: is shown while that takes long.
    """
    future = start(coroutine)
    try:
        try:
            return future.result(QUIET_S)
        except TimeoutError:  # of this wait, or the coroutine's own
            if future.done():
                return future.result()
        with show_wait(what):
            return future.result()
    except BaseException:
        if not future.done():
            future.cancel()
            concurrent.futures.wait([future], timeout=5)
        raise
