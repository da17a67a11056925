"""Writer lease of a checkpoint directory: one writing process at a time.

Each writer has a generation of its own, and a file of that number,
``jgraph_writer.<generation>.json``, made so that only one process can make it. The
highest generation is the writer. Whoever takes over from one that is gone makes the
next file; so a writer that comes back after a pause sees a higher number and stops.
"""

import json
import logging
import os
import re
import secrets
import socket
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, final

import psutil

from jgraph.clock import Clock, WallClock
from jgraph.errors import CheckpointWriterError
from jgraph.failpoints import failpoint

_LOG = logging.getLogger("jgraph.checkpoint")
LEASE_S: Final = 60.0
"""A writer on another host is gone when it has not renewed for so long."""
_NAME: Final = re.compile(r"jgraph_writer\.(\d{1,18})\.json\Z")


@final
@dataclass(frozen=True, slots=True)
class Holder:
    """What a lease file says.

    Attributes:
      generation: number of the lease; 0: nobody ever wrote here.
      host: where the writer runs.
      space: its namespace of process ids: containers may share the name of a host.
      pid: its process.
      began: when that process began, which tells it from another of the same id.
      renewed: when it last said that it lives, in seconds since 1970.
      released: it has ended, and said so.
    """

    generation: int = 0
    host: str = ""
    space: int = 0
    pid: int = 0
    began: float = 0.0
    renewed: float = 0.0
    released: bool = True

    def is_gone(self, now: float, lease_s: float, host: str, space: int) -> bool:
        """Returns whether a process of this host and namespace may take over."""
        if self.released:
            return True
        if (self.host, self.space) == (host, space):
            # The process table is surer than any clock.
            return not _runs(self.pid, self.began)
        return now - self.renewed > lease_s


@final
class WriterLease:
    """Holds the lease of a directory from ``acquire`` to ``release``.

    Args:
      directory: of the checkpoints.
      lease_s: how long a writer on another host is waited for.
      clock: the time of day.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     lease = WriterLease(Path(directory))
      ...     lease.acquire()
      ...     print(lease.generation)
      ...     lease.release()
      1
    """

    def __init__(
        self,
        directory: Path,
        *,
        lease_s: float = LEASE_S,
        clock: Clock | None = None,
    ) -> None:
        self._directory = directory
        self._lease_s = lease_s
        self._clock = clock or WallClock()
        self._own: Holder | None = None
        self._lock = threading.Lock()
        self._released = threading.Event()

    @property
    def generation(self) -> int:
        """Number of the lease; 0 when it is not held."""
        return self._own.generation if self._own is not None else 0

    def acquire(self) -> None:
        """Becomes the writer, and says so every third of the lease from now on.

        Raises:
          CheckpointWriterError: another process is; names its host, id and age.
          OSError: the directory cannot be written.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        last = newest(self._directory)
        now, host, space = self._clock.now(), socket.gethostname(), _space()
        if not last.is_gone(now, self._lease_s, host, space):
            raise _refused(self._directory, last, now)
        mine = Holder(
            last.generation + 1,
            host,
            space,
            os.getpid(),
            psutil.Process().create_time(),
            now,
            released=False,
        )
        if not self._create(mine):
            raise _refused(self._directory, newest(self._directory), now)
        self._own = mine
        self._released.clear()
        try:
            failpoint("lease.file_created")
            for number in _generations(self._directory):
                if number < mine.generation:
                    _file(self._directory, number).unlink(missing_ok=True)
        except BaseException:
            self.release()
            raise
        threading.Thread(
            target=self._renew_on, name="jgraph-lease", daemon=True
        ).start()

    def check(self) -> None:
        """Looks whether this is still the writer.

        Raises:
          CheckpointWriterError: another process has taken over.
        """
        last = newest(self._directory)
        if self._own is None or last.generation != self.generation:
            raise CheckpointWriterError(
                f"another process writes checkpoints to {self._directory} by now "
                f"({_who(last, self._clock.now())}), so this one, of generation "
                f"{self.generation}, must not; end one of the two runs",
                **_details(self._directory, last),
            )

    def release(self) -> None:
        """Lets another process write; does nothing when not held."""
        self._released.set()
        with self._lock:
            own, self._own = self._own, None
            try:
                if own is not None and newest(self._directory) == own:
                    self._write(replace(own, released=True))
                    failpoint("lease.released")
            except OSError as error:
                _LOG.warning(
                    "could not release the lease of %s: %s", self._directory, error
                )

    def _renew_on(self) -> None:
        while not self._released.wait(self._lease_s / 3):
            try:
                if not self._renew():
                    return  # ``check`` tells the one who saves
            except OSError as error:
                _LOG.warning(
                    "could not renew the lease of %s; the next try is in %g s: %s",
                    *(self._directory, self._lease_s / 3, error),
                )

    def _renew(self) -> bool:
        """Says that the writer is there; returns False if it is another by now."""
        with self._lock:
            if self._own is None or newest(self._directory) != self._own:
                return False
            renewed = replace(self._own, renewed=self._clock.now())
            failpoint("lease.renewing")
            self._write(renewed)
            self._own = renewed
            failpoint("lease.renewed")
            return True

    def _create(self, holder: Holder) -> bool:
        """Makes the file of a generation, complete; returns whether nobody else did."""
        new = self._new(holder)
        try:
            os.link(new, _file(self._directory, holder.generation))
        except (FileExistsError, FileNotFoundError):
            return False  # another process was first, and may have cleaned up
        finally:
            new.unlink(missing_ok=True)
        return True

    def _write(self, holder: Holder) -> None:
        self._new(holder).replace(_file(self._directory, holder.generation))

    def _new(self, holder: Holder) -> Path:
        path = self._directory / f".jgraph_writer.{secrets.token_hex(8)}"
        path.write_text(json.dumps(asdict(holder)), encoding="utf-8")
        return path


def newest(directory: Path) -> Holder:
    """Returns who may write to a directory, or did last."""
    for number in sorted(_generations(directory), reverse=True):
        try:
            holder = Holder(**json.loads(_file(directory, number).read_text("utf-8")))
        except FileNotFoundError:
            continue  # an older one, which its successor has just removed
        except (RecursionError, TypeError, ValueError):
            # Damaged: of nobody that can be asked, and its number is taken.
            return Holder(number)
        return replace(holder, generation=number)
    return Holder()


def _generations(directory: Path) -> list[int]:
    names = (path.name for path in directory.iterdir())
    return [int(found[1]) for name in names if (found := _NAME.match(name))]


def _file(directory: Path, generation: int) -> Path:
    return directory / f"jgraph_writer.{generation}.json"


def _space() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # not Linux
        return 0


def _runs(pid: int, began: float) -> bool:
    try:
        process = psutil.Process(pid)
        # The kernel counts in ticks from the boot: not exact to the last digit.
        same = abs(process.create_time() - began) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _who(holder: Holder, now: float) -> str:
    return (
        f"process {holder.pid} on {holder.host}, which last said so "
        f"{max(0.0, now - holder.renewed):.0f} s ago"
    )


def _refused(directory: Path, holder: Holder, now: float) -> CheckpointWriterError:
    return CheckpointWriterError(
        f"{directory} has a writer already: {_who(holder, now)}; end that run, or "
        "give this one another directory",
        **_details(directory, holder),
    )


def _details(directory: Path, holder: Holder) -> dict[str, str | int]:
    return {
        "path": str(directory),
        "host": holder.host,
        "pid": holder.pid,
        "generation": holder.generation,
    }
