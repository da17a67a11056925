"""Exit codes of processes in words."""

import signal
from contextlib import suppress
from pathlib import Path
from typing import Final

from jgraph.coordination.liveness.restarts import OVERDUE

COUNTERS: Final = Path("/proc/vmstat")


def memory_kills() -> int:
    """Returns how many processes the kernel killed so far for want of memory.

    On this machine since it started; 0 where nobody says.
    """
    with suppress(OSError, ValueError):
        for line in COUNTERS.read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def how_it_ended(code: int, kills_before: int | None = None) -> str:
    """Returns what an exit code means, as a part of a sentence.

    Args:
      code: as ``subprocess`` gives it: negative for a signal.
      kills_before: ``memory_kills()`` when the process was started; None if unknown.

    Example:
      >>> how_it_ended(1), how_it_ended(-15)
      ('exit code 1', 'SIGTERM')
    """
    killed = code == -signal.SIGKILL
    if killed and kills_before is not None and memory_kills() > kills_before:
        return (
            "SIGKILL by the kernel: this machine had no memory left. "
            "trainer.plan() shows what each task has to hold; more ps tasks, smaller "
            "batches or fewer tasks on one machine need less"
        )
    if code == OVERDUE:
        return f"exit code {code}: a computation did not end after its step"
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
