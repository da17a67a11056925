"""Socket connection for frames, beside a gRPC stream: tensors sent and read in place.

A gRPC stream is opened as always: it proves who is there, says why it ended, and
notices a frozen peer. Its accepting side offers a socket in its Hello
(``jgraph.rpc.sockets.listener``): a Unix socket to callers of the same machine and
user, a TCP port to others. Who shows the ticket there sends its frames there. The end
of one is the end of both.

Large tensors are written from their own memory, and read into the memory that their
receiver gets.
"""

import asyncio
import logging
import os
import socket as sockets
import ssl
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeAlias, cast, final

from jgraph.rpc.sockets.pipe import not_counted
from jgraph.rpc.sockets.records import Opener, RecordError, Sealer
from jgraph.rpc.wire.codec import Buffer

READ_BYTES: Final = 64 << 10
"""Heads and small tensors are read in pieces of this size."""
IN_PLACE_BYTES: Final = 32 << 10
"""A tensor of which more than this is to come is read into its own memory."""
HIGH_WATER_BYTES: Final = 2 << 20
"""More than this does not wait in this process for the kernel to take it."""
PIECE_BYTES: Final = 4 << 20
SEALED_PIECE_BYTES: Final = 1 << 20
"""So much is written at once: the event loop serves others in between."""
JOINED_BYTES: Final = 16 << 10
"""Smaller pieces are copied together."""
AT_ONCE_BYTES: Final = 64 << 10
"""Smaller frames are written where they are made, if nothing waits before them."""
LAST_WORDS_S: Final = 1.0
"""How long a stream may outlive the socket beside it, to say why."""

_logger = logging.getLogger(__name__)
_UCRED: Final = struct.Struct("iII")
_SILENT_MS: Final = 15_000
_TCP_OPTIONS: Final = {
    "TCP_NODELAY": 1,
    # Of two connections to one task, something between may drop this one alone.
    "TCP_USER_TIMEOUT": _SILENT_MS,
    # Five probes in that time: an idle connection ends at the first moment after it at
    # which one is unanswered, so with one probe a single lost packet would end it.
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 1,
}
Take: TypeAlias = Callable[[memoryview], None]
Room: TypeAlias = Callable[[int], memoryview | None]


@final
class FrameSocket(asyncio.BufferedProtocol):
    """One end of a connection.

    Args:
      take: gets the bytes that arrive, on the event loop; they are overwritten after
        it returns.

    Attributes:
      ended: done when the connection is over; failed if ``take`` raised.
      keeps: it may break while both ends live, so what left over it is kept until it is
        acknowledged; a Unix socket does not.
    """

    def __init__(self, take: Take) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.keeps = True
        self._take = take
        self._room: Room = _nowhere
        self._scratch = memoryview(bytearray(READ_BYTES))
        self._into = self._scratch
        self._piece_bytes = PIECE_BYTES
        self._sealer: Sealer | None = None
        self._opener: Opener | None = None
        self._transport: asyncio.Transport | None = None
        self._resumed: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes the connection."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no base
        self._transport.set_write_buffer_limits(HIGH_WATER_BYTES)
        if self._tls is not None:
            self._piece_bytes = SEALED_PIECE_BYTES
        connected = self._transport.get_extra_info("socket")
        self.keeps = connected.family != getattr(sockets, "AF_UNIX", None)
        if self.keeps:
            connected.setsockopt(sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1)
            for name, value in _TCP_OPTIONS.items():
                if (option := getattr(sockets, name, None)) is not None:
                    connected.setsockopt(sockets.IPPROTO_TCP, option, value)

    def hand_to(self, take: Take, room: Room | None = None) -> None:
        """Gives what arrives from now on to somebody else.

        Args:
          take: gets the bytes.
          room: says where the next bytes belong if more are to come there than it is
            asked for; ``take`` then gets that memory.
        """
        self._take = take
        self._room = room or _nowhere

    def seal(self, sealer: Sealer, opener: Opener) -> None:
        """Seals what is written from now on, and opens what arrives."""
        self._sealer, self._opener = sealer, opener
        self._piece_bytes = SEALED_PIECE_BYTES

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns where to read to."""
        if self._opener is not None:
            return self._opener.room()
        self._into = self._room(IN_PLACE_BYTES) or self._scratch
        return self._into

    def buffer_updated(self, nbytes: int) -> None:
        """Passes on what was read; what is refused ends the connection."""
        # Kept nowhere here: it may be of a tensor that is complete now.
        into, self._into = self._into, self._scratch
        try:
            if self._opener is None:
                self._take(into[:nbytes])
                return
            for plain in self._opener.opened(nbytes, self._belongs):
                self._take(plain)
        except RecordError as error:
            self._break(error)
        except Exception as error:  # noqa: BLE001  # whoever waits for the end gets it
            if not self.ended.done():
                self.ended.set_exception(error)
                self.ended.exception()  # seen: not everybody asks why it ended
            self.close()

    def _belongs(self, least: int) -> memoryview | None:
        return self._room(least)  # whoever takes one record may change it for the next

    def _break(self, error: RecordError) -> None:
        """Ends the connection as if the network did: it is made again."""
        if self._transport is not None:
            _logger.info("A data socket ends, and is made again: %s.", error)
            self._transport.abort()

    def pause_writing(self) -> None:
        """Lets writers wait."""
        self._resumed = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """Lets them go on."""
        if self._resumed is not None and not self._resumed.done():
            self._resumed.set_result(None)
        self._resumed = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Notes the end; writers learn it from the stream."""
        self.hand_to(_ignore)
        self._transport = None
        self.resume_writing()
        if not self.ended.done():
            self.ended.set_result(None)

    @property
    def is_same_user(self) -> bool:
        """Whether the process at the other end of a Unix socket is of our user."""
        assert self._transport is not None
        peer = self._transport.get_extra_info("socket")
        found = peer.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _UCRED.size)
        _, uid, _ = _UCRED.unpack(found)
        return bool(uid == os.geteuid())

    @property
    def names(self) -> frozenset[str]:
        """The names in the certificate of the other end; none without TLS."""
        certificate: Any = None if self._tls is None else self._tls.getpeercert()
        found = (certificate or {}).get("subjectAltName", ())
        return frozenset(name for kind, name in found if kind == "DNS")

    @property
    def host(self) -> str:
        """The address of the other end of a TCP connection."""
        assert self._transport is not None
        return str(self._transport.get_extra_info("peername")[0])

    @property
    def way(self) -> str:
        """What this is, for those who look after a cluster."""
        if not self.keeps:
            return "local socket"
        if self._sealer is not None:
            return "data socket (records)"
        is_plain = self._transport is None or self._tls is None
        return f"data socket ({'plain' if is_plain else 'tls'})"

    @property
    def _tls(self) -> ssl.SSLObject | None:
        assert self._transport is not None
        found: ssl.SSLObject | None = self._transport.get_extra_info("ssl_object")
        return found

    @property
    def is_free(self) -> bool:
        """Whether the kernel takes what is written."""
        return self._resumed is None

    def write_now(self, data: bytes) -> None:
        """Writes, whatever waits already; nothing after the end."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self._sealed(data))

    def _sealed(self, data: Buffer, *, is_end: bool = False) -> Buffer | bytearray:
        if self._sealer is None:
            return data
        try:
            return self._sealer.seal(data, is_end=is_end)
        except RecordError as error:
            self._break(error)
            return b""

    async def write(
        self, pieces: Iterable[Buffer], moved: Callable[[int], None] = not_counted
    ) -> None:
        """Writes pieces when there is room; large ones are not copied.

        Args:
          pieces: must not change until the other side has them.
          moved: is told of bytes that leave.
        """
        for parts in _written_together(pieces, self._piece_bytes):
            while self._resumed is not None:
                await asyncio.shield(self._resumed)
            if self._transport is None or self._transport.is_closing():
                return
            if self._sealer is None:
                self._transport.writelines(parts)
            else:
                for part in parts:
                    self._transport.write(self._sealed(part))
            moved(sum(map(len, parts)))

    def pause_reading(self) -> None:
        """Leaves what the other side sends to wait there."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Reads on."""
        if self._transport is not None:
            self._transport.resume_reading()

    def close(self) -> None:
        """Ends the connection when what was written has left, or after a second."""
        self.hand_to(_ignore)
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._sealer is not None:
            transport.write(self._sealed(b"", is_end=True))
        transport.close()
        if transport.get_write_buffer_size() or self._piece_bytes != PIECE_BYTES:
            asyncio.get_running_loop().call_later(LAST_WORDS_S, transport.abort)


def _written_together(
    pieces: Iterable[Buffer], most: int
) -> Iterator[tuple[Buffer, ...]]:
    """Yields what to write at once: small pieces joined, large ones cut.

    Example:
      >>> large = bytes(JOINED_BYTES)
      >>> parts = _written_together([b"ab", b"c", large], 9000)
      >>> [list(map(len, together)) for together in parts]
      [[3, 9000], [7384]]
    """
    small: list[Buffer] = []
    waiting = 0
    for piece in pieces:
        if len(piece) < JOINED_BYTES:
            small.append(piece)
            waiting += len(piece)
            if waiting >= AT_ONCE_BYTES:
                yield (b"".join(small),)
                small, waiting = [], 0
            continue
        view = memoryview(piece)
        while view:
            part, view = view[:most], view[most:]
            yield (b"".join(small), part) if small else (part,)
            small, waiting = [], 0
    if small:
        yield (b"".join(small),)


def _ignore(data: memoryview) -> None:
    """Takes what nobody waits for any more."""


def _nowhere(least: int) -> None:
    """Has no room: bytes are handed over as they come."""
