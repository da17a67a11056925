"""Sending side of a pair of tasks: posted frames over one link."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Final, final

from jgraph.errors import MalformedMessageError
from jgraph.graph.device import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.dial import ended_link
from jgraph.rpc.frames import kind_of
from jgraph.rpc.resumable.backlog import Backlog
from jgraph.rpc.resumable.dialing import DialingEnd, LinkLost, OpenStream
from jgraph.rpc.resumable.outbox import Outbox
from jgraph.rpc.shared_memory.lending import SHARED_FRAME_BYTES, lend
from jgraph.rpc.shared_memory.shared_memory import SendMemory
from jgraph.rpc.sockets.connecting import DataDialer
from jgraph.rpc.statistics import Counters
from jgraph.rpc.transport import Address, Frame
from jgraph.rpc.wire.codec import Encoded, Prepared
from jgraph.rpc.wire.decoder import Decoder

EXCHANGE_METHOD: Final = "/jgraph.v1.Task/Exchange"


@final
class ExchangeLink:
    """Sends frames to one task, in the order of ``push``, each of them once.

    Args:
      peer: the task that should be at ``address``.
      address: its ``host:port``.
      hello: who we are.
      counters: where sent frames are counted.
      make_memory: gives memory to share with a task of the same machine, or None:
        nothing goes around the stream.
      numbers: of the frames.
      max_queued_bytes: more than this does not wait for the peer.
      open_stream: connects to the peer.
      near: take a socket that the peer offers to tasks of its machine.
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
        open_stream: OpenStream,
        *,
        near: bool,
        data: DataDialer | None,
    ) -> None:
        self.peer = peer
        self.address = address
        self._counters = counters
        backlog = Backlog[Prepared](hello.task, peer, address, max_queued_bytes)

        def moved(nbytes: int) -> None:
            counters.sent(peer, nbytes=nbytes)

        self._outbox = Outbox(backlog, self._encoded, numbers=numbers, moved=moved)
        self._end = DialingEnd(
            *(address, hello, self._outbox, open_stream, Decoder, self._refuse),
            task=peer,
            near=near,
            data=data,
            make_memory=make_memory,
            lend=self._lent,
            leads=lambda way: counters.leads(peer, way),
        )

    def push(self, item: Prepared) -> None:
        """Queues a frame, or sends it if it is small and can leave; never blocks.

        Raises:
          NotTakingError: too much waits already.
        """
        self._outbox.put(item, item.values_of)

    def withdraw(self, step: Hashable) -> int:
        """Drops queued values of a step; returns how many frames."""
        return self._outbox.backlog.withdraw(step)

    def when_sent(self, callback: Callable[[], None]) -> None:
        """Calls back once nothing is on its way, or the link has ended."""
        self._outbox.when_sent(callback)

    def clear(self) -> None:
        """Drops everything, and tells those whom ``when_sent`` has to call back."""
        self._outbox.clear()

    def finish(self) -> None:
        """Lets ``run`` end when everything queued is sent."""
        self._outbox.finish()

    async def run(self) -> None:
        """Connects and sends until ``finish``.

        Raises:
          TaskLostError: the connection broke, and could not be made again.
          JGError: as ``DialingEnd.run``.
        """
        try:
            await self._end.run()
        except LinkLost as lost:
            raise ended_link(self.peer, self.address, lost.why) from lost
        finally:
            self._counters.leads(self.peer, "")

    def _encoded(self, item: Prepared, number: int) -> Encoded:
        self._counters.sent(self.peer, frames=1)
        return item.encoded(sequence=number)

    async def _lent(self, memory: SendMemory, item: Prepared, number: int) -> Encoded:
        lent: Mapping[int, pb.SharedBlock] = {}
        if item.nbytes >= SHARED_FRAME_BYTES:
            lent = await lend(item, memory)
        shared = sum(item.arrays[at].nbytes for at in lent)
        self._counters.sent(self.peer, frames=1, shared=shared)
        return item.encoded(lent, sequence=number)

    def _refuse(self, arrived: Frame) -> None:
        raise MalformedMessageError(
            f"{self.address} answered a connection with '{kind_of(arrived)}'"
        )
