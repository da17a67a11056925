"""One Exchange stream to a task, from its Hello to its end."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias, final

import grpc

from jgraph.errors import (
    ClusterUnreachableError,
    JGError,
    MalformedMessageError,
    VersionError,
)
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.dial import (
    SHUTTING_DOWN,
    ended_link,
    is_cancelled,
    lost_its_end,
    unanswered,
)
from jgraph.rpc.frames import body_of, frame, kind_of
from jgraph.rpc.resumable.outbox import Outbox
from jgraph.rpc.shared_memory.lending import SHARED_FRAME_BYTES, lend
from jgraph.rpc.shared_memory.shared_memory import SendMemory
from jgraph.rpc.sockets.connecting import DataDialer, connect_local, end_late
from jgraph.rpc.sockets.frame_socket import ACK, LAST_WORDS_S, FrameSocket
from jgraph.rpc.sockets.pipe import Pipe, StreamPipe
from jgraph.rpc.statistics import Counters
from jgraph.rpc.status import from_status
from jgraph.rpc.transport import Address, Frame
from jgraph.rpc.wire.codec import (
    Encoded,
    Prepared,
    encode,
    pack,
)
from jgraph.rpc.wire.decoder import Decoder

HELLO_TIMEOUT_S: Final = 10.0
"""How long either side waits for the first frame of the other."""

_logger = logging.getLogger(__name__)
_Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"


def check_protocol(ours: pb.Hello, theirs: pb.Hello, who: str) -> None:
    """Refuses another version of the wire contract.

    Raises:
      VersionError: naming both versions and both packages.
    """
    if ours.protocol == theirs.protocol:
        return
    older, newer = sorted((ours, theirs), key=lambda hello: hello.protocol)
    raise VersionError(
        f"{who} speaks protocol {theirs.protocol} (jgraph {theirs.jgraph}), this side "
        f"{ours.protocol} (jgraph {ours.jgraph}); install one version of jgraph "
        f"everywhere, e.g. pip install jgraph=={newer.jgraph} where "
        f"{older.jgraph} is",
        ours=ours.protocol,
        theirs=theirs.protocol,
    )


class Interrupted(Exception):  # noqa: N818  # perhaps it goes on
    """A stream broke, and another may go on; nothing was lost on it.

    Attributes:
      error: what it is if it cannot be.
      was_accepted: the other side had answered on it.
    """

    def __init__(self, error: JGError, *, was_accepted: bool) -> None:
        super().__init__()
        self.error = error
        self.was_accepted = was_accepted


@final
@dataclass(slots=True)
class Outgoing:
    """What outlives a stream: the frames for one task, and who that is.

    Attributes:
      outbox: the frames.
      incarnation: of the task that accepted the first stream; 0 before that.
    """

    peer: TaskName
    address: Address
    hello: pb.Hello
    outbox: Outbox[Prepared]
    counters: Counters
    incarnation: int = 0


@final
class ExchangeStream:
    """Sends the frames of an ``Outgoing`` until it is finishing or the stream ends.

    No frame is written before the other side has said who it is, so that a wrong
    task or version never gets one.

    Args:
      out: the frames, and for whom.
      stream: of the method Exchange, just opened.
      memory: to share with a task of the same machine; None: nothing goes around the
        stream.
      data: connects to the peer's data port; None: nothing does.
    """

    def __init__(
        self,
        out: Outgoing,
        stream: _Call,
        memory: SendMemory | None,
        data: DataDialer | None,
    ) -> None:
        self._out = out
        self._stream = stream
        self._memory = memory
        self._data = data
        self._resumes = out.incarnation != 0
        self._theirs: asyncio.Future[pb.Hello] = (
            asyncio.get_running_loop().create_future()
        )
        self._may_resume = True

    async def run(self) -> None:
        """Sends; returns when all is sent and the other side has it.

        Raises:
          Interrupted: the connection broke.
          JGError: it cannot be used, or must not be resumed.
        """
        sending = asyncio.create_task(self._send())
        sending.add_done_callback(self._end_failed)
        try:
            await self._read()
        except grpc.aio.AioRpcError as error:
            raise self._lost(error.code(), error.details() or "") from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise self._lost(grpc.StatusCode.CANCELLED, "") from None
        finally:
            self._stream.cancel()
            sending.cancel()
            await asyncio.wait([sending])
            if self._memory is not None:
                self._memory.close()

    def _end_failed(self, sending: "asyncio.Task[None]") -> None:
        """Ends the stream if sending failed; whoever reads the stream says so."""
        if sending.cancelled() or (error := sending.exception()) is None:
            return
        if not isinstance(error, grpc.aio.AioRpcError | asyncio.InvalidStateError):
            _logger.error("Sending to a task failed.", exc_info=error)
        self._stream.cancel()

    async def _send(self) -> None:
        """Writes what is queued; a failure of the stream is told by reading it."""
        first = pb.Hello(resumes=self._resumes)
        first.MergeFrom(self._out.hello)
        if self._memory is not None:
            first.shared_memory.CopyFrom(self._memory.announcement())
        await self._write_small(frame(hello=first))
        theirs = await self._theirs
        socket = await self._connect(theirs)
        self._out.counters.leads(self._out.peer, _way_of(socket))
        if socket is None:
            await self._send_over(StreamPipe(self._stream.write), theirs.received)
        else:
            socket.ended.add_done_callback(partial(end_late, self._stream))
            try:
                await self._send_over(socket, theirs.received)
                # Closing it now would take back what the other side has not read yet.
                await asyncio.wait({socket.ended}, timeout=LAST_WORDS_S)
            finally:
                socket.close()
        await self._stream.done_writing()

    async def _write_small(self, message: Frame) -> None:
        for chunk in pack(encode(message).pieces):
            await self._stream.write(chunk)

    async def _connect(self, theirs: pb.Hello) -> FrameSocket | None:
        """Returns the socket that goes with the stream, if one is within reach."""
        out = self._out
        if self._memory is not None and theirs.HasField("local_socket"):
            socket = await connect_local(theirs.local_socket, _refuse)
            if socket is not None:
                return socket
            _logger.info(
                "Frames for %s do not go through a socket of this machine: that is out "
                "of reach from here.",
                out.peer,
            )
        if self._data is None or not theirs.HasField("data_socket"):
            return None
        return await self._data.connect(
            out.address, theirs.data_socket, out.peer, _acknowledging(out)
        )

    async def _send_over(self, pipe: Pipe, received: int) -> None:
        """Sends what the other side has not got, and then what is queued."""
        out = self._out
        self._may_resume = pipe.keeps
        out.outbox.lend = None if self._memory is None else self._lent
        await out.outbox.run(pipe, received)
        await pipe.write(encode(frame(goodbye=pb.Empty())).pieces)

    async def _lent(self, item: Prepared, number: int) -> Encoded:
        assert self._memory is not None  # else nothing is lent
        lent: Mapping[int, pb.SharedBlock] = {}
        if item.nbytes >= SHARED_FRAME_BYTES:
            lent = await lend(item, self._memory)
        shared = sum(item.arrays[at].nbytes for at in lent)
        self._out.counters.sent(self._out.peer, frames=1, shared=shared)
        return item.encoded(lent, sequence=number)

    async def _read(self) -> None:
        decoder, out = Decoder(), self._out
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S) as limit:
                async for chunk in self._stream:
                    for answer in decoder.feed(chunk):
                        self._take(answer)
                        limit.reschedule(None)
        except TimeoutError as error:
            raise ClusterUnreachableError(
                f"{out.peer} at {out.address} accepted a connection, but did not "
                f"introduce itself within {HELLO_TIMEOUT_S:g} s",
                task=out.peer,
                address=out.address,
            ) from error
        if not out.outbox.is_finishing:
            raise ended_link(out.peer, out.address, "ended by the other side")

    def _take(self, answer: Frame) -> None:
        kind = kind_of(answer)
        if kind == "status":
            raise from_status(body_of(answer))
        if kind == "ack" and self._theirs.done():
            self._out.outbox.acknowledge(body_of(answer).received)
            return
        if kind != "hello":
            raise MalformedMessageError(
                f"{self._out.address} answered a connection with '{kind}'"
            )
        self._welcome(body_of(answer))

    def _welcome(self, theirs: pb.Hello) -> None:
        out = self._out
        check_protocol(out.hello, theirs, f"{out.peer} at {out.address}")
        if theirs.task != out.peer:
            raise ClusterUnreachableError(
                f"{out.address} should be {out.peer}, but is "
                f"{theirs.task or 'a client'}; correct the cluster description",
                task=out.peer,
                address=out.address,
            )
        if self._resumes and theirs.incarnation != out.incarnation:
            raise ended_link(out.peer, out.address, "started again since")
        out.incarnation = theirs.incarnation
        if not theirs.shares_memory and self._memory is not None:
            self._memory.close()
            self._memory = None
        if not self._theirs.done():
            self._theirs.set_result(theirs)

    def _lost(self, code: grpc.StatusCode, details: str) -> Exception:
        out = self._out
        was_accepted = self._theirs.done()
        is_new = not (was_accepted or self._resumes)
        error: JGError = ended_link(out.peer, out.address, code.name.lower())
        if is_new and not lost_its_end(code, details):
            refused = unanswered(code, out.address, out.peer)
            if refused is not None:
                return refused
        # Nothing leaves before the other side has said who it is.
        if not (self._may_resume or is_new):
            return error
        if details == SHUTTING_DOWN:
            return error
        return Interrupted(error, was_accepted=was_accepted)


def _way_of(socket: FrameSocket | None) -> str:
    if socket is None:
        return "stream"
    return "data socket" if socket.keeps else "local socket"


def _acknowledging(out: Outgoing) -> Callable[[memoryview], None]:
    """Returns what takes the acknowledgements that come back over a data socket."""
    have = bytearray()

    def take(data: memoryview) -> None:
        have.extend(data)
        whole = len(have) // ACK.size * ACK.size
        if whole:
            (received,) = ACK.unpack_from(have, whole - ACK.size)
            del have[:whole]
            out.outbox.acknowledge(received)

    return take


def _refuse(data: memoryview) -> None:
    raise MalformedMessageError("a task sent frames to the sender of an exchange")
