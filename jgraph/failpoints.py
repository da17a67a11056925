"""Failpoints: named places, around durable effects, where tests break a process.

``failpoint("checkpoint.begun")`` does nothing unless that point is armed: by a test of
the same process (``armed``), or for a whole process by the environment variable
``JGRAPH_FAILPOINTS``. There ``checkpoint.begun=crash@2`` ends the process without any
cleaning up, the second time that it is there; ``raise`` raises an ``OSError``, and
``sleep:0.5`` takes half a second. With
``JGRAPH_FAILPOINTS_ONCE`` only the process crashes that first makes that file, of all
that have the same variables.
"""

import errno
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, NoReturn

from jgraph.errors import ConfigError

VARIABLE: Final = "JGRAPH_FAILPOINTS"
ONCE: Final = "JGRAPH_FAILPOINTS_ONCE"
CRASHED: Final = 86
"""How a process exits that was told to crash."""
POINTS: Final = (
    "lease.file_created",
    "lease.renewing",
    "lease.renewed",
    "lease.released",
    "checkpoint.begun",
    "checkpoint.arrays_written",
    "checkpoint.manifest_written",
    "checkpoint.on_disk",
    "checkpoint.committed",
    "checkpoint.old_put_away",
    "checkpoint.replaced",
    "shard.written",
    "shard.on_disk",
    "prune.begun",
    "prune.renamed",
    "prune.removed",
    "update.computed",
    "update.applied",
    "update.recorded",
    "copy.received",
    "copy.applied",
    "log.begun",
    "log.replaced",
    "log.written",
    "log.on_disk",
    "push.sent",
    "step.received",
    "step.begun",
    "step.done",
    "step.told",
    "gates.opening",
    "gates.opened",
    "loop.asked",
    "order.received",
    "order.accepted",
    "member.invited",
    "member.serves",
    "program.received",
    "rescale.prepared",
    "rescale.ahead",
    "rescale.rested",
    "rescale.copied",
    "rescale.moved",
    "rescale.told",
    "rescale.switched",
    "rescale.retired",
    "stand_in.copied",
    "stand_in.noted",
    "data.dealt",
    "data.answered",
    "sum.keys_made",
    "sum.shares_made",
    "sum.masks_made",
    "sum.asked",
    "sum.unmasked",
    "handed.snapshot_taken",
    "handed.on_disk",
    "handed.committed",
    "handed.prune_begun",
    "handed.prune_renamed",
    "handed.pruned",
    "export.arrays_written",
    "export.manifest_written",
    "export.committed",
)
"""Every point that there is."""

_armed: dict[str, Callable[[], object]] = {}


def failpoint(name: str) -> None:
    """Does what a test has armed this point with; else nothing.

    Example:
      >>> failpoint("checkpoint.begun")
    """
    if _armed and name in _armed:
        _armed[name]()


def is_any_armed() -> bool:
    """Whether a point does something; where that is asked first, it is asked often.

    Example:
      >>> is_any_armed()
      False
    """
    return bool(_armed)


@contextmanager
def armed(name: str, act: Callable[[], object]) -> Iterator[None]:
    """Calls ``act`` at a point until the end of the block.

    Raises:
      ConfigError: there is no such point.

    Example:
      >>> with armed("checkpoint.begun", lambda: print("here")):
      ...     failpoint("checkpoint.begun")
      here
    """
    _check(name)
    _armed[name] = act
    try:
        yield
    finally:
        del _armed[name]


def fail() -> NoReturn:
    """Raises the error of a disk that fails."""
    raise OSError(errno.EIO, "a failpoint")


def arm(text: str) -> None:
    """Arms the points of a value of ``JGRAPH_FAILPOINTS``.

    Raises:
      ConfigError: it names no point, or nothing to do there.
    """
    for one in filter(None, text.split(",")):
        name, _, what = one.partition("=")
        action, _, time = what.partition("@")
        _check(name)
        act = _action(action)
        if act is None or not (time or "1").isdecimal():
            raise ConfigError(
                f"{VARIABLE} has '{one}'; write {name}=crash, {name}=raise, "
                f"{name}=sleep:0.5, or {name}=crash@2 for the second time"
            )
        _armed[name] = _nth(act, int(time or 1))


def _check(name: str) -> None:
    if name not in POINTS:
        raise ConfigError(
            f"there is no failpoint '{name}'; there are {', '.join(POINTS)}"
        )


def _crash() -> None:
    if once := os.environ.get(ONCE):
        try:
            os.close(os.open(once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
    os._exit(CRASHED)


def _action(text: str) -> Callable[[], object] | None:
    """Returns what is to be done; None: there is no such action."""
    action, _, seconds = text.partition(":")
    if action == "sleep" and re.fullmatch(r"\d+(\.\d+)?", seconds):
        return partial(threading.Event().wait, float(seconds))
    return {"crash": _crash, "raise": fail}.get(text)


def _nth(act: Callable[[], object], time: int) -> Callable[[], None]:
    times = itertools.count(1)

    def act_then() -> None:
        if next(times) == time:
            act()

    return act_then


arm(os.environ.get(VARIABLE, ""))
