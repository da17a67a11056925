"""The event loop of this process: one thread that all servers and clients share.

gRPC's asyncio objects belong to the loop they are made in, so a process has one loop;
the blocking API (sessions, clusters) waits for coroutines that run there.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from jgraph.cluster.patience import QUIET_S, saying

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def event_loop() -> asyncio.AbstractEventLoop:
    """Returns the process's loop, starting its thread on first use."""
    global _loop  # noqa: PLW0603  # one per process is the point
    with _lock:
        if _loop is None:
            _loop = new_loop()
            threading.Thread(
                target=_loop.run_forever, name="jgraph-loop", daemon=True
            ).start()
        return _loop


def new_loop() -> asyncio.AbstractEventLoop:
    """Returns a loop of the kind that serves a process; nothing runs it yet."""
    try:
        import uvloop  # a message costs a quarter less with it
    except ImportError:  # there is none for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on the loop and waits for its result.

    The coroutine keeps its own deadline. An interrupt (Ctrl-C, a stopped notebook
    cell) cancels it and is raised here.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, event_loop())
    try:
        try:
            return future.result(QUIET_S)
        except TimeoutError:  # of this wait, or the coroutine's own
            if future.done():
                return future.result()
        with saying("waiting for the cluster"):
            return future.result()
    except BaseException:
        if not future.done():
            future.cancel()
            concurrent.futures.wait([future], timeout=5)
        raise
