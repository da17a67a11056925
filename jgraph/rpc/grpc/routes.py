"""Streams to tasks: over a gRPC channel, over one that a task offered, or a relay."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import final

from jgraph.errors import ClusterUnreachableError
from jgraph.graph.device import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.calls.caller import ASKS_METHOD
from jgraph.rpc.dial import CONNECT_TIMEOUT_S
from jgraph.rpc.dial_only.address import is_dial_only
from jgraph.rpc.dial_only.offered_streams import OfferedStreams
from jgraph.rpc.dial_only.offering import Offering, Serve
from jgraph.rpc.dial_only.relay import OF, RELAY_METHOD, TO
from jgraph.rpc.exchange.link import EXCHANGE_METHOD
from jgraph.rpc.grpc.channels import Channels
from jgraph.rpc.resumable.dialing import OpenStream
from jgraph.rpc.sockets.pipe import Stream
from jgraph.rpc.transport import Address


@final
class Routes:
    """Opens streams to addresses, whichever way leads there.

    Args:
      channels: to servers.
      hello: says who this process is.
      listens: tasks that only dial can offer streams to this process.

    Attributes:
      offered: streams that such tasks keep ready here.
    """

    def __init__(self, channels: Channels, hello: pb.Hello, *, listens: bool) -> None:
        self._channels = channels
        self._hello = hello
        self._listens = listens
        self._offering: Offering | None = None
        self.offered = OfferedStreams()

    def offer(self, serve: Serve) -> None:
        """Offers streams to all peers, as nothing of this process listens."""
        self._offering = Offering(self._hello, self._channels, serve)

    def set_peers(self, peers: dict[TaskName, Address]) -> None:
        """Tells where other tasks are."""
        if self._offering is not None:
            self._offering.set_peers(peers)

    async def reach(self, dst: Address, timeout_s: float) -> None:
        """Makes sure that a server can be asked.

        Raises:
          JGError: why it cannot.
        """
        if is_dial_only(dst) and self._listens:
            await self.offered.wait(dst, min(CONNECT_TIMEOUT_S, timeout_s))
        else:
            where = self._relay_to(dst) if is_dial_only(dst) else dst
            await self._channels.shared(where, timeout_s)

    @asynccontextmanager
    async def frames(
        self, peer: TaskName, address: Address, patient: bool
    ) -> AsyncIterator[Stream]:
        """Opens a stream for frames to a task, over a channel of its own."""
        if is_dial_only(address):
            async with self._back(address, "Exchange") as stream:
                yield stream
            return
        channel = await self._channels.open(
            address, CONNECT_TIMEOUT_S, task=peer, patient=patient
        )
        try:
            yield self._channels.stream(channel, EXCHANGE_METHOD)
        finally:
            await channel.close(None)

    @asynccontextmanager
    async def calls(self, dst: Address, patient: bool) -> AsyncIterator[Stream]:
        """Opens a stream for calls to a server, over the channel of all calls to it."""
        del patient  # who asks waits for a server that starts
        if is_dial_only(dst):
            async with self._back(dst, "Asks") as stream:
                yield stream
            return
        channel = await self._channels.shared(dst, CONNECT_TIMEOUT_S)
        yield self._channels.stream(channel, ASKS_METHOD)

    @asynccontextmanager
    async def calls_now(
        self, dst: Address, timeout_s: float
    ) -> AsyncIterator[OpenStream]:
        """Opens a channel for calls to who is at an address now.

        A channel of before leads to who was there then. The address of a task that only
        dials is of one process, so any leads to that.
        """
        if is_dial_only(dst):
            yield partial(self.calls, dst)
            return
        channel = await self._channels.open(dst, timeout_s)

        @asynccontextmanager
        async def over_it(patient: bool) -> AsyncIterator[Stream]:
            del patient  # it is open
            yield self._channels.stream(channel, ASKS_METHOD)

        try:
            yield over_it
        finally:
            await channel.close(None)

    async def close(self) -> None:
        """Offers nothing more, and closes the channels."""
        if self._offering is not None:
            await self._offering.close()
        await self._channels.close()

    def _relay_to(self, dst: Address) -> Address:
        """Returns a task that passes on to one that only dials.

        Raises:
          ClusterUnreachableError: none is known here.
        """
        dialled = self._offering.addresses if self._offering is not None else []
        known = [*self._channels.connected, *dialled]
        if not known:
            raise ClusterUnreachableError(
                f"{dst} only dials: nothing listens there, and no task is known here "
                "that passes on what is said to it; connect to another task of its "
                "cluster",
                address=dst,
            )
        return known[0]

    @asynccontextmanager
    async def _back(self, dst: Address, method: str) -> AsyncIterator[Stream]:
        """Gives a stream to a task that only dials: one that it offered, or a relay."""
        if self._listens:
            async with self.offered.take(dst, method, (), CONNECT_TIMEOUT_S) as offered:
                yield offered
            return
        relay = self._relay_to(dst)
        channel = await self._channels.shared(relay, CONNECT_TIMEOUT_S)
        yield self._channels.stream(channel, RELAY_METHOD, (TO, dst), (OF, method))
