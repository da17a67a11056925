"""Journal of a dashboard: facts as JSON lines, bounded, for a replay afterwards.

``FILE`` is what is written now; ``FILE.000001.gz`` and so on came before. Each begins
with a line that says what it is. A status is written as the difference from the one
before, as most of it is the same, and whole at the beginning of each file.
"""

import fcntl
import gzip
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Final, final

from jgraph.coordination.watch.facts import Fact, checked, clean
from jgraph.dashboard.merge_patch import difference, patched
from jgraph.errors import JournalError

HEAD: Final = {"jgraph": "board", "version": 1}
_LINE: Final = 4 << 20
_READ: Final = 2 << 30
"""Bytes of a journal that are read, unpacked, at most."""


@final
class JournalWriter:
    """Appends facts to a file.

    Args:
      path: of the file; one that is a journal is gone on with. Its directory is made
        where there is none.
      part_bytes: a file that is larger is packed, and another one begun.
      all_bytes: of the packed files together; the oldest go.

    Raises:
      JournalError: there is another file of this name, or another dashboard writes it.
      OSError: it cannot be written.
    """

    def __init__(
        self, path: Path, *, part_bytes: int = 16 << 20, all_bytes: int = 256 << 20
    ) -> None:
        self._path = path
        self._part_bytes = part_bytes
        self._all_bytes = all_bytes
        if path.exists() or path.is_symlink():
            with _opened(path) as file:
                _check_head(file.readline(_LINE), path)
        elif not path.parent.exists():
            path.parent.mkdir(parents=True)
        self._file = self._open()
        self._status: Fact = {}

    def write(self, fact: Fact) -> None:
        """Appends a fact.

        Raises:
          OSError: the disk refuses.
        """
        line = fact
        if fact["kind"] == "status":
            if self._status:
                change = difference(self._status, fact)
                line = {"kind": "change", "time": fact["time"], "change": change}
            self._status = fact
        self._file.write(_line_of(line))
        self._file.flush()
        if self._file.tell() > self._part_bytes:
            self._turn()

    def close(self) -> None:
        """Ends it."""
        self._file.close()

    def _open(self) -> BinaryIO:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.fdopen(os.open(self._path, flags, 0o600), "ab")
        try:  # what two wrote as differences, each from its own, would mean nothing
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise JournalError(
                f"another dashboard writes the journal {self._path}; name another file",
                path=str(self._path),
            ) from error
        if not file.tell():
            file.write(_line_of(HEAD))
        elif not _ends_with_line(self._path):  # of one that was killed as it wrote
            file.write(b"\n")
        file.flush()
        return file

    def _turn(self) -> None:
        """Packs the file, and begins another one."""
        self._file.close()
        number = max((_number(part) for part in parts_of(self._path)), default=0) + 1
        packed = self._path.with_name(f"{self._path.name}.{number:06}.gz")
        with (
            _opened(self._path) as file,
            os.fdopen(
                os.open(packed, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
            ) as raw,
            gzip.open(raw, "wb", 6) as out,
        ):
            while piece := file.read(1 << 20):
                out.write(piece)
        self._path.unlink()
        self._file, self._status = self._open(), {}
        parts = parts_of(self._path)
        sizes = [part.stat().st_size for part in parts]
        while sum(sizes) > self._all_bytes and parts:
            parts.pop(0).unlink()
            sizes.pop(0)


@final
class JournalReader:
    """Reads the facts of a journal, in order.

    Args:
      path: of the newest file.

    Attributes:
      skipped: lines that are no facts: cut off, damaged, or of another version.

    Raises:
      JournalError: it is no journal of this version, or a link.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.skipped = 0
        try:
            with _opened(path) as file:
                _check_head(file.readline(_LINE), path)
        except OSError as error:
            raise JournalError(
                f"cannot read the journal {path}: {error.strerror}; name a file that "
                "`jgraph dashboard --journal` wrote",
                path=str(path),
            ) from error

    def __iter__(self) -> Iterator[Fact]:
        """Yields the facts of all files, the oldest first.

        Raises:
          JournalError: there are more than are read.
        """
        self.skipped, nbytes = 0, 0
        for part in [*parts_of(self._path), self._path]:
            status: Any = None
            for line in self._lines(part):
                nbytes += len(line)
                if nbytes > _READ:
                    raise JournalError(
                        f"the journal {self._path} has more than {_READ >> 30} GiB, "
                        "and no more is read; name one of its parts",
                        path=str(self._path),
                    )
                entry = _decoded(line)
                if isinstance(entry, dict) and entry.get("kind") == "change":
                    change = clean(entry.get("change"))  # as deep as a fact, no deeper
                    entry = None if status is None else patched(status, change)
                fact = checked(entry)
                if fact is None:
                    self.skipped += entry != HEAD
                    continue
                if fact["kind"] == "status":
                    status = fact
                yield fact

    def _lines(self, part: Path) -> Iterator[bytes]:
        with ExitStack() as stack:
            file: Any = stack.enter_context(_opened(part))
            if part.suffix == ".gz":
                file = stack.enter_context(gzip.open(file))
            try:
                while line := file.readline(_LINE):
                    yield line
            except (OSError, EOFError, zlib.error):
                self.skipped += 1


def parts_of(path: Path) -> list[Path]:
    """Returns the packed files before ``path``, the oldest first."""
    found = path.parent.glob(f"{path.name}.[0-9][0-9][0-9][0-9][0-9][0-9].gz")
    return sorted(part for part in found if not part.is_symlink())


def _number(part: Path) -> int:
    return int(part.name.split(".")[-2])


def _opened(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")


def _ends_with_line(path: Path) -> bool:
    with _opened(path) as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _check_head(line: bytes, path: Path) -> None:
    if not line:
        raise JournalError(
            f"{path} is empty and so is not a journal; remove it if it is to become "
            "one, or name a file that `jgraph dashboard --journal` wrote",
            path=str(path),
        )
    if _decoded(line) != HEAD:
        raise JournalError(
            f"{path} is not a journal of this version of jgraph: it begins with "
            f"{line[:60]!r}; name a file that `jgraph dashboard --journal` wrote",
            path=str(path),
        )


def _decoded(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _line_of(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.encode() + b"\n"
