"""Tasks of local clusters by a fork of a process that has loaded what they need.

See ``warm_parent``. A task is a process of its own as any, and a child of the process
of the test. What it does not show is that a process can be started: tests of that, and
of what the kernel tells of a start, begin tasks under ``new_processes``, and so do
nightly tests and those of ``make chaos``.
"""

import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import Any, Final, final

import pytest

from tests.support.warm_parent import SIZE

TASK: Final = "jgraph.launch.local.child"
LOADED: Final = ("jgraph.server.main", "jgraph.server.members.joining", "jax.export")
NEW: Final = "JGRAPH_TESTS_NEW_PROCESSES"
"""A variable: with it each task is a process that loads all by itself."""
_FREE: Final = ("JGRAPH_", "PYTEST_", "TMPDIR")
"""Variables that are read when they are needed, not when something is loaded."""
_PR_SET_CHILD_SUBREAPER: Final = 36
WARM: Final[dict[str, "WarmParent"]] = {}
"""The one of this process, if it has one."""


def _read_on_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if not k.startswith(_FREE)}


@final
class WarmParent:
    """The process that becomes tasks, begun with the first of them.

    Args:
      environment: of the tests.
      folder: where they run.
    """

    def __init__(self, environment: Mapping[str, str], folder: Path) -> None:
        self.pid: int | None = None
        """Its process id, once it has begun."""
        self._environment, self._folder = dict(environment), folder
        self._orders: socket.socket | None = None
        self._lock = threading.Lock()

    def can_become(self, command: Sequence[object], environment: object) -> bool:
        """Whether a fork is what this command would be."""
        return (
            list(command[:3]) == [sys.executable, "-m", TASK]
            and isinstance(environment, Mapping)
            and _read_on_start(environment) == _read_on_start(self._environment)
        )

    def become(self, order: Mapping[str, object], files: Sequence[int]) -> int:
        """Returns the process id of a new child of this process."""
        with self._lock:
            if self._orders is None:
                self._orders = self._begin()
            text = dumps(order).encode()
            with _heir_of_orphans():
                socket.send_fds(self._orders, [SIZE.pack(len(text))], files)
                self._orders.sendall(text)
                answer = self._orders.recv(SIZE.size + 1, socket.MSG_WAITALL)
        pid: int = SIZE.unpack(answer[:-1])[0]
        return pid

    def _begin(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.support.warm_parent"]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), *LOADED],
                stdin=subprocess.DEVNULL,
                # Threads of a library that computes would not come along.
                env={**self._environment, "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                cwd=self._folder,
                start_new_session=True,
            )
        self.pid = self._process.pid  # it ends when nobody is there to give it orders
        return ours


@contextmanager
def _heir_of_orphans() -> Iterator[None]:
    """Makes what a child leaves at its end a child of this process, for a moment."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@contextmanager
def new_processes() -> Iterator[None]:
    """Lets tasks load all by themselves, as those of users do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NEW, "1")
        yield


def start_tasks_warm(folder: Path) -> None:
    """Has tasks of this process started so, from now on, where the system can.

    Args:
      folder: where the tests run.
    """
    if sys.platform != "linux" or NEW in os.environ:
        return
    warm = WARM.setdefault("parent", WarmParent(os.environ, folder))
    executed = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def execute(popen: Any, command: Any, *facts: Any) -> None:
        # As CPython 3.11 to 3.14 have them.
        _, _, _, pass_fds, folder, environment = facts[:6]
        ends, session = facts[9:15], facts[-2]
        alone = isinstance(command, list) and not pass_fds and NEW not in os.environ
        if not (alone and warm.can_become(command, environment)):
            executed(popen, command, *facts)
            return
        order = {
            "module": command[2],
            "arguments": command[3:],
            "environment": dict(environment),
            "folder": str(folder or os.getcwd()),
            "session": session,
        }
        given = (ends[0], ends[3], ends[5])
        files = [n if n != -1 else number for number, n in enumerate(given)]
        popen.pid = warm.become(order, files)
        popen._child_created = True
        popen._close_pipe_fds(*ends)

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]
