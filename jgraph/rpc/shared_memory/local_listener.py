"""Local listener: accepts Unix-socket connections that belong to gRPC streams."""

import asyncio
import secrets
import sys
from collections.abc import Callable, Coroutine
from typing import Final, final

from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.shared_memory.local_socket import (
    HANDSHAKE_TIMEOUT_S,
    PREFIX,
    TICKET_BYTES,
    LocalSocket,
    Take,
    new_socket,
)

MAX_GUESTS: Final = 64
"""Connections at once that have not shown a ticket yet; more are closed at once."""


@final
class LocalListener:
    """Where processes of this machine connect to a task.

    Example:
      >>> from jgraph.rpc.shared_memory.local_socket import connect
      >>> async def main():
      ...     door = LocalListener()
      ...     await door.open()
      ...     heard = asyncio.get_running_loop().create_future()
      ...     def welcome(guest):
      ...         guest.hand_to(lambda data: heard.set_result(bytes(data)))
      ...     caller = await connect(door.offer(welcome), take=print)
      ...     caller.write_now(b"hello")
      ...     print(await heard)
      ...     caller.close()
      ...     door.close()
      >>> asyncio.run(main())
      b'hello'
    """

    def __init__(self) -> None:
        self._name = PREFIX + secrets.token_hex(16)
        self._server: asyncio.AbstractServer | None = None
        self._offers: dict[bytes, tuple[bytes, Callable[[LocalSocket], None]]] = {}
        self._guests: set[LocalSocket] = set()

    async def open(self) -> None:
        """Begins to listen.

        Raises:
          OSError: this system has no such sockets.
        """
        if sys.platform != "linux":
            raise OSError("sockets without a file need Linux")
        listening = new_socket()
        try:
            listening.bind(f"\0{self._name}")
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(self._guest, sock=listening)
        except BaseException:
            listening.close()
            raise

    def offer(self, welcome: Callable[[LocalSocket], None]) -> pb.LocalSocket:
        """Returns what to send to a caller; ``welcome`` gets its connection.

        Only one connection can be made with it, until it is withdrawn.
        """
        made = pb.LocalSocket(
            name=self._name,
            ticket=secrets.token_bytes(TICKET_BYTES),
            welcome=secrets.token_bytes(TICKET_BYTES),
        )
        self._offers[made.ticket] = made.welcome, welcome
        return made

    def withdraw(self, offer: pb.LocalSocket) -> None:
        """Makes an offer worthless; a connection that was made stays."""
        self._offers.pop(offer.ticket, None)

    def close(self) -> None:
        """Stops listening, and closes what showed no ticket; the rest stays open."""
        if self._server is not None:
            self._server.close()
        self._server = None
        self._offers.clear()
        for guest in list(self._guests):
            guest.close()

    def _guest(self) -> LocalSocket:
        shown = bytearray()
        guest = LocalSocket(lambda data: self._look(guest, shown, data))
        self._guests.add(guest)
        guest.ended.add_done_callback(lambda _: self._guests.discard(guest))
        loop = asyncio.get_running_loop()
        limit = HANDSHAKE_TIMEOUT_S if len(self._guests) <= MAX_GUESTS else 0.0
        loop.call_later(limit, self._lose_patience, guest)
        return guest

    def _lose_patience(self, guest: LocalSocket) -> None:
        if guest in self._guests:
            guest.close()

    def _look(self, guest: LocalSocket, shown: bytearray, data: memoryview) -> None:
        shown += data
        if len(shown) < TICKET_BYTES:
            return
        answer, welcome = self._offers.pop(bytes(shown), (b"", None))
        self._guests.discard(guest)
        if welcome is None or not guest.is_same_user:
            guest.close()
            return
        guest.write_now(answer)
        welcome(guest)


@final
class LocalOffer:
    """The offer that goes with one stream, and the connection made with it.

    The first byte from the other side says that it uses the connection. One that waited
    too long for the welcome, as on a machine that is busy, has closed it, and goes on
    over the stream alone.

    Args:
      door: where to connect.
      take: gets the bytes that arrive.
      welcome: gets the connection as soon as it is used, before these bytes.

    Attributes:
      message: what to send to the caller.
    """

    def __init__(
        self,
        door: LocalListener,
        take: Take,
        welcome: Callable[[LocalSocket], None] = lambda _: None,
    ) -> None:
        self.message = door.offer(self._arrived)
        self._door = door
        self._take = take
        self._welcome = welcome
        self._socket: LocalSocket | None = None
        self._is_used = False
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def was_taken(self) -> bool:
        """Whether a connection was made with it, and is used."""
        return self._is_used

    def _arrived(self, socket: LocalSocket) -> None:
        socket.hand_to(self._first)
        socket.ended.add_done_callback(self._ended)
        self._socket = socket

    def _first(self, data: memoryview) -> None:
        assert self._socket is not None  # which these bytes came over
        self._is_used = True
        self._socket.hand_to(self._take)
        self._welcome(self._socket)
        self._take(data)

    def _ended(self, ended: "asyncio.Future[None]") -> None:
        error = ended.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()  # seen: the stream may end first

    async def beside(self, reading: Coroutine[None, None, None]) -> None:
        """Waits until a stream, and then the socket, has been read to its end.

        Raises: what ``reading`` or ``take`` raises.
        """
        stream = asyncio.create_task(reading)
        try:
            await asyncio.wait(
                {stream, self._failed}, return_when=asyncio.FIRST_COMPLETED
            )
            if stream.done():
                stream.result()
                if self._socket is not None:
                    # It was closed first, but what was sent may not be read yet.
                    await asyncio.wait(
                        {self._socket.ended}, timeout=HANDSHAKE_TIMEOUT_S
                    )
            if self._failed.done():
                self._failed.result()
        finally:
            self._door.withdraw(self.message)
            self._failed.cancel()
            if self._socket is not None:
                self._socket.close()
            stream.cancel()
            await asyncio.wait({stream})
