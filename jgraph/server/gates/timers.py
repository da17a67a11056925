"""Timers that gates set: of the event loop, or of whoever stands in for it."""

from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

AGAIN_S: Final = 0.2
"""So long after a link was lost a gate says again what it may have taken along: the
other task may be gone for good."""


class Timer(Protocol):
    """What waits for its time, as a ``TimerHandle`` of asyncio."""

    def cancel(self) -> None:
        """Ends it."""


CallLater: TypeAlias = Callable[[float, Callable[[], None]], Timer]
"""Calls back after so many seconds."""
