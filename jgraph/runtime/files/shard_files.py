"""Access to checkpoint files by rows: reads and writes slices of arrays.

The client makes the directory, the files at their full size, and a file with a random
proof. A server that is asked to write or read there first looks whether it finds that
proof: then both mean the same directory, and the client may write to it itself, so a
server lends its rights to nobody. It makes no file, follows no link below the
directory, and opens regular files of the expected size only.
"""

import errno
import hmac
import json
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from jgraph.errors import CheckpointCorruptError, CheckpointPathError
from jgraph.failpoints import failpoint
from jgraph.plan.program.nodes import ValueType
from jgraph.plan.program.row_values import aligned_empty
from jgraph.runtime.files.blocks import Blocks, Bytes, Run, Sums, as_rows
from jgraph.runtime.files.manifest import PROOF, Leaf, directory_of

PROOF_BYTES: Final = 32
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What a disk without room says."""
_UNKNOWN: Final = {"uint1", "uint2", "uint4", "float6_e2m3fn", "float6_e3m2fn"}
"""Dtypes of one byte in memory that Zarr and TensorStore have no name for."""
_APART_BYTES: Final = 1 << 20
_PIECE_BYTES: Final = 4 << 20
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@final
@dataclass(frozen=True, slots=True)
class Slice:
    """Rows of an array of a checkpoint: ``start``, ``start + step``, and so on.

    Attributes:
      array: name of the directory of the array.
      type: of the slice.
      blocks: of the array.
      start: first row.
      step: how far apart.
    """

    array: str
    type: ValueType
    blocks: Blocks
    start: int = 0
    step: int = 1

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.type.shape[0] if self.type.shape else 1

    @property
    def runs(self) -> list[Run]:
        """Its rows, cut at the blocks."""
        return list(self.blocks.runs(self.start, self.step, self.count))

    @classmethod
    def whole(cls, array: str, type_: ValueType, block_rows: int = 0) -> "Slice":
        """Returns all rows of an array."""
        blocks = Blocks.of(type_.shape, type_.np_dtype.itemsize, block_rows)
        return cls(array, type_, blocks)

    def file(self, block: int) -> str:
        """Returns the name of the file of a block, as Zarr has it."""
        return ".".join([str(block), *["0"] * (len(self.type.shape) - 1)])


def make_array(directory: Path, whole: Slice) -> None:
    """Makes the directory of an array, and its files; they have no content yet.

    Args:
      directory: of the checkpoint.
      whole: all rows of the array.
    """
    path = directory / whole.array
    path.mkdir()
    shape, blocks = whole.type.shape, whole.blocks
    dtype = stored_dtype(whole.type.np_dtype)
    about = {
        "zarr_format": 2,
        "shape": shape,
        "chunks": (blocks.block_rows, *shape[1:]) if shape else (),
        "dtype": dtype.str if dtype.isbuiltin == 1 else dtype.name,
        "compressor": None,
        "filters": None,
        "fill_value": None,
        "order": "C",
        "dimension_separator": ".",
    }
    (path / ".zarray").write_text(json.dumps(about), encoding="utf-8")
    for block in range(len(blocks)):
        with open(path / whole.file(block), "xb") as file:
            file.truncate(blocks.file_nbytes)


def stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype that files say they have; the bytes are the same.

    Example:
      >>> stored_dtype(np.dtype("uint4")), stored_dtype(np.dtype("int4"))
      (dtype('uint8'), dtype(int4))
    """
    return np.dtype(np.uint8) if dtype.name in _UNKNOWN else dtype


def make_proof(directory: Path) -> bytes:
    """Puts a new proof into a directory, and returns it.

    Other users may not read it, whatever the umask: who can show it is written for.
    """
    proof = os.urandom(PROOF_BYTES)
    path = directory / PROOF
    path.unlink(missing_ok=True)  # it would keep its mode
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(proof)
    return proof


def read_proof(directory: Path) -> bytes:
    """Returns the proof of a directory; empty if there is none."""
    try:
        return (directory / PROOF).read_bytes()
    except OSError:
        return b""


@contextmanager
def proven(directory: str, proof: bytes) -> Iterator[int]:
    """Opens a directory that somebody names, if this proof is there.

    Raises:
      CheckpointPathError: it is not an absolute path in its shortest form, cannot be
        opened from here, or has no such proof; which of these is not told.
    """
    fd = -1
    try:
        if len(proof) == PROOF_BYTES and _is_plain(directory):
            fd = os.open(directory, _DIRECTORY)
            with _opened(fd, PROOF, os.O_RDONLY, PROOF_BYTES) as file:
                found = os.read(file, PROOF_BYTES)
            if not hmac.compare_digest(found, proof):
                os.close(fd)
                fd = -1
    except OSError:
        if fd >= 0:
            os.close(fd)
        fd = -1
    if fd < 0:
        raise CheckpointPathError(
            f"{directory!r:.200} is not a directory that this task shares with the "
            "client, as the same user",
            path=directory,
        )
    try:
        yield fd
    finally:
        os.close(fd)


def write_slice(directory: int, where: Slice, array: Any) -> Sums:
    """Writes rows to their files, to the disk; returns their checksums.

    Raises:
      OSError: what the disk says, or that the files are not as they should be.
    """
    rows = as_rows(array)
    return write_rows(directory, where, lambda start, stop: rows[start:stop])


def write_rows(
    directory: int, where: Slice, rows: Callable[[int, int], np.ndarray[Any, Any]]
) -> Sums:
    """Writes rows to their files, to the disk; returns their checksums.

    Args:
      directory: of the checkpoint.
      where: the rows.
      rows: returns some of them, from one to before another; is asked for a piece at a
        time.

    Raises:
      OSError: what the disk says, or that the files are not as they should be.
    """
    at_once = max(1, _PIECE_BYTES // where.blocks.row_nbytes)

    def pieces(run: Run, file: int) -> Iterator[Bytes]:
        for at in range(0, run.count, at_once):
            count, first = min(at_once, run.count - at), run.at + at
            piece = as_rows(rows(first, first + count)).reshape(count, -1)
            begin = run.first + at * where.step
            _write(file, where, replace(run, first=begin, count=count), piece)
            yield piece
        failpoint("shard.written")
        os.fsync(file)
        failpoint("shard.on_disk")

    return _sums(directory, where, pieces, os.O_WRONLY)


def read_slice(directory: int, where: Slice) -> tuple[np.ndarray[Any, Any], Sums]:
    """Returns rows from their files, and their checksums.

    Raises:
      OSError: what the disk says, or that the files are not as they should be.
    """
    array = aligned_empty(where.type)
    return array, fill_slice(directory, where, array)


def fill_slice(directory: int, where: Slice, array: np.ndarray[Any, Any]) -> Sums:
    """Reads rows into an array that is there, and returns their checksums.

    Args:
      directory: of the checkpoint.
      where: the rows.
      array: contiguous, of the type of the slice.

    Raises:
      OSError: what the disk says, or that the files are not as they should be.
    """
    rows = array.reshape(-1).view(np.uint8).reshape(where.count, -1)

    def pieces(run: Run, file: int) -> Iterator[Bytes]:
        mine = rows[run.at : run.at + run.count]
        _read(file, where, run, mine)
        yield mine

    return _sums(directory, where, pieces)


def check_slice(directory: int, where: Slice) -> Sums:
    """Returns the checksums of rows in their files, a piece of which is read at a time.

    Raises:
      OSError: what the disk says, or that the files are not as they should be.
    """
    size = where.blocks.row_nbytes
    at_once = max(1, _PIECE_BYTES // size)

    def pieces(run: Run, file: int) -> Iterator[Bytes]:
        piece = np.empty((min(at_once, run.count), size), np.uint8)
        for at in range(0, run.count, at_once):
            mine = piece[: run.count - at]
            first = run.first + at * where.step
            _read(file, where, replace(run, first=first, count=len(mine)), mine)
            yield mine

    return _sums(directory, where, pieces)


def _sums(
    directory: int,
    where: Slice,
    pieces: Callable[[Run, int], Iterable[Bytes]],
    flags: int = os.O_RDONLY,
) -> Sums:
    """Returns the checksums of what is read of the files of a slice, or written."""
    sums = Sums()
    with _opened_directory(directory, where.array) as inside:
        for run in where.runs:
            name, size = where.file(run.block), where.blocks.file_nbytes
            with _opened(inside, name, flags, size) as file:
                moved = pieces(run, file)
                sums[run.block] = where.blocks.checksum(run, where.step, moved)
    return sums


def _write(file: int, where: Slice, run: Run, rows: Bytes) -> None:
    size = where.blocks.row_nbytes
    if where.step == 1:
        _write_all(file, rows.reshape(-1).data, run.first * size)
        return
    for number, row in enumerate(rows):
        at = run.first + number * where.step
        _write_all(file, row.data, at * size)


def _write_all(file: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written


def _read(file: int, where: Slice, run: Run, rows: Bytes) -> None:
    size, step = where.blocks.row_nbytes, where.step
    if step == 1:
        _read_all(file, rows.reshape(-1).data, run.first * size)
        return
    at_once = max(1, _APART_BYTES // (step * size))
    for at in range(0, run.count, at_once):
        some = rows[at : at + at_once]
        span = np.empty(((len(some) - 1) * step + 1, size), np.uint8)
        _read_all(file, span.reshape(-1).data, (run.first + at * step) * size)
        some[:] = span[::step]


def _read_all(file: int, data: memoryview, at: int) -> None:
    while data:
        count = os.preadv(file, [data], at)
        if not count:
            raise OSError(errno.EIO, "the file ended early")
        data, at = data[count:], at + count


def _is_plain(directory: str) -> bool:
    """Whether a path says where it leads: absolute, without ``..`` or a zero byte."""
    return (
        os.path.isabs(directory)
        and "\0" not in directory
        and os.path.normpath(directory) == directory
    )


@contextmanager
def _opened_directory(parent: int, name: str) -> Iterator[int]:
    _check_name(name)
    fd = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _opened(parent: int, name: str, flags: int, nbytes: int) -> Iterator[int]:
    """Opens a regular file of this size that has no other name."""
    _check_name(name)
    fd = os.open(name, flags | _FILE, dir_fd=parent)
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_nlink != 1:
            raise OSError(errno.EINVAL, f"{name} is not a file of a checkpoint")
        if about.st_size != nbytes:
            raise OSError(
                errno.EIO, f"{name} has {about.st_size:,} bytes instead of {nbytes:,}"
            )
        yield fd
    finally:
        os.close(fd)


def _check_name(name: str) -> None:
    if not name or name in {".", ".."} or "/" in name or "\0" in name:
        raise OSError(errno.EINVAL, f"{name!r:.80} is no name of a file")


def joined(
    leaves: Mapping[str, Leaf], parts: Iterable[tuple[str, Sums]]
) -> dict[str, tuple[int, ...]] | None:
    """Returns the checksums of arrays from those of their parts; None: of other arrays.

    Args:
      leaves: the arrays, by path.
      parts: arrays by name of their directory, with the checksums of some rows.
    """
    sums: defaultdict[str, list[Sums]] = defaultdict(list)
    for array, part in parts:
        sums[array].append(part)
    if {directory_of(name) for name in leaves} != sums.keys():
        return None
    return {
        name: Slice.whole(directory_of(name), leaf.type, leaf.block_rows).blocks.joined(
            sums[directory_of(name)]
        )
        for name, leaf in leaves.items()
    }


def check_read(
    path: Path, leaves: Mapping[str, Leaf], parts: Sequence[tuple[str, Sums]]
) -> None:
    """Refuses what is not what was written.

    Raises:
      CheckpointCorruptError: names the first array.
    """
    found = joined(leaves, parts) or {}
    wrong = [name for name in leaves if found.get(name) != leaves[name].crc32]
    if wrong:
        raise CheckpointCorruptError(
            f"{path} is damaged: '{wrong[0]}' is not what was written",
            path=str(path),
        )
