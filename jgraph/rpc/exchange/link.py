"""Sending side of a pair of tasks: one long-lived Exchange stream, resumed if cut."""

import asyncio
from collections.abc import Callable, Hashable, Iterator
from typing import Final, final

from jgraph.errors import AddressError, ClusterUnreachableError, JGError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.dial import CONNECT_TIMEOUT_S, open_channel
from jgraph.rpc.exchange.stream import ExchangeStream, Interrupted, Outgoing
from jgraph.rpc.resumable.backlog import Backlog
from jgraph.rpc.resumable.outbox import Outbox
from jgraph.rpc.resuming import RESUME_S, may_redial
from jgraph.rpc.security.tls import Identity
from jgraph.rpc.security.token import Token
from jgraph.rpc.shared_memory.shared_memory import SendMemory
from jgraph.rpc.sockets.connecting import DataDialer
from jgraph.rpc.statistics import Counters
from jgraph.rpc.transport import Address
from jgraph.rpc.wire.codec import Encoded, Prepared

EXCHANGE_METHOD: Final = "/jgraph.v1.Task/Exchange"


@final
class ExchangeLink:
    """Sends frames to one task, in the order of ``push``, each of them once.

    A connection that breaks is made again, and what the task has not got is sent again;
    not if nobody listens at its address any more, or another incarnation of it does.

    Args:
      peer: the task that should be at ``address``.
      address: its ``host:port``.
      hello: who we are.
      counters: where sent frames are counted.
      make_memory: gives memory to share with a task of the same machine, or None:
        nothing goes around the stream.
      numbers: of the frames.
      max_queued_bytes: more than this does not wait for the peer.
      identity: certificates; None speaks plain text.
      token: what the peer asks for; None: nothing.
      data: connects to its data port; None: nothing does.
    """

    def __init__(
        self,
        peer: TaskName,
        address: Address,
        hello: pb.Hello,
        counters: Counters,
        make_memory: Callable[[], SendMemory | None],
        numbers: Iterator[int],
        max_queued_bytes: int,
        identity: Identity | None = None,
        token: Token | None = None,
        data: DataDialer | None = None,
    ) -> None:
        self.peer = peer
        self.address = address
        self._make_memory = make_memory
        self._identity = identity
        self._token = token
        self._data = data
        backlog = Backlog[Prepared](hello.task, peer, address, max_queued_bytes)

        def encode(item: Prepared, number: int) -> Encoded:
            counters.sent(peer, frames=1)
            return item.encoded(sequence=number)

        def moved(nbytes: int) -> None:
            counters.sent(peer, nbytes=nbytes)

        outbox = Outbox(backlog, encode, numbers=numbers, moved=moved)
        self._outbox = outbox
        self._out = Outgoing(peer, address, hello, outbox, counters)
        self._now = asyncio.get_running_loop().time

    def push(self, item: Prepared) -> None:
        """Queues a frame, or sends it if it is small and can leave; never blocks.

        Raises:
          NotTakingError: too much waits already.
        """
        self._outbox.put(item, item.values_of)

    def withdraw(self, step: Hashable) -> int:
        """Drops queued values of a step; returns how many frames."""
        return self._outbox.backlog.withdraw(step)

    def finish(self) -> None:
        """Lets ``run`` end when everything queued is sent."""
        self._outbox.finish()

    async def run(self) -> None:
        """Connects and sends until ``finish``.

        Raises:
          AddressError: the host of the address does not resolve.
          ClusterUnreachableError: the task is not at its address.
          TaskLostError: the connection broke, and could not be made again.
          VersionError: the other side speaks another version of the protocol.
          JGError: why the other side ended the stream.
        """
        lost: JGError | None = None
        until = self._now() + RESUME_S
        try:
            while True:
                try:
                    return await self._stream(patient=lost is None)
                except Interrupted as interrupted:
                    if interrupted.was_accepted:
                        until = self._now() + RESUME_S
                    lost = interrupted.error
                except (AddressError, ClusterUnreachableError) as error:
                    # Later a name may be unknown for a moment as well.
                    is_other = error.details.get("may_be_starting") is None
                    known = self._out.incarnation or isinstance(error, AddressError)
                    if lost is None or (is_other and not known):
                        raise
                if not await may_redial(self.address, until, self._now):
                    raise lost
        finally:
            self._outbox.clear()

    async def _stream(self, *, patient: bool) -> None:
        channel = await open_channel(
            self.address,
            timeout_s=CONNECT_TIMEOUT_S,
            patient=patient,
            task=self.peer,
            identity=self._identity,
            token=self._token,
        )
        try:
            stream = channel.stream_stream(EXCHANGE_METHOD, None, None)(
                None, metadata=self._token.metadata if self._token else None
            )
            await ExchangeStream(
                self._out, stream, self._make_memory(), self._data
            ).run()
        finally:
            await channel.close(None)
