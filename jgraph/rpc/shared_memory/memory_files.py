"""Shared memory files (memfd) that processes of one user map together.

They are made with ``memfd_create``: they have no name in any file system, other
processes reach them as ``/proc/<pid>/fd/<fd>``, and the kernel frees them with the last
mapping, however the processes end. They are sealed: nobody can shrink one while another
reads it (which would kill the reader).
"""

import mmap
import os
import stat
import struct
import sys
from contextlib import suppress
from typing import Final, final

import numpy as np

from jgraph.errors import MalformedMessageError
from jgraph.rpc.shared_memory.mappings import (
    Bytes,
    map_file,
    map_without_file,
    spare_files,
)

NONCE_BYTES: Final = 32

_NAME: Final = "jgraph"
_NUMBER: Final = struct.Struct("<Q")
_MARK_BYTES: Final = NONCE_BYTES + _NUMBER.size
_LINK: Final = f"/memfd:{_NAME} (deleted)"


def is_supported() -> bool:
    """Whether this system has such files (Linux has)."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


@final
class MemoryFile:
    """A sealed file of this process, mapped; it begins with a nonce and a number.

    Args:
      nbytes: its size, for ever.
      nonce: proves to another process that it looks at this memory; empty: neither is
        written.
      number: which one it is of those with that nonce; ``fd`` may be of another later.

    Raises:
      OSError: no more memory or file descriptors, or not allowed.

    Example:
      >>> file = MemoryFile(4096, bytes(range(32)))
      >>> map_foreign(os.getpid(), file.fd, bytes(range(32)))[31]
      np.uint8(31)
      >>> file.close()
    """

    def __init__(self, nbytes: int, nonce: bytes, number: int = 0) -> None:
        if sys.platform != "linux":
            raise OSError("memory files need Linux")
        import fcntl

        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, nbytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
            self._mapped = map_file(self.fd, nbytes)
            self.data = np.frombuffer(self._mapped, np.uint8)
        except BaseException:
            os.close(self.fd)
            raise
        self.number = number
        self._nonce_bytes = len(nonce)
        mark = nonce + _NUMBER.pack(number) if nonce else b""
        self.data[: len(mark)] = np.frombuffer(mark, np.uint8)

    def give_back(self, start: int, nbytes: int) -> None:
        """Gives pages to the kernel, of all who map them; they are zeros then.

        Args:
          start: where they begin.
          nbytes: of whole pages.
        """
        with suppress(OSError):  # a kernel that cannot
            self._mapped.madvise(mmap.MADV_REMOVE, start, nbytes)

    def close(self) -> None:
        """Ends access from other processes; mappings and arrays stay valid.

        Who has it mapped sees that by ``is_over``.
        """
        if self.fd >= 0:
            self.data[: self._nonce_bytes] = 0
            os.close(self.fd)
        self.fd = -1


def map_foreign(pid: int, fd: int, nonce: bytes, number: int = 0) -> Bytes:
    """Returns the writable bytes of a ``MemoryFile`` of another process.

    Raises:
      MalformedMessageError: it cannot be opened from here, is not such a file, is not
        sealed, or holds another nonce or number.
    """
    if sys.platform != "linux":
        raise MalformedMessageError("this system has no memory files")
    path = f"/proc/{pid:d}/fd/{fd:d}"
    try:
        # Opening something else can block (a pipe) or do harm (a device).
        target = os.readlink(path)
        if target != _LINK:
            raise MalformedMessageError(f"{path} is not shared memory of jgraph")
        data = spare_files.use(lambda: _opened(path))
    except OSError as error:
        raise MalformedMessageError(
            f"{path} cannot be opened as shared memory ({error.strerror or error})"
        ) from error
    if len(nonce) != NONCE_BYTES or data[:NONCE_BYTES].tobytes() != nonce:
        raise MalformedMessageError(f"{path} holds another nonce than was announced")
    (found,) = _NUMBER.unpack(data[NONCE_BYTES:_MARK_BYTES].tobytes())
    if found != number:
        raise MalformedMessageError(
            f"{path} is shared memory number {found:,}, and {number:,} was announced"
        )
    return data


def _opened(path: str) -> Bytes:
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return map_without_file(opened, _checked_size(opened, path))
    finally:
        os.close(opened)


def is_over(data: Bytes) -> bool:
    """Whether the owner of a ``MemoryFile`` has closed it."""
    return not data[:NONCE_BYTES].any()


def _checked_size(fd: int, path: str) -> int:
    import fcntl

    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size < _MARK_BYTES:
        raise MalformedMessageError(f"{path} is too small for shared memory of jgraph")
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    if seals & needed != needed:
        raise MalformedMessageError(f"{path} is not sealed against resizing")
    return found.st_size
