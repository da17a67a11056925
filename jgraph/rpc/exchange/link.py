"""Sending side of a pair of tasks: one long-lived Exchange stream, resumed if cut."""

from collections.abc import Callable, Hashable
from typing import Final, final

from jgraph.errors import AddressError, ClusterUnreachableError, JGError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.dial import CONNECT_TIMEOUT_S, open_channel
from jgraph.rpc.exchange.backlog import Backlog
from jgraph.rpc.exchange.stream import ExchangeStream, Interrupted, Outgoing
from jgraph.rpc.resuming import RESUME_S, may_redial
from jgraph.rpc.security.tls import Identity
from jgraph.rpc.security.token import Token
from jgraph.rpc.shared_memory.shared_memory import SendMemory
from jgraph.rpc.sockets.connecting import DataDialer
from jgraph.rpc.sockets.frame_socket import AT_ONCE_BYTES
from jgraph.rpc.statistics import Counters
from jgraph.rpc.transport import Address
from jgraph.rpc.wire.codec import Prepared

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
      number: gives the sequence number of the next frame.
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
        number: Callable[[], int],
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
        self._out = Outgoing(peer, address, hello, backlog, counters, number)

    def push(self, item: Prepared) -> None:
        """Queues a frame, or sends it if it is small and can leave; never blocks.

        Raises:
          NotTakingError: too much waits already.
        """
        out = self._out
        socket = out.idle_socket
        if (
            socket is not None
            and socket.is_free
            and item.nbytes <= AT_ONCE_BYTES
            and not out.kept.is_full
        ):
            number = out.number()
            if socket.keeps:
                out.kept.add(number, item, item.nbytes)
            data = b"".join(item.encoded(sequence=number).pieces)
            socket.write_now(data)
            out.counters.sent(self.peer, frames=1, nbytes=len(data))
            return
        out.backlog.add(item, item.nbytes, step=item.values_of, now=out.now())
        out.idle_socket = None
        out.wake.set()

    def withdraw(self, step: Hashable) -> int:
        """Drops queued values of a step; returns how many frames."""
        return self._out.backlog.withdraw(step)

    def finish(self) -> None:
        """Lets ``run`` end when everything queued is sent."""
        self._out.is_finishing = True
        self._out.wake.set()

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
        until = self._out.now() + RESUME_S
        try:
            while True:
                try:
                    return await self._stream(patient=lost is None)
                except Interrupted as interrupted:
                    if interrupted.was_accepted:
                        until = self._out.now() + RESUME_S
                    lost = interrupted.error
                except (AddressError, ClusterUnreachableError):
                    # Later a name may be unknown for a moment as well.
                    if lost is None or not self._out.incarnation:
                        raise
                if not await may_redial(self.address, until, self._out.now):
                    raise lost
        finally:
            self._out.backlog.clear()
            self._out.kept.clear()

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
