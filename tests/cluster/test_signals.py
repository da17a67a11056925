"""A signal that nothing wakes the main thread for."""

import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from jgraph.cluster.signals import wait_signalled


@pytest.fixture
def signalled() -> Iterator[threading.Event]:
    """Is set by SIGUSR1."""
    event = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: event.set())
    yield event
    signal.signal(signal.SIGUSR1, before)


def waited_for(frame: FrameType | None) -> object:
    """The event that a thread in this frame waits for, if it waits for one."""
    if frame is None or frame.f_code.co_name != "wait" or frame.f_back is None:
        return None
    return frame.f_back.f_locals.get("self")  # of Event.wait


def test_a_signal_that_another_thread_gets_ends_the_wait_of_the_main_thread(
    signalled: threading.Event,
) -> None:
    main = threading.get_ident()

    def send() -> None:
        while waited_for(sys._current_frames()[main]) is not signalled:
            continue
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    sender = threading.Thread(target=send)
    sender.start()
    assert wait_signalled(signalled)
    sender.join()
