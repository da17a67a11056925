"""Unix-socket connection between processes of one machine and user, for frames.

A message costs a fifth of what it does over gRPC. A gRPC stream is opened as always: it
proves who is there, says why it ended, and notices a frozen peer. Its accepting side
offers a socket in its Hello (``jgraph.rpc.shared_memory.local_listener``); who can
connect to that and shows the ticket sends its frames there. The end of one is the end
of both.

The socket has a random name that is in no file system, so nothing is left of it however
the processes end.
"""

import asyncio
import os
import socket as sockets
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeAlias, cast, final

import grpc

from jgraph.rpc._pb import jgraph_pb2 as pb

TICKET_BYTES: Final = 32
HANDSHAKE_TIMEOUT_S: Final = 2.0
READ_BYTES: Final = 256 << 10
KERNEL_BYTES: Final = 512 << 10
HIGH_WATER_BYTES: Final = 1 << 20
"""More than this does not wait in this process for the kernel to take it."""
LAST_WORDS_S: Final = 1.0
"""How long a stream may outlive the socket beside it, to say why."""
AT_ONCE_BYTES: Final = 64 << 10
"""Smaller frames are written where they are made, if nothing waits before them."""

PREFIX: Final = "jgraph-"
_UCRED: Final = struct.Struct("iII")
Take: TypeAlias = Callable[[memoryview], None]


@final
class LocalSocket(asyncio.BufferedProtocol):
    """One end of a connection.

    Args:
      take: gets the bytes that arrive, on the event loop; they are overwritten after
        it returns.

    Attributes:
      ended: done when the connection is over; failed if ``take`` raised.
    """

    def __init__(self, take: Take) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take = take
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._transport: asyncio.Transport | None = None
        self._resumed: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes the connection."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no base
        self._transport.set_write_buffer_limits(HIGH_WATER_BYTES)

    def hand_to(self, take: Take) -> None:
        """Gives what arrives from now on to somebody else."""
        self._take = take

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns where to read to."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Passes on what was read; what is refused ends the connection."""
        try:
            self._take(self._buffer[:nbytes])
        except Exception as error:  # noqa: BLE001  # whoever waits for the end gets it
            if not self.ended.done():
                self.ended.set_exception(error)
                self.ended.exception()  # seen: not everybody asks why it ended
            self.close()

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
        self._take, self._transport = _ignore, None
        self.resume_writing()
        if not self.ended.done():
            self.ended.set_result(None)

    @property
    def is_same_user(self) -> bool:
        """Whether the process at the other end is of our user."""
        assert self._transport is not None
        peer = self._transport.get_extra_info("socket")
        found = peer.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _UCRED.size)
        _, uid, _ = _UCRED.unpack(found)
        return bool(uid == os.geteuid())

    @property
    def is_free(self) -> bool:
        """Whether the kernel takes what is written."""
        return self._resumed is None

    def write_now(self, data: bytes) -> None:
        """Writes, whatever waits already; nothing after the end."""
        if self._transport is not None:
            self._transport.write(data)

    async def write(self, data: bytes) -> None:
        """Writes when there is room."""
        while self._resumed is not None:
            await asyncio.shield(self._resumed)
        self.write_now(data)

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
        self._take = _ignore
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.close()
        if transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(LAST_WORDS_S, transport.abort)


def _ignore(data: memoryview) -> None:
    """Takes what nobody waits for any more."""


def end_late(
    stream: "grpc.aio.StreamStreamCall[bytes, bytes]", ended: "asyncio.Future[None]"
) -> None:
    """Ends a stream whose socket ended, if it does not say by itself why it does."""
    if ended.exception() is not None:
        stream.cancel()
    else:
        asyncio.get_running_loop().call_later(LAST_WORDS_S, stream.cancel)


async def connect(offer: pb.LocalSocket, take: Take) -> LocalSocket | None:
    """Returns a connection to the door that made an offer; None: it is out of reach.

    Args:
      offer: what the other side sent.
      take: gets the bytes that arrive.
    """
    if not offer.name.startswith(PREFIX) or sys.platform != "linux":
        return None
    made: LocalSocket | None = None
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            made = await _knock(offer)
    except (OSError, TimeoutError):
        return None
    if made is not None:
        made.hand_to(take)
    return made


async def _knock(offer: pb.LocalSocket) -> LocalSocket | None:
    loop = asyncio.get_running_loop()
    welcomed: asyncio.Future[bool] = loop.create_future()
    seen = bytearray()

    def look(data: memoryview) -> None:
        seen.extend(data)
        if len(seen) >= TICKET_BYTES and not welcomed.done():
            welcomed.set_result(bytes(seen) == offer.welcome)

    def give_up(_: object) -> None:
        if not welcomed.done():
            welcomed.set_result(False)

    made: LocalSocket | None = None
    calling = new_socket()
    try:
        await loop.sock_connect(calling, f"\0{offer.name}")
        _, made = await loop.create_unix_connection(
            lambda: LocalSocket(look), sock=calling
        )
        made.ended.add_done_callback(give_up)
        if made.is_same_user:
            made.write_now(offer.ticket)
            if await welcomed:
                return made
        return None
    finally:
        if not (welcomed.done() and welcomed.result()):
            calling.close() if made is None else made.close()


def new_socket() -> sockets.socket:
    """Returns a Unix socket that is connected to nothing."""
    made = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    made.setblocking(False)
    with suppress(OSError):
        made.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF, KERNEL_BYTES)
    return made
