"""Retries with exponential backoff of calls that a busy task refused."""

import itertools
import secrets
import threading
from collections.abc import Callable
from typing import Final

from jgraph.clock import SystemClock
from jgraph.coordination.backoff import backoff_s
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
    began = clock.now()
    for tries in itertools.count(1):
        try:
            return ask(timeout_s - (clock.now() - began))
        except ClusterBusyError as error:
            seconds = backoff_s(tries, _RANDOM.random())
            # Nothing of the call was done only where itself was refused.
            mine = error.details.get("refused") == method
            if not mine or clock.now() - began + seconds > begin_s:
                raise
        pausing.wait(seconds)
    raise AssertionError("counting does not end")
