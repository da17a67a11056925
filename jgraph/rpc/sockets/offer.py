"""Offer of a socket beside one gRPC stream, and the connection made with it."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import final

from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.sockets.frame_socket import FrameSocket, Room, Take
from jgraph.rpc.sockets.listener import (
    HANDSHAKE_TIMEOUT_S,
    Caller,
    SocketListener,
    Ticket,
)


class SocketEnded(Exception):  # noqa: N818  # perhaps it goes on over another
    """The socket beside a stream broke, so the stream ends too."""


@final
@dataclass(frozen=True, slots=True)
class Doors:
    """Where callers of a task may connect beside their streams; None: nowhere.

    Attributes:
      local: those of this machine and user.
      data: others.
    """

    local: SocketListener | None = None
    data: SocketListener | None = None

    def close(self) -> None:
        """Stops listening."""
        for listener in (self.local, self.data):
            if listener is not None:
                listener.close()


@final
class SocketOffer:
    """Offers sockets to the caller of a stream, and reads the one that it takes.

    The first byte from the other side says that it uses the connection. One that waited
    too long for the welcome, as on a machine that is busy, has closed it, and goes on
    over the stream alone.

    Args:
      caller: who has the stream.
      room: says where bytes belong that arrive; see ``FrameSocket.hand_to``.
      take: gets the bytes.
      used: gets the connection as soon as it is used, before these bytes.

    Attributes:
      socket: the connection that is used; None: none yet.
    """

    def __init__(
        self,
        caller: Caller,
        room: Room,
        take: Take,
        used: Callable[[FrameSocket], None] = lambda _: None,
    ) -> None:
        self.socket: FrameSocket | None = None
        self._caller = caller
        self._room = room
        self._take = take
        self._used = used
        self._tickets: list[tuple[SocketListener, Ticket]] = []
        self._arrived: FrameSocket | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def put_into(self, hello: pb.Hello, doors: Doors, *, is_near: bool) -> None:
        """Offers sockets in the Hello that answers the caller.

        Args:
          hello: gets the offers.
          doors: where there are sockets.
          is_near: the caller may be a process of this machine.
        """
        if doors.local is not None and is_near:
            ticket = self._offer(doors.local)
            hello.local_socket.name = doors.local.name
            hello.local_socket.ticket = ticket.number
            hello.local_socket.welcome = ticket.answer
        if doors.data is not None:
            ticket = self._offer(doors.data)
            hello.data_socket.port = doors.data.port
            hello.data_socket.ticket = ticket.number
            hello.data_socket.welcome = ticket.answer
            if ticket.keys is not None:
                to_accepting, to_dialing = ticket.keys
                hello.data_socket.key_to_accepting = to_accepting
                hello.data_socket.key_to_dialing = to_dialing

    @property
    def is_local(self) -> bool:
        """Whether a Unix socket is used: only the end of a process ends it."""
        return self.socket is not None and not self.socket.keeps

    def _offer(self, listener: SocketListener) -> Ticket:
        ticket = listener.offer(self._caller, self._welcome)
        self._tickets.append((listener, ticket))
        return ticket

    def _withdraw(self) -> None:
        for listener, ticket in self._tickets:
            listener.withdraw(ticket)
        self._tickets.clear()

    def _welcome(self, socket: FrameSocket) -> None:
        before = self._arrived
        if self._over.done() or (before is not None and not before.ended.done()):
            socket.close()  # the stream ended meanwhile, or there is one
            return
        self._arrived = socket
        socket.hand_to(partial(self._first, socket))

    def _first(self, socket: FrameSocket, data: memoryview) -> None:
        self._withdraw()
        self.socket = socket
        socket.ended.add_done_callback(self._ended)
        socket.hand_to(self._take, self._room)
        self._used(socket)
        self._take(data)

    def _ended(self, ended: "asyncio.Future[None]") -> None:
        if self._over.done():
            return
        error = ended.exception()
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)
            self._over.exception()  # seen: the stream may end first

    async def beside(
        self, reading: Coroutine[None, None, None], is_over: Callable[[], bool]
    ) -> None:
        """Waits until a stream, and then the socket, has been read to its end.

        Args:
          reading: reads the stream.
          is_over: whether the other side has said all that it wants to.

        Raises:
          SocketEnded: the socket ended, and the other side was not over.
          JGError: what ``reading`` or ``take`` raises.
        """
        stream = asyncio.create_task(reading)
        try:
            await asyncio.wait(
                {stream, self._over}, return_when=asyncio.FIRST_COMPLETED
            )
            if self._over.done():
                self._over.result()
                if not is_over():
                    raise SocketEnded
            await stream
            if self.socket is not None:
                # It was closed first, but what was sent may not be read yet.
                with suppress(TimeoutError):
                    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                        await asyncio.shield(self._over)
        finally:
            stream.cancel()
            await asyncio.wait({stream})

    def close(self) -> None:
        """Ends the connection, and makes what was offered worthless."""
        self._withdraw()
        self._over.cancel()
        if self._arrived is not None:
            self._arrived.close()
