"""The thread of the event loop, when its process ends."""

import ctypes
import subprocess
import sys

import pytest

# A timer is due after the end of Python, while its process still has to end.
ENDING = """
import ctypes, sys, threading
from jgraph.cluster.event_loop import event_loop

armed = threading.Event()

def arm() -> None:
    event_loop().call_later(0.5, print)
    armed.set()

event_loop().call_soon_threadsafe(arm)
assert armed.wait(10)
threading.Event().wait(0.1)  # the loop has nothing else to do
libc = ctypes.CDLL(None)
libc.on_exit(libc.sleep, None)  # as many seconds as the exit code says
sys.exit(1)
"""


@pytest.mark.procs
@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "on_exit"), reason="the C library has no on_exit"
)
def test_a_timer_that_is_due_at_the_end_of_the_process_does_not_crash_it() -> None:
    command = [sys.executable, "-c", ENDING]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (1, "")
