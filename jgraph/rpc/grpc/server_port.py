"""Port of a gRPC server, with its TLS and token, and the sockets beside it."""

import asyncio
import ssl
from typing import Final, final

import grpc

from jgraph.rpc.dial import bind_error, split_address
from jgraph.rpc.grpc.listening import listen, server_options, stop_listening
from jgraph.rpc.security.auth import TokenGate
from jgraph.rpc.security.tls import Identity
from jgraph.rpc.security.token import Token
from jgraph.rpc.sockets.listener import (
    SocketListener,
    new_data_socket,
    new_local_socket,
)
from jgraph.rpc.sockets.offer import Doors
from jgraph.rpc.transport import Address

STOP_GRACE_S: Final = 1.0
"""How long ``close`` waits for streams that it ended to be over."""
MAX_CONCURRENT_STREAMS: Final = 4096
"""More streams and calls at once are refused at once, instead of queueing."""


@final
class ServerPort:
    """Listens for streams, and for connections of those that have one.

    Args:
      bind: ``host:port``; port 0 takes a free one.
      data_port: of a TCP connection beside a stream, 0 for a free one; None: there is
        none.
      identity: certificates that are shown and demanded; None: plain text.
      token: callers must show it; None: nobody has to.
      seals: with ``identity``, the data port takes sealed records, and no TLS.
    """

    def __init__(
        self,
        bind: Address,
        data_port: int | None,
        identity: Identity | None,
        token: Token | None,
        *,
        seals: bool,
    ) -> None:
        self._bind = bind
        self._data_port = data_port
        self._identity = identity
        self._token = token
        self._seals = self.has_tls and seals
        self._listening: asyncio.Task[None] | None = None

    @property
    def has_tls(self) -> bool:
        """Whether callers show certificates."""
        return self._identity is not None

    def open_doors(self, *, near: bool) -> Doors:
        """Listens where callers connect beside their streams; ``listen`` follows.

        Args:
          near: also over a Unix socket.

        Raises:
          AddressError: ``bind`` is not an address of this machine.
          PortInUseError: another process listens at the data port.
        """
        local = data = None
        try:
            if self._data_port is not None:
                data = self._data_door(self._data_port)
            if near:
                local = SocketListener()
                local.open(*new_local_socket())
        except BaseException:
            Doors(local, data).close()
            raise
        return Doors(local, data)

    def _data_door(self, port: int) -> SocketListener:
        context: ssl.SSLContext | None = None
        if self._identity is not None and not self._seals:
            context = self._identity.data_context(accepts=True)
        door = SocketListener(context, seals=self._seals)
        try:
            door.open(new_data_socket(split_address(self._bind)[0], port))
        except OSError as error:
            raise bind_error(self._address(port)) from error
        return door

    async def listen(
        self, handler: "grpc.GenericRpcHandler[bytes, bytes]", doors: Doors
    ) -> Address:
        """Serves streams, until ``close`` ends them and the doors; returns where.

        Raises:
          PortInUseError: another process listens there.
        """
        server = grpc.aio.server(
            interceptors=() if self._token is None else (TokenGate(self._token),),
            options=server_options(),
            maximum_concurrent_rpcs=MAX_CONCURRENT_STREAMS,
        )
        server.add_generic_rpc_handlers((handler,))
        try:
            if self._identity is None:
                port = server.add_insecure_port(self._bind)
            else:
                secret = self._identity.server_credentials()
                port = server.add_secure_port(self._bind, secret)
        except RuntimeError as error:
            doors.close()
            await server.stop(None)
            raise bind_error(self._bind) from error
        self._listening = await listen(server, grace_s=STOP_GRACE_S, then=doors.close)
        return self._address(int(port))

    async def close(self) -> None:
        """Ends what is served, and waits until the port is free."""
        if self._listening is not None:
            await stop_listening(self._listening)

    def _address(self, port: int) -> Address:
        return f"{self._bind.rpartition(':')[0]}:{port}"
