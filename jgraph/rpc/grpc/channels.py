"""Connected gRPC channels of one process to servers, and streams over them."""

import asyncio
from functools import partial
from typing import final

import grpc

from jgraph.rpc.dial import (
    CONNECT_TIMEOUT_S,
    diagnose,
    is_cancelled,
    lost_call,
    open_channel,
)
from jgraph.rpc.security.tls import Identity
from jgraph.rpc.security.token import Token
from jgraph.rpc.sockets.pipe import Stream
from jgraph.rpc.transport import Address


@final
class Channels:
    """Opens channels, and shares one for all calls to a server.

    Args:
      identity: certificates that are shown and demanded; None: plain text.
      token: shown to servers.
    """

    def __init__(self, identity: Identity | None, token: Token | None) -> None:
        self._identity = identity
        self._token = token
        self._shared: dict[Address, asyncio.Task[grpc.aio.Channel]] = {}

    async def shared(self, dst: Address, timeout_s: float) -> grpc.aio.Channel:
        """Returns the connected channel to ``dst``, shared by all calls to it.

        Each waits for it no longer than its own ``timeout_s``.

        Raises:
          JGError: as ``open_channel``, or that this side closed meanwhile.
        """
        opening = self._shared.get(dst)
        if opening is not None and opening.done():
            channel = opening.result()
            if channel.get_state() is grpc.ChannelConnectivity.READY:
                return channel
            del self._shared[dst]
            await channel.close(None)
            opening = self._shared.get(dst)
        if opening is None:
            opening = asyncio.create_task(self.open(dst, CONNECT_TIMEOUT_S))
            self._shared[dst] = opening
            opening.add_done_callback(partial(self._forget_failed, dst))
        limit = asyncio.timeout(timeout_s if timeout_s < CONNECT_TIMEOUT_S else None)
        try:
            async with limit:
                return await asyncio.shield(opening)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise await diagnose(
                dst, timeout_s=timeout_s, identity=self._identity
            ) from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise lost_call("a call", dst, closed_here=True) from None

    async def open(
        self, dst: Address, timeout_s: float, *, task: str = "", patient: bool = False
    ) -> grpc.aio.Channel:
        """Opens a channel of its own; see ``open_channel``."""
        return await open_channel(
            dst,
            timeout_s=timeout_s,
            patient=patient,
            task=task,
            identity=self._identity,
            token=self._token,
        )

    @property
    def connected(self) -> list[Address]:
        """Servers to which there is a shared channel."""
        return [
            address
            for address, opening in self._shared.items()
            if opening.done()
            and opening.result().get_state() is grpc.ChannelConnectivity.READY
        ]

    def stream(
        self, channel: grpc.aio.Channel, method: str, *extra: tuple[str, str]
    ) -> Stream:
        """Begins a stream that shows the token.

        Args:
          channel: to the server.
          method: of the stream.
          *extra: further metadata.
        """
        identity = self._token.metadata if self._token is not None else ()
        return channel.stream_stream(method, None, None)(
            None, metadata=(*identity, *extra)
        )

    async def close(self) -> None:
        """Closes the channels that are shared."""
        for opening in list(self._shared.values()):
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            if not opening.cancelled() and opening.exception() is None:
                await opening.result().close(None)

    def _forget_failed(
        self, dst: Address, opening: "asyncio.Task[grpc.aio.Channel]"
    ) -> None:
        if opening.cancelled() or opening.exception() is not None:
            self._shared.pop(dst, None)
