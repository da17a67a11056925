"""Write-ahead log files of one change-log stream: a checksum for every record.

``<stream>.<n>.log`` begins with all that was there, and goes on with what changed. When
it has grown to a multiple of its beginning, the next one begins, and this one goes. A
record is ``u64 length | u32 crc-32 of the frame | u32 crc-32 of the 12 bytes before |
frame``, little endian.
"""

import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, final

from jgraph.errors import CopyLostError, JGError
from jgraph.failpoints import failpoint
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.codec import encode
from jgraph.rpc.wire.decoder import Decoder

_HEAD: Final = struct.Struct("<QI")
_CRC: Final = struct.Struct("<I")
_HEAD_BYTES: Final = _HEAD.size + _CRC.size
_LEAST_BYTES: Final = 64 << 20
_TIMES: Final = 4
_STREAM: Final = re.compile(r"[\w.-]{1,100}")


def check_stream(stream: str) -> None:
    """Refuses what cannot be part of the name of a file.

    Raises:
      CopyLostError: it is another text.
    """
    if not _STREAM.fullmatch(stream) or stream.startswith("."):
        raise CopyLostError(f"'{stream[:80]}' is no name of a stream of records")


@final
class LogWriter:
    """Writes the log of a stream; used by one thread.

    Args:
      directory: of the files; made if it is not there.
      stream: whose records.
    """

    def __init__(self, directory: Path, stream: str) -> None:
        check_stream(stream)
        self._directory = directory
        self._stream = stream
        self._number = 0
        self._base = self._grown = 0
        self._file: BinaryIO | None = None
        self._is_begun = False

    @property
    def is_long(self) -> bool:
        """Whether it is time to begin a new file."""
        return self._grown > max(_LEAST_BYTES, _TIMES * self._base)

    def begin(self) -> None:
        """Begins the next file; it takes the place of this one with the next ``sync``.

        Until then, what is written is all that there is.
        """
        self.sync()
        self.close()
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        self._number += 1
        self._file = open(self._path(".part"), "wb", buffering=0)  # noqa: SIM115
        self._base = self._grown = 0
        self._is_begun = True

    def write(self, record: Frame) -> None:
        """Appends a record."""
        assert self._file is not None  # begin opens it
        encoded = encode(record)
        crc = 0
        for piece in encoded.pieces:
            crc = zlib.crc32(piece, crc)
        head = _HEAD.pack(encoded.nbytes, crc)
        head += _CRC.pack(zlib.crc32(head))
        for piece in (head, *encoded.pieces):
            _write_all(self._file, piece)
        self._grown += len(head) + encoded.nbytes

    def sync(self) -> None:
        """Returns when all is on the disk."""
        if self._file is None:
            return
        os.fdatasync(self._file.fileno())
        if self._is_begun:
            failpoint("log.begun")
            self._path(".part").rename(self._path(".log"))
            failpoint("log.replaced")
            _sync_directory(self._directory)
            for path in _files(self._directory, self._stream)[:-1]:
                path.unlink(missing_ok=True)
            self._base, self._grown, self._is_begun = self._grown, 0, False

    def close(self) -> None:
        """Closes the file; it stays."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _path(self, end: str) -> Path:
        return self._directory / f"{self._stream}.{self._number}{end}"


def read_log(directory: Path, stream: str) -> Iterator[Frame]:
    """Yields the records of a stream, up to one that was not written to its end.

    Raises:
      CopyLostError: there is no log, or it is damaged.
    """
    check_stream(stream)
    files = _files(directory, stream)
    if not files:
        raise CopyLostError(f"there is no log '{stream}' in {directory}")
    with files[-1].open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while True:
            at = file.tell()
            head = file.read(_HEAD_BYTES)
            if len(head) < _HEAD_BYTES:
                return
            if zlib.crc32(head[: _HEAD.size]) != _CRC.unpack_from(head, _HEAD.size)[0]:
                if any(head) or any(file.read()):
                    raise _damaged(files[-1], at)
                return  # the file system made room that was never written
            nbytes, crc = _HEAD.unpack_from(head)
            data = file.read(nbytes) if nbytes <= size - file.tell() else b""
            if len(data) < nbytes or zlib.crc32(data) != crc:
                if file.tell() != size and len(data) == nbytes:
                    raise _damaged(files[-1], at)
                return  # it was the last, and was being written
            yield _frame(data, files[-1], at)


def remove_logs(directory: Path, stream: str) -> None:
    """Deletes the files of a stream."""
    for path in directory.glob(f"{stream}.*"):
        if re.fullmatch(re.escape(stream) + r"\.\d+\.(log|part)", path.name):
            path.unlink(missing_ok=True)


def _frame(data: bytes, path: Path, at: int) -> Frame:
    try:
        (frame,) = Decoder().feed(data)
    except (JGError, ValueError):
        raise _damaged(path, at) from None
    return frame


def _damaged(path: Path, at: int) -> CopyLostError:
    return CopyLostError(f"the log {path} is damaged at byte {at}", path=str(path))


def _files(directory: Path, stream: str) -> list[Path]:
    """Returns the complete files of a stream, the oldest first."""
    pattern = re.compile(re.escape(stream) + r"\.(\d+)\.log")
    if not directory.is_dir():
        return []
    found = {
        int(match[1]): path
        for path in directory.iterdir()
        if (match := pattern.fullmatch(path.name))
    }
    return [found[number] for number in sorted(found)]


def _write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[file.write(rest) :]


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
