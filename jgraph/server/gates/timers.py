"""Timers that gates set: of the event loop, or of whoever stands in for it."""

from collections.abc import Callable
from typing import Protocol, TypeAlias


class Timer(Protocol):
    """What waits for its time, as a ``TimerHandle`` of asyncio."""

    def cancel(self) -> None:
        """Ends it."""


CallLater: TypeAlias = Callable[[float, Callable[[], None]], Timer]
"""Calls back after so many seconds."""
