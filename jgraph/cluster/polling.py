"""Polling with a deadline, for what shows only by asking for it again."""

import asyncio
import threading
from typing import final

from jgraph.clock import Clock, SystemClock


@final
class Polling:
    """The pauses between the looks for one thing, of which the first comes at once.

    Args:
      every_s: between two looks.
      timeout_s: from now on; a look that began before may be the last.
      clock: measures that.
      stop: no look follows once it is set; from any thread.

    Example:
      >>> polling = Polling(every_s=0.001, timeout_s=60.0)
      >>> looks = iter([False, False, True])
      >>> while not next(looks) and polling.wait():
      ...     print("not yet")
      not yet
      not yet
      >>> Polling(every_s=0.001, timeout_s=0.0).wait()
      False
    """

    def __init__(
        self,
        every_s: float,
        timeout_s: float,
        clock: Clock | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._every_s = every_s
        self._clock = clock or SystemClock()
        self._deadline = self._clock.now() + timeout_s
        self._stop = stop or threading.Event()

    def limit(self, timeout_s: float) -> None:
        """Lets no look begin later than ``timeout_s`` from now."""
        self._deadline = min(self._deadline, self._clock.now() + timeout_s)

    async def again(self) -> bool:
        """Waits until the next look; False, and at once, if it is too late for one."""
        if self._clock.now() >= self._deadline:
            return False
        await asyncio.sleep(self._every_s)
        return True

    def wait(self) -> bool:
        """Does the same in a thread; False also as soon as ``stop`` is set."""
        in_time = self._clock.now() < self._deadline
        return in_time and not self._stop.wait(self._every_s)
