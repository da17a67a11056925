"""Timer that lets a halted loop go on when nobody tells it to."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import final

_LOG = logging.getLogger("jgraph.loops")


@final
class HaltTimer:
    """Ends the halts of one loop.

    Args:
      loop: its name.
      go_on: called with the number of a halt that took too long; returns whether the
        loop stood still until then.
    """

    def __init__(self, loop: str, go_on: Callable[[int], bool]) -> None:
        self._loop = loop
        self._go_on = go_on
        self._timer: asyncio.TimerHandle | None = None
        self._number = 0

    def begin(self, number: int, limit_s: float) -> None:
        """Waits for the end of a halt, for so long."""
        self.end()
        self._number = number
        over = partial(self._is_over, number, limit_s)
        self._timer = asyncio.get_running_loop().call_later(limit_s, over)

    def end(self, number: int | None = None) -> None:
        """Waits no more for the end of this halt; None: of any."""
        if self._timer is not None and number in (None, self._number):
            self._timer.cancel()
            self._timer = None

    def _is_over(self, number: int, limit_s: float) -> None:
        if self._go_on(number):
            _LOG.warning(
                "%s was halted while its run is saved, and goes on after %g s: no word "
                "came that the run is saved",
                *(self._loop, limit_s),
            )
