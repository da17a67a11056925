"""Listener for sockets beside gRPC streams: one-time tickets, and a limit on guests."""

import asyncio
import errno
import ipaddress
import logging
import secrets
import socket as sockets
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

from jgraph.rpc.security.refusals import RefusalLog
from jgraph.rpc.sockets.frame_socket import FrameSocket
from jgraph.rpc.sockets.records import Opener, Sealer, new_key

TICKET_BYTES: Final = 32
HANDSHAKE_TIMEOUT_S: Final = 2.0
TICKET_S: Final = 10.0
"""A ticket that was not shown for so long is worthless."""
MAX_GUESTS: Final = 64
"""Connections at once that have not shown a ticket yet; more are closed at once."""
PREFIX: Final = "jgraph-"
KERNEL_BYTES: Final = 512 << 10
"""What the kernel keeps of a Unix socket in each direction."""
_NO_MORE_FILES_S: Final = 1.0
_NO_MORE_FILES: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
)
_logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class Caller:
    """Who has a stream, as far as a socket beside it shows that too.

    Attributes:
      host: its address; empty with TLS, where the certificate says more.
      names: of its certificate; none without TLS.
    """

    host: str = ""
    names: frozenset[str] = frozenset()

    @classmethod
    def of_stream(cls, context: Any) -> "Caller":
        """Returns who has a stream of gRPC."""
        found = context.auth_context().get("x509_subject_alternative_name", ())
        if found:
            return cls(names=frozenset(name.decode(errors="replace") for name in found))
        kind, _, address = context.peer().partition(":")
        if kind not in {"ipv4", "ipv6"}:
            return cls()
        host = address.rpartition(":")[0].replace("%5B", "").replace("%5D", "")
        return cls(host=_plain_host(host.strip("[]")))

    def has(self, guest: FrameSocket) -> bool:
        """Whether a socket is of the same caller."""
        if not guest.keeps:
            return guest.is_same_user
        if self.names:
            return guest.names == self.names
        return self.host == _plain_host(guest.host)


def _plain_host(host: str) -> str:
    """Returns an address of version 4 as such, however it is written.

    Example:
      >>> _plain_host("::ffff:10.0.0.1"), _plain_host("fe80::1%eth0")
      ('10.0.0.1', 'fe80::1')
    """
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return str(getattr(found, "ipv4_mapped", None) or found)


@final
@dataclass(frozen=True, slots=True)
class Ticket:
    """What a caller shows, and what it is answered; each is random.

    Attributes:
      number: shown by the caller.
      answer: to that.
      keys: of records to the accepting side, and back; None: nothing is sealed.
    """

    number: bytes
    answer: bytes
    keys: tuple[bytes, bytes] | None = None

    def seal(self, socket: FrameSocket, *, accepts: bool) -> None:
        """Seals what follows the ticket, if there are keys."""
        if self.keys is not None:
            theirs, ours = self.keys if accepts else self.keys[::-1]
            socket.seal(Sealer(ours), Opener(theirs))


@final
class SocketListener:
    """Where callers of a task connect beside their streams.

    Args:
      tls: what guests must show, and are shown; None: plain text, or records.
      seals: bytes are sealed with keys that travel with the tickets.

    Example:
      >>> from jgraph.rpc._pb import jgraph_pb2 as pb
      >>> from jgraph.rpc.sockets.connecting import connect_local
      >>> async def main():
      ...     listener = SocketListener()
      ...     listener.open(*new_local_socket())
      ...     heard = asyncio.get_running_loop().create_future()
      ...     def welcome(guest):
      ...         guest.hand_to(lambda data: heard.set_result(bytes(data)))
      ...     ticket = listener.offer(Caller(), welcome)
      ...     offer = pb.LocalSocket(
      ...         name=listener.name, ticket=ticket.number, welcome=ticket.answer
      ...     )
      ...     caller = await connect_local(offer, take=print)
      ...     caller.write_now(b"hello")
      ...     print(await heard)
      ...     caller.close()
      ...     listener.close()
      >>> asyncio.run(main())
      b'hello'

    Attributes:
      name: of the Unix socket, if it is one.
      port: of TCP, if it is that.
    """

    def __init__(
        self, tls: ssl.SSLContext | None = None, *, seals: bool = False
    ) -> None:
        self.name = ""
        self.port = 0
        self._tls = tls
        self._seals = seals
        self._is_closed = False
        self._accepting: asyncio.Task[None] | None = None
        self._tickets: dict[
            bytes, tuple[Ticket, Caller, Callable[[FrameSocket], None]]
        ] = {}
        self._guests: set[asyncio.Task[None]] = set()
        self._refusals = RefusalLog(
            _logger,
            "Refused a connection to %s without a ticket; %d so far.",
            logging.INFO,  # a caller on a busy machine may be too slow, and goes on
        )

    def open(self, listening: sockets.socket, name: str = "") -> None:
        """Begins to accept, from what listens.

        Args:
          listening: is closed with this.
          name: of a Unix socket; TCP has none.
        """
        listening.setblocking(False)
        self.name = name
        self.port = 0 if name else listening.getsockname()[1]
        self._accepting = asyncio.create_task(self._accept(listening))
        self._accepting.add_done_callback(lambda _: listening.close())

    def offer(self, caller: Caller, welcome: Callable[[FrameSocket], None]) -> Ticket:
        """Returns what to send to a caller; ``welcome`` gets its connection.

        Only that caller can make a connection with it, one, and soon.
        """
        ticket = Ticket(
            secrets.token_bytes(TICKET_BYTES),
            secrets.token_bytes(TICKET_BYTES),
            (new_key(), new_key()) if self._seals else None,
        )
        self._tickets[ticket.number] = ticket, caller, welcome
        asyncio.get_running_loop().call_later(TICKET_S, self.withdraw, ticket)
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Makes an offer worthless; a connection that was made stays."""
        self._tickets.pop(ticket.number, None)

    def close(self) -> None:
        """Stops listening, and closes what showed no ticket; the rest stays open."""
        self._is_closed = True
        self._tickets.clear()
        if self._accepting is not None:
            self._accepting.cancel()
        for guest in self._guests:
            guest.cancel()

    async def _accept(self, listening: sockets.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:
                if error.errno in _NO_MORE_FILES:  # those who wait go on waiting
                    await asyncio.sleep(_NO_MORE_FILES_S)
                continue
            if len(self._guests) >= MAX_GUESTS:
                connection.close()
                continue
            guest = asyncio.create_task(self._admit(connection))
            self._guests.add(guest)
            guest.add_done_callback(self._guests.discard)

    async def _admit(self, connection: sockets.socket) -> None:
        """Lets a connection in that shows a ticket in time; closes others."""
        loop = asyncio.get_running_loop()
        limit_s = None if self._tls is None else HANDSHAKE_TIMEOUT_S
        ticket: asyncio.Future[None] = loop.create_future()
        ticket_bytes = bytearray()

        def look(data: memoryview) -> None:
            ticket_bytes.extend(data[: TICKET_BYTES + 1 - len(ticket_bytes)])
            if len(ticket_bytes) >= TICKET_BYTES and not ticket.done():
                ticket.set_result(None)
                self._welcome(guest, bytes(ticket_bytes))

        guest, is_connected = FrameSocket(look), False
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await loop.connect_accepted_socket(
                    lambda: guest,
                    connection,
                    ssl=self._tls,
                    ssl_handshake_timeout=limit_s,
                )
                is_connected = True
                await asyncio.wait(
                    {ticket, guest.ended}, return_when=asyncio.FIRST_COMPLETED
                )
        except (OSError, TimeoutError):
            pass  # it did not show what it must
        finally:
            if not is_connected:
                connection.close()
            if not ticket.done():
                self._refuse(guest)

    def _welcome(self, guest: FrameSocket, number: bytes) -> None:
        ticket, caller, welcome = self._tickets.pop(number, (None, None, None))
        if ticket is None or caller is None or welcome is None:
            self._refuse(guest)
            return
        # Who has the keys shows that by its first record.
        if ticket.keys is None and not caller.has(guest):
            self._refuse(guest)
            return
        ticket.seal(guest, accepts=True)
        guest.write_now(ticket.answer)
        welcome(guest)

    def _refuse(self, guest: FrameSocket) -> None:
        guest.close()
        if not self._is_closed:
            self._refusals.add(self.name or f"port {self.port}")


def new_local_socket() -> tuple[sockets.socket, str]:
    """Returns a listening Unix socket and its name, random and in no file system.

    Nothing is left of it, however the process ends.

    Raises:
      OSError: this system has no such sockets.
    """
    if sys.platform != "linux":
        raise OSError("sockets without a file need Linux")
    name = f"{PREFIX}{secrets.token_hex(16)}"
    listener = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    try:
        listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF, KERNEL_BYTES)
        listener.bind(f"\0{name}")
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener, name


def new_data_socket(host: str, port: int) -> sockets.socket:
    """Returns a listening TCP socket of a host's address, at a port (0: a free one).

    As gRPC, it listens at all addresses of both versions of IP for "0.0.0.0".

    Raises:
      OSError: it is no address of this host, or the port is taken.
    """
    if host in {"0.0.0.0", "::"} and sockets.has_dualstack_ipv6():
        try:
            return sockets.create_server(
                ("::", port), family=sockets.AF_INET6, dualstack_ipv6=True
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    found = sockets.getaddrinfo(host, port, type=sockets.SOCK_STREAM)
    family, *_, address = min(found, key=lambda one: one[0] != sockets.AF_INET)
    return sockets.create_server(address[:2], family=family)
