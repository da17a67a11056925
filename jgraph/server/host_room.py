"""Room that a task has left: memory and disks of its host, time of its certificate."""

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Final, final

import psutil

from jgraph.clock import Clock
from jgraph.errors import RescaleError
from jgraph.rpc.security.tls import TLS
from jgraph.view.units import bytes_text

_GROUP = Path("/sys/fs/cgroup")
LOOK_EVERY_S: Final = 5.0
"""A disk is not asked more often than that: it fills more slowly."""
WAIT_S: Final = 0.05
"""By then a disk has answered that does."""


def memory_free(group: Path = _GROUP) -> float:
    """Returns the share of the memory that can still be had, 0 to 1.

    Of the machine, or of the container (cgroup v2) where that has less left. Pages of
    files that nobody uses any more count as free, as the kernel gives them away.

    Example:
      >>> 0 < memory_free() <= 1
      True
    """
    machine = psutil.virtual_memory()
    free = machine.available / machine.total
    limit, room = _of_group(group)
    return min(free, room / limit) if limit else free


def memory_left(group: Path = _GROUP) -> int:
    """Returns how many bytes of memory can still be had; see ``memory_free``.

    Example:
      >>> memory_left() > 0
      True
    """
    limit, room = _of_group(group)
    available = psutil.virtual_memory().available
    return min(available, room) if limit else available


def check_memory(task: str, nbytes: int) -> None:
    """Refuses what there is no memory for.

    Args:
      task: this one.
      nbytes: that are to come.

    Raises:
      RescaleError: there is less.
    """
    if (room := memory_left()) < nbytes:
        raise RescaleError(
            f"{task} has {bytes_text(room)} of memory left, and {bytes_text(nbytes)} "
            "of variables would move to it",
            task=task,
            wanted=nbytes,
            left=room,
        )


def _of_group(group: Path) -> tuple[int, int]:
    """Returns the limit of the container, and what is left of it; 0: it has none."""
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        rows = (
            line.split() for line in (group / "memory.stat").read_text().split("\n")
        )
        cached = {row[0]: int(row[1]) for row in rows if len(row) == 2}
    except (OSError, ValueError):  # "max": no limit
        return 0, 0
    return limit, max(0, limit - used + cached.get("inactive_file", 0))


def disk_free(*directories: Path | None) -> float:
    """Returns the least share that is free of the disks of some directories, 0 to 1.

    That of temporary files counts always; what is not there does not.

    Example:
      >>> 0 <= disk_free() <= 1
      True
    """
    least = 1.0
    for directory in (Path(tempfile.gettempdir()), *directories):
        try:
            disk = shutil.disk_usage(directory) if directory else None
        except OSError:
            continue
        # Of what can be had: some of a disk may be kept for others.
        if disk and disk.used + disk.free:
            least = min(least, disk.free / (disk.used + disk.free))
    return least


@final
class DiskLooks:
    """What the disks of some directories had free when they last answered.

    A disk of the network may not answer for minutes: each look is a thread of its own,
    and while one lasts no other begins.

    Args:
      clock: says when a look is due.
      directories: as of ``disk_free``.

    Attributes:
      free: the share that was free; None: no disk has answered yet.
    """

    def __init__(self, clock: Clock, *directories: Path | None) -> None:
        self._clock = clock
        self._directories = directories
        self._due_s = -inf
        self._is_looking = False
        self.free: float | None = None

    async def look(self) -> None:
        """Looks if a look is due; waits for it as long as a disk takes that is well."""
        now = self._clock.now()
        if self._is_looking or now < self._due_s:
            return
        self._is_looking, self._due_s = True, now + LOOK_EVERY_S
        over = asyncio.Event()
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, over.set)
        # A daemon: a process may end whose disk does not answer.
        threading.Thread(
            target=self._ask, args=(wake,), name="jgraph-disk", daemon=True
        ).start()
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                await over.wait()

    def _ask(self, wake: Callable[[], object]) -> None:
        try:
            self.free = disk_free(*self._directories)
        finally:
            self._is_looking = False
        with suppress(RuntimeError):  # the event loop is closed: nobody waits
            wake()


def certificate_ends_s(files: TLS | None) -> float:
    """Returns when a certificate ends, in seconds since 1970; 0 where none is read."""
    if files is None:
        return 0.0
    from cryptography import x509

    try:
        leaf = x509.load_pem_x509_certificate(files.cert.read_bytes())
    except (OSError, ValueError):
        return 0.0  # whoever needs it says why
    return leaf.not_valid_after_utc.timestamp()
