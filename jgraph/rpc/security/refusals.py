"""Log of refusals: one line a minute at most, with how many there were."""

import asyncio
import logging
from typing import Final, final

_EVERY_S: Final = 60.0


@final
class RefusalLog:
    """Says now and then that callers were refused, however many try.

    Args:
      logger: gets the lines.
      text: of a line; its last place is for the number of refusals so far.
      level: of the lines.

    Example:
      >>> async def main():
      ...     log = RefusalLog(logging.getLogger("of nobody"), "Refused %s; %d so far.")
      ...     log.add("a caller")
      >>> asyncio.run(main())
    """

    def __init__(
        self, logger: logging.Logger, text: str, level: int = logging.WARNING
    ) -> None:
        self._logger = logger
        self._text = text
        self._level = level
        self._refused = 0
        self._said_s = -_EVERY_S

    def add(self, *what: object) -> None:
        """Counts a refusal, and says so if that was not said within a minute."""
        self._refused += 1
        now = asyncio.get_running_loop().time()
        if now - self._said_s >= _EVERY_S:
            self._said_s = now
            self._logger.log(self._level, self._text, *what, self._refused)
