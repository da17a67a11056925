"""Connections to sockets beside gRPC streams: tickets shown, ports out of reach."""

import asyncio
import logging
import socket as sockets
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, TypeAlias, final

from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.dial import split_address
from jgraph.rpc.security.tls import expected_at
from jgraph.rpc.sockets.frame_socket import LAST_WORDS_S, FrameSocket, Take
from jgraph.rpc.sockets.listener import (
    HANDSHAKE_TIMEOUT_S,
    KERNEL_BYTES,
    TICKET_BYTES,
    Ticket,
)
from jgraph.rpc.sockets.pipe import Stream
from jgraph.rpc.sockets.records import KEY_BYTES
from jgraph.rpc.transport import Address

FILTERED_S: Final = 60.0
"""A port that did not answer at all is not tried again for so long."""
_logger = logging.getLogger(__name__)
_Open: TypeAlias = Callable[[Callable[[], FrameSocket]], Awaitable[object]]


async def connect_local(offer: pb.LocalSocket, take: Take) -> FrameSocket | None:
    """Returns a connection to a Unix socket; None: it is out of reach from here."""
    calling = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    calling.setblocking(False)
    with suppress(OSError):
        calling.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF, KERNEL_BYTES)

    is_connected = False

    async def open_it(make: Callable[[], FrameSocket]) -> None:
        nonlocal is_connected
        loop = asyncio.get_running_loop()
        await loop.sock_connect(calling, f"\0{offer.name}")
        await loop.create_unix_connection(make, sock=calling)
        is_connected = True

    ticket = Ticket(offer.ticket, offer.welcome)
    try:
        return await _shown(open_it, ticket, lambda sock: sock.is_same_user, take)
    except OSError:
        return None
    finally:
        if not is_connected:
            calling.close()


@final
class DataDialer:
    """Connects to the data ports of other hosts.

    Args:
      tls: what this side shows and demands; None: plain text.
      takes_records: with TLS, records will do that are sealed with keys from there.
    """

    def __init__(
        self, tls: ssl.SSLContext | None, *, takes_records: bool = True
    ) -> None:
        self._tls = tls
        self._takes_records = tls is not None and takes_records
        self._filtered: dict[tuple[str, int], float] = {}
        self._said: set[tuple[str, str]] = set()

    async def connect(
        self, address: Address, offer: pb.DataSocket, task: str, take: Take
    ) -> FrameSocket | None:
        """Returns a connection; None: the port is out of reach, and the log says why.

        Args:
          address: where the stream goes; the port is on the same host.
          offer: what the other side said of the port.
          task: that must be there; empty for any.
          take: gets the bytes that arrive.
        """
        there = split_address(address)[0], offer.port
        now = asyncio.get_running_loop().time
        if self._filtered.get(there, 0.0) > now():
            return None
        try:
            sock = await self._dial(there, offer, expected_at(task), take)
        except TimeoutError:
            self._filtered[there] = now() + FILTERED_S
            why = f"no answer within {HANDSHAKE_TIMEOUT_S:g} s; does a firewall drop it"
        except OSError as error:
            why = error.strerror or str(error) or type(error).__name__
        else:
            self._said = {said for said in self._said if said[0] != address}
            return sock
        if (address, why) not in self._said:
            self._said.add((address, why))
            _logger.info(
                "Frames for %s go through gRPC, which is slower: port %d of it, for "
                "data, is out of reach (%s).",
                f"{task} at {address}" if task else address,
                offer.port,
                why,
            )
        return None

    async def _dial(
        self, there: tuple[str, int], offer: pb.DataSocket, expected: str, take: Take
    ) -> FrameSocket:
        keys = offer.key_to_accepting, offer.key_to_dialing
        if not any(keys):
            ticket, tls = Ticket(offer.ticket, offer.welcome), self._tls
        elif not self._takes_records or {len(key) for key in keys} != {KEY_BYTES}:
            raise PermissionError("it seals records, and this side takes none")
        else:
            ticket, tls = Ticket(offer.ticket, offer.welcome, keys), None

        def is_right(sock: FrameSocket) -> bool:
            return tls is None or expected in sock.names

        async def open_it(make: Callable[[], FrameSocket]) -> None:
            await self._open(make, *there, tls)

        return await _shown(open_it, ticket, is_right, take)

    async def _open(
        self,
        make: Callable[[], FrameSocket],
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
    ) -> None:
        await asyncio.get_running_loop().create_connection(
            make,
            host,
            port,
            ssl=tls,
            server_hostname=None if tls is None else "",
        )


async def _shown(
    open_it: _Open,
    ticket: Ticket,
    is_right: Callable[[FrameSocket], bool],
    take: Take,
) -> FrameSocket:
    """Returns a connection whose other end took the ticket.

    Raises:
      OSError: there is none, it is another's, or the ticket was refused.
      TimeoutError: it took too long.
    """
    welcomed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    seen = bytearray()

    def look(data: memoryview) -> None:
        seen.extend(data)
        if len(seen) >= TICKET_BYTES and not welcomed.done():
            welcomed.set_result(bytes(seen) == ticket.answer)

    def give_up(_: object) -> None:
        if not welcomed.done():
            welcomed.set_result(False)

    sock = FrameSocket(look)
    sock.ended.add_done_callback(give_up)
    is_welcome = False
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            await open_it(lambda: sock)
            if is_right(sock):
                sock.write_now(ticket.number)
                ticket.seal(sock, accepts=False)
                is_welcome = await welcomed
    finally:
        if not is_welcome:
            sock.close()
    if not is_welcome:
        raise ConnectionRefusedError("what listens there is not the task's")
    sock.hand_to(take)
    return sock


def end_late(stream: Stream, ended: "asyncio.Future[None]") -> None:
    """Ends a stream whose socket ended, if it does not say by itself why it does."""
    if ended.exception() is not None:
        stream.cancel()
    else:
        asyncio.get_running_loop().call_later(LAST_WORDS_S, stream.cancel)
