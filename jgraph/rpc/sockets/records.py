"""Sealed records: AES-256-GCM over the bytes of a data socket, with keys from TLS.

The specification is in ``docs/threat-model.md``. TLS cuts what it carries into records
of 16 KiB, and each costs system calls and copies; these have up to 1 MiB, and are
opened into the memory that their receiver gets. The handshake stays that of TLS: keys
are made for one connection and one direction of it, and travel in the Hello of a stream
whose both ends showed certificates, nowhere else.
"""

import secrets
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Final, final

from jgraph.rpc.wire.codec import Buffer

KEY_BYTES: Final = 32
RECORD_BYTES: Final = 1 << 20
"""Plain bytes of a record, at most."""
MOST_BYTES: Final = 1 << 38
MOST_RECORDS: Final = 1 << 32
"""After so much a key has served, and the connection ends; the next has another."""

_TAG_BYTES: Final = 16
_HEAD: Final = struct.Struct("<II")
_NONCE: Final = struct.Struct("<IQ")
_ADDED: Final = struct.Struct("<IQ")
_END: Final = 1 << 31
_READ_AHEAD: Final = 64 << 10


class RecordError(Exception):
    """What came is not what was sealed, or a key has served; the connection ends."""


def new_key() -> bytes:
    """Returns a key for one direction of one connection."""
    return secrets.token_bytes(KEY_BYTES)


@final
class Sealer:
    """Makes records, numbered from 0.

    Args:
      key: for this direction of this connection alone.

    Example:
      >>> key = bytes(32)
      >>> record = Sealer(key).seal(b"hello")
      >>> len(record) - len(b"hello")
      24
    """

    def __init__(self, key: bytes) -> None:
        # Only when it is needed: most clusters of one machine do without.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(key)
        self._number = 0
        self._nbytes = 0

    def seal(self, plain: Buffer, *, is_end: bool = False) -> bytearray:
        """Returns the next record.

        Args:
          plain: 1 MiB at most.
          is_end: nothing follows.

        Raises:
          RecordError: the key has served, or these are too many bytes.
        """
        size = len(plain)
        if size > RECORD_BYTES:
            raise RecordError(f"a record of {size:,} bytes")
        self._nbytes += size
        if self._nbytes > MOST_BYTES or self._number >= MOST_RECORDS:
            raise RecordError("the key of a connection has served")
        head = size | _END if is_end else size
        added = _ADDED.pack(head, self._number)
        record = bytearray(_HEAD.size + size + _TAG_BYTES)
        _HEAD.pack_into(record, 0, head, zlib.crc32(added))
        sealed = memoryview(record)[_HEAD.size :]
        self._cipher.encrypt_into(_NONCE.pack(0, self._number), plain, added, sealed)
        self._number += 1
        return record


@final
class Opener:
    """Opens the records of one ``Sealer``, each once and in order.

    Args:
      key: of the sealer.

    Example:
      >>> sealer, opener = Sealer(bytes(32)), Opener(bytes(32))
      >>> record = sealer.seal(b"hello")
      >>> opener.room()[: len(record)] = record
      >>> [bytes(plain) for plain in opener.opened(len(record), lambda least: None)]
      [b'hello']
    """

    def __init__(self, key: bytes) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(key)
        self._changed = InvalidTag
        self._number = 0
        self._is_over = False
        self._sealed = memoryview(bytearray(_READ_AHEAD))
        self._have = 0
        self._limit = _READ_AHEAD
        self._plain = memoryview(bytearray())

    def room(self) -> memoryview:
        """Returns where to read to: no further than the end of a large record."""
        return self._sealed[self._have : self._limit]

    def opened(
        self, nbytes: int, room: Callable[[int], memoryview | None]
    ) -> Iterator[memoryview]:
        """Yields the plain bytes of the records that are complete now.

        Args:
          nbytes: that were read to ``room()``.
          room: gives memory for so many plain bytes, if they belong somewhere.

        Raises:
          RecordError: what comes next is not the next record; it is not yielded.
        """
        self._have += nbytes
        start = 0
        while (size := self._size_at(start)) is not None:
            end = start + _HEAD.size + size + _TAG_BYTES
            if end > self._have:
                break
            plain = self._open(start, size, room)
            start = end
            if size:
                yield plain
        self._keep(start)

    def _size_at(self, start: int) -> int | None:
        """Returns the plain bytes of the record there; None: its head is not here.

        The cipher shows a wrong size only when so many bytes are there, and these may
        never come: the checksum shows it now.
        """
        if self._have - start < _HEAD.size:
            return None
        if self._is_over:
            raise RecordError("a record after the last one")
        head, checksum = _HEAD.unpack_from(self._sealed, start)
        if checksum != zlib.crc32(_ADDED.pack(head, self._number)):
            raise RecordError("the head of a record was changed on the way")
        size: int = head & ~_END
        if size > RECORD_BYTES:
            raise RecordError(f"a record of {size:,} bytes")
        return size

    def _open(
        self, start: int, size: int, room: Callable[[int], memoryview | None]
    ) -> memoryview:
        head, _ = _HEAD.unpack_from(self._sealed, start)
        data = self._sealed[start + _HEAD.size :][: size + _TAG_BYTES]
        # Of a record that was changed, the memory is given to nobody.
        target = room(size) if size else None
        if target is None:
            if len(self._plain) < size:
                self._plain = memoryview(bytearray(size))
            target = self._plain
        plain, added = target[:size], _ADDED.pack(head, self._number)
        try:
            self._cipher.decrypt_into(_NONCE.pack(0, self._number), data, added, plain)
        except self._changed:
            raise RecordError("a record was changed on the way") from None
        self._number += 1
        self._is_over = bool(head & _END)
        return plain

    def _keep(self, start: int) -> None:
        """Moves what is left of a record to the front, and makes room for all of it."""
        remaining = self._have - start
        rest = self._sealed[start : self._have]
        size = self._size_at(start)
        whole = 0 if size is None else _HEAD.size + size + _TAG_BYTES
        self._limit = max(whole, _READ_AHEAD)
        if self._limit > len(self._sealed):
            self._sealed = memoryview(bytearray(self._limit))
        if rest.obj is not self._sealed.obj or start:
            self._sealed[:remaining] = bytes(rest)
        self._have = remaining
