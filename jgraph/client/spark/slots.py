"""Slots of a Spark application: how many there are, and how many servers hold.

A server keeps its slot as long as its cluster is there. A job that finds none left
would wait for as long, and say nothing.
"""

import re
import threading
from collections import Counter
from contextlib import suppress
from typing import Any, Final

from jgraph.errors import ConfigError

_LOCAL: Final = re.compile(r"local(\[.*\])?")
_LOCK: Final = threading.Lock()
_HELD: Final[Counter[str]] = Counter()
"""Slots that servers of this process hold, by application."""


def slots_of(context: Any) -> int | None:
    """Returns how many tasks Spark can run at once now; None: it does not say."""
    from py4j.protocol import Py4JError

    with suppress(Py4JError, OSError, AttributeError):
        java = context._jsc.sc()  # noqa: SLF001  # nothing public says it
        profile = java.resourceProfileManager().defaultResourceProfile()
        return int(java.maxNumConcurrentTasks(profile))
    return None


def is_local(master: str) -> bool:
    """Whether the driver's JVM runs all tasks, as in ``local[4]``."""
    return _LOCAL.fullmatch(master) is not None


def hold(application: str, count: int) -> None:
    """Notes that servers hold so many slots more; or fewer, if it is negative."""
    with _LOCK:
        _HELD[application] += count


def held_slots(application: str) -> int:
    """Returns how many slots servers of this process hold."""
    return _HELD[application]


def check_slot(session: Any, what: str) -> None:
    """Refuses a job that would wait for the end of a cluster.

    Args:
      session: whose application runs it.
      what: asks for the job.

    Raises:
      ConfigError: servers hold all slots.
    """
    context = getattr(session, "_sc", None)  # none of Spark Connect
    if context is None or context._jsc is None:  # noqa: SLF001  # it was stopped
        return
    if not (held := held_slots(context.applicationId)):
        return
    slots = slots_of(context)
    if slots is not None and slots <= held:
        raise ConfigError(
            f"{what} needs a slot of Spark for its job, and servers of "
            f"jg.SparkCluster hold all {slots}: write the data before the cluster is "
            "made, score with an exported model after it was closed, or leave a slot"
        )
