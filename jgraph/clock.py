"""Time as an argument: the only file that reads the machine's clock."""

import time
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    """Tells monotonic time in seconds; never goes back."""

    def now(self) -> float:
        """Returns seconds since an arbitrary, fixed moment."""


class SystemClock:
    """The machine's monotonic clock.

    Example:
      >>> clock = SystemClock()
      >>> clock.now() <= clock.now()
      True
    """

    now = staticmethod(time.monotonic)  # no call around it: a step asks many times
    """Returns seconds since an arbitrary, fixed moment."""


class BootClock:
    """Monotonic, and goes on while the machine sleeps, where the system can tell.

    Example:
      >>> clock = BootClock()
      >>> clock.now() <= clock.now()
      True
    """

    def now(self) -> float:
        """Returns seconds since an arbitrary, fixed moment."""
        if hasattr(time, "CLOCK_BOOTTIME"):
            return time.clock_gettime(time.CLOCK_BOOTTIME)
        return time.monotonic()


class WallClock:
    """The time of day in seconds since 1970, for what several hosts compare.

    It may be set back; lengths of time are measured with ``SystemClock``.

    Example:
      >>> WallClock().now() > 1.7e9
      True
    """

    def now(self) -> float:
        """Returns seconds since 1970."""
        return time.time()


def clock_identity() -> str:
    """Returns a name of this machine's monotonic clock; "" where there is none.

    Linux has one such clock for all processes of one boot, but for those in another
    time namespace. Who says the same has the same clock.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/time').stat().st_ino}"
    except OSError:
        return ""
