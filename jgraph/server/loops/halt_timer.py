"""Timer that lets a halted loop go on when nobody tells it to."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, final

_LOG = logging.getLogger("jgraph.loops")


@final
class HaltTimer:
    """Ends the halts of one loop.

    Args:
      loop: its name.
      go_on: called with the number of a halt that took too long.
    """

    def __init__(self, loop: str, go_on: Callable[[int], Any]) -> None:
        self._loop = loop
        self._go_on = go_on
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, number: int, limit_s: float) -> None:
        """Waits for the end of a halt, for so long."""
        self.end()
        over = partial(self._is_over, number, limit_s)
        self._timer = asyncio.get_running_loop().call_later(limit_s, over)

    def end(self) -> None:
        """Waits no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_over(self, number: int, limit_s: float) -> None:
        _LOG.warning(
            "%s was to stand still while its run is saved, and goes on after %g s: "
            "nobody told it that it is",
            *(self._loop, limit_s),
        )
        self._go_on(number)
