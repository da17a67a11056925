"""What must be gone when a test has ended: all that it began."""

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Final

import psutil
import pytest

from jgraph.rpc.sockets.listener import PREFIX

KEPT: Final = {"jgraph-loop": "the event loop that all clients of a process share"}
"""Threads that stay as long as their process, and what for."""
_END_S: Final = 10.0


@contextmanager
def nothing_left(temporary: Path) -> Iterator[None]:
    """Checks that no process, listening socket, thread or temporary file is left.

    Args:
      temporary: a new directory, where temporary files are made meanwhile, also those
        of child processes.
    """
    resource_tracker.ensure_running()  # Python's own: begun once, stays to the end
    children, sockets, threads = _children(), _sockets(), set(threading.enumerate())
    temporary.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        patch.setenv("TMPDIR", str(temporary))
        yield
    assert not psutil.wait_procs(_children() - children, timeout=_END_S)[1]
    assert not _sockets() - sockets
    ours = [t for t in set(threading.enumerate()) - threads if "jgraph-" in t.name]
    ending = [thread for thread in ours if thread.name not in KEPT]
    for thread in ending:
        thread.join(_END_S)
    assert not [thread.name for thread in ending if thread.is_alive()]
    assert not list(temporary.rglob("*"))


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _sockets() -> set[str]:
    """Returns where this process listens, and its ends of sockets of one machine."""
    tcp = psutil.Process().net_connections("tcp")
    listening = {f"{c.laddr}" for c in tcp if c.status == psutil.CONN_LISTEN}
    unix = [str(c.laddr) for c in psutil.Process().net_connections("unix")]
    return listening | {name for name in unix if name[1:].startswith(PREFIX)}
