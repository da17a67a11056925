"""What listens for sockets beside streams, of each kind, and who connects to it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.security.tls import TLS
from jgraph.rpc.sockets.connecting import DataDialer, connect_local
from jgraph.rpc.sockets.frame_socket import FrameSocket, Take
from jgraph.rpc.sockets.listener import (
    Caller,
    SocketListener,
    Ticket,
    new_data_socket,
    new_local_socket,
)
from jgraph.rpc.sockets.offer import Doors
from jgraph.testing.transport_harness import PS, WORKER

Kind = Literal["unix", "tcp", "tls"]
KINDS: tuple[Kind, ...] = ("unix", "tcp", "tls")
CALLERS = {
    "unix": Caller(),
    "tcp": Caller(host="127.0.0.1"),
    "tls": Caller(names=frozenset({"worker-0.jgraph", "task.jgraph"})),
}


def ignore(data: memoryview) -> None:
    """Takes bytes that do not matter."""


@dataclass
class Door:
    """A listener of a ps, and a worker that connects to it."""

    kind: Kind
    listener: SocketListener
    dialer: DataDialer

    @property
    def caller(self) -> Caller:
        return CALLERS[self.kind]

    @property
    def doors(self) -> Doors:
        if self.kind == "unix":
            return Doors(local=self.listener)
        return Doors(data=self.listener)

    def offer(self, welcome: Callable[[FrameSocket], None]) -> Ticket:
        return self.listener.offer(self.caller, welcome)

    async def connect(self, ticket: Ticket, take: Take = ignore) -> FrameSocket | None:
        shown, welcome = ticket.number, ticket.answer
        if self.kind == "unix":
            name = self.listener.name
            local = pb.LocalSocket(name=name, ticket=shown, welcome=welcome)
            return await connect_local(local, take)
        port = self.listener.port
        data = pb.DataSocket(port=port, ticket=shown, welcome=welcome)
        return await self.dialer.connect("127.0.0.1:1", data, PS, take)

    async def greeted(self, hello: pb.Hello) -> FrameSocket | None:
        """Connects as an answering Hello says."""
        if hello.HasField("local_socket"):
            local = hello.local_socket
            return await self.connect(Ticket(local.ticket, local.welcome))
        data = hello.data_socket
        return await self.connect(Ticket(data.ticket, data.welcome))

    def raw(self) -> tuple[socket.socket, str | tuple[str, int]]:
        """Returns a bare socket, and what to connect it to."""
        if self.kind == "unix":
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            where: str | tuple[str, int] = f"\0{self.listener.name}"
        else:
            made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            where = "127.0.0.1", self.listener.port
        made.setblocking(False)
        return made, where

    async def hung_up(self, said: bytes) -> bool:
        """Whether it ends a connection that says this, without TLS."""
        loop = asyncio.get_running_loop()
        raw, where = self.raw()
        with raw:
            await loop.sock_connect(raw, where)
            await loop.sock_sendall(raw, said)
            try:
                async with asyncio.timeout(20):
                    while await loop.sock_recv(raw, 64):
                        pass  # an alert of TLS
            except ConnectionError:
                pass
            return True


@asynccontextmanager
async def opened(kind: Kind, certificates: Path) -> AsyncIterator[Door]:
    accepts = dials = None
    if kind == "tls":
        accepts = TLS.of(certificates, PS).load(PS).data_context(accepts=True)
        dials = TLS.of(certificates, WORKER).load(WORKER).data_context(accepts=False)
    listener = SocketListener(accepts)
    if kind == "unix":
        listener.open(*new_local_socket())
    else:
        listener.open(new_data_socket("127.0.0.1", 0))
    try:
        yield Door(kind, listener, DataDialer(dials))
    finally:
        listener.close()
