"""Retries with exponential backoff of calls that a busy task refused."""

import itertools
import secrets
import threading
from collections.abc import Callable
from typing import Final

from jgraph.clock import SystemClock
from jgraph.errors import ClusterBusyError
from jgraph.rpc.transport import Frame

_RANDOM: Final = secrets.SystemRandom()


def retry_while_busy(
    ask: Callable[[float], Frame], method: str, timeout_s: float, begin_s: float
) -> Frame:
    """Calls a method until the task takes the call in.

    Args:
      ask: calls it, within so many seconds.
      method: its name.
      timeout_s: limit for all tries together.
      begin_s: a try may begin until then.

    Raises:
      ClusterBusyError: the task took it in none of that time; or it did, and something
        that it does has to wait.
      JGError: as ``ask``.
    """
    clock, pausing = SystemClock(), threading.Event()
    start_s = clock.now()
    for tries in itertools.count(1):
        try:
            return ask(timeout_s - (clock.now() - start_s))
        except ClusterBusyError as error:
            seconds = backoff_s(tries, _RANDOM.random())
            # Nothing of the call was done only where itself was refused.
            mine = error.details.get("refused") == method
            if not mine or clock.now() - start_s + seconds > begin_s:
                raise
        pausing.wait(seconds)
    raise AssertionError("counting does not end")


FIRST_S: Final = 0.02
LONGEST_S: Final = 2.0


def backoff_s(tries: int, jitter: float) -> float:
    """Returns seconds: twice as many after each try, and other ones for everybody.

    Who was refused together would else come back together (Brooker, "Exponential
    Backoff and Jitter", AWS Architecture Blog, 2015).

    Args:
      tries: how often it was refused.
      jitter: a random number from 0 to 1.

    Example:
      >>> [backoff_s(tries, jitter=1.0) for tries in (1, 2, 3, 100)]
      [0.02, 0.04, 0.08, 2.0]
      >>> backoff_s(3, jitter=0.0)
      0.04
    """
    longest = min(FIRST_S * 2.0 ** min(tries - 1, 30), LONGEST_S)
    return longest * (1 + jitter) / 2
