"""Interruptible wait in the main thread: signal handlers run while it waits."""

import threading
from typing import Final

_TURN_S: Final = 1.0


def wait_signalled(event: threading.Event, timeout_s: float | None = None) -> bool:
    """Waits for an event, and hears signals meanwhile; in turns of a second.

    Python runs handlers in the main thread, and nothing wakes that up when the signal
    came between the last look for one and the wait, or in another thread of the
    process: then an endless wait is endless, whatever the handler would have done.

    Args:
      event: what is waited for.
      timeout_s: give up after this long; None waits as long as it takes.

    Returns:
      Whether the event is set.

    Example:
      >>> event = threading.Event()
      >>> wait_signalled(event, 0.01)
      False
      >>> event.set()
      >>> wait_signalled(event)
      True
    """
    if timeout_s is not None:
        return event.wait(timeout_s)
    while not event.wait(_TURN_S):
        continue
    return True
