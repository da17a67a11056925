"""The outgoing half of a pair of tasks: one long-lived Exchange stream."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Final, TypeAlias

import grpc

from jgraph.errors import (
    ClusterUnreachableError,
    JGError,
    MalformedMessageError,
    VersionError,
)
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.backlog import Backlog
from jgraph.rpc.codec import Packer, Prepared, encode, pack
from jgraph.rpc.decoder import Decoder
from jgraph.rpc.dial import CONNECT_TIMEOUT_S, ended_link, is_cancelled, open_channel
from jgraph.rpc.frames import body_of, frame, kind_of
from jgraph.rpc.lending import SHARED_FRAME_BYTES, lend
from jgraph.rpc.local_socket import AT_ONCE_BYTES, LocalSocket, connect, end_late
from jgraph.rpc.shared_memory import SendMemory
from jgraph.rpc.statistics import Counters
from jgraph.rpc.status import from_status
from jgraph.rpc.tls import Identity
from jgraph.rpc.token import Token
from jgraph.rpc.transport import Address, Frame

EXCHANGE_METHOD: Final = "/jgraph.v1.Task/Exchange"
HELLO_TIMEOUT_S: Final = 10.0
"""How long either side waits for the first frame of the other."""

_logger = logging.getLogger(__name__)
_Write: TypeAlias = Callable[[bytes], Awaitable[None]]


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


class ExchangeLink:
    """Sends frames to one task, in the order of ``push``.

    No frame is written before the other side has said who it is, so that a wrong
    task or version never gets one.

    Args:
      peer: the task that should be at ``address``.
      address: its ``host:port``.
      hello: who we are.
      counters: where sent frames are counted.
      make_memory: gives memory to share with a task of the same machine, or None:
        nothing goes around the stream.
      number: gives the sequence number of the next frame.
      identity: certificates; None speaks plain text.
      max_queued_bytes: more than this does not wait for the peer.
      token: what the peer asks for; None: nothing.
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
    ) -> None:
        self.peer = peer
        self.address = address
        self._hello = hello
        self._counters = counters
        self._make_memory = make_memory
        self._memory: SendMemory | None = None
        self._offer: pb.LocalSocket | None = None
        self._idle_socket: LocalSocket | None = None
        self._number = number
        self._identity = identity
        self._token = token
        self._backlog: Backlog[Prepared] = Backlog(
            hello.task, peer, address, max_queued_bytes
        )
        self._now = asyncio.get_running_loop().time
        self._wake = asyncio.Event()
        self._accepted = asyncio.Event()
        self._finishing = False

    def push(self, item: Prepared) -> None:
        """Queues a frame; never blocks.

        Raises:
          NotTakingError: too much waits already.
        """
        socket = self._idle_socket
        if socket is not None and socket.is_free and item.nbytes <= AT_ONCE_BYTES:
            data = b"".join(item.encoded(sequence=self._number()).pieces)
            socket.write_now(data)
            self._counters.sent(self.peer, frames=1, nbytes=len(data))
            return
        self._backlog.add(item, item.nbytes, step=item.values_of, now=self._now())
        self._idle_socket = None
        self._wake.set()

    def withdraw(self, step: Hashable) -> int:
        """Drops queued values of a step; returns how many frames."""
        return self._backlog.withdraw(step)

    def finish(self) -> None:
        """Lets ``run`` end when everything queued is sent."""
        self._finishing = True
        self._wake.set()

    async def run(self) -> None:
        """Connects and sends until ``finish``.

        Raises:
          AddressError: the host of the address does not resolve.
          ClusterUnreachableError: the task is not at its address.
          TaskLostError: the connection broke.
          VersionError: the other side speaks another version of the protocol.
          JGError: why the other side ended the stream.
        """
        channel = await open_channel(
            self.address,
            timeout_s=CONNECT_TIMEOUT_S,
            patient=True,
            task=self.peer,
            identity=self._identity,
            token=self._token,
        )
        self._memory = self._make_memory()
        try:
            stream = channel.stream_stream(EXCHANGE_METHOD, None, None)(
                None, metadata=self._token.metadata if self._token else None
            )
            sending = asyncio.create_task(self._send(stream))
            sending.add_done_callback(partial(_end_failed, stream))
            try:
                await self._read(stream)
            except grpc.aio.AioRpcError as error:
                raise self._lost(error.code()) from error
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                raise self._lost(grpc.StatusCode.CANCELLED) from None
            finally:
                stream.cancel()
                sending.cancel()
                await asyncio.wait([sending])
                self._backlog.clear()
        finally:
            self._forget_memory()
            await channel.close(None)

    def _forget_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()
        self._memory = None

    async def _send(self, stream: "grpc.aio.StreamStreamCall[bytes, bytes]") -> None:
        """Writes what is queued; a failure of the stream is told by reading it."""
        first = pb.Hello()
        first.CopyFrom(self._hello)
        if self._memory is not None:
            first.shared_memory.CopyFrom(self._memory.announcement())
        for chunk in pack(encode(frame(hello=first)).pieces):
            await stream.write(chunk)
        await self._accepted.wait()
        socket = await self._connect()
        if socket is None:
            await self._send_over(stream.write, None)
        else:
            socket.ended.add_done_callback(partial(end_late, stream))
            try:
                await self._send_over(socket.write, socket)
            finally:
                self._idle_socket = None
                socket.close()
        await stream.done_writing()

    async def _connect(self) -> LocalSocket | None:
        """Returns the socket that goes with the stream, if the peer is near."""
        if self._offer is None:
            return None
        socket = await connect(self._offer, _refuse)
        if socket is None:
            _logger.info(
                "Frames for %s go through a gRPC stream, not through a socket of this "
                "machine: that is out of reach from here.",
                self.peer,
            )
        return socket

    async def _send_over(self, write: _Write, socket: LocalSocket | None) -> None:
        while self._backlog or not self._finishing:
            await self._wake.wait()
            self._wake.clear()
            await self._drain(write)
            self._backlog.left()
            self._idle_socket = socket

    async def _drain(self, write: _Write) -> None:
        """Writes all that is queued, also what is queued while a chunk is written."""
        packer = Packer()
        while self._backlog:
            item = self._backlog.take(now=self._now())
            if self._memory is None or item.nbytes < SHARED_FRAME_BYTES:
                encoded, shared = item.encoded(sequence=self._number()), 0
            else:
                lent = await lend(item, self._memory)
                shared = sum(item.arrays[at].nbytes for at in lent)
                encoded = item.encoded(lent, sequence=self._number())
            self._counters.sent(self.peer, frames=1, shared=shared)
            for piece in encoded.pieces:
                for chunk in packer.add(piece):
                    await self._write(write, chunk)
        if rest := packer.rest():
            await self._write(write, rest)

    async def _write(self, write: _Write, chunk: bytes) -> None:
        self._counters.sent(self.peer, nbytes=len(chunk))
        await write(chunk)
        self._backlog.moved(now=self._now())

    async def _read(self, stream: "grpc.aio.StreamStreamCall[bytes, bytes]") -> None:
        decoder = Decoder()
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S) as limit:
                async for chunk in stream:
                    for answer in decoder.feed(chunk):
                        self._take(answer)
                        limit.reschedule(None)
        except TimeoutError as error:
            raise ClusterUnreachableError(
                f"{self.peer} at {self.address} accepted a connection, but did not "
                f"introduce itself within {HELLO_TIMEOUT_S:g} s",
                task=self.peer,
                address=self.address,
            ) from error
        if not self._finishing:
            raise ended_link(self.peer, self.address, "ended by the other side")

    def _take(self, answer: Frame) -> None:
        if kind_of(answer) == "status":
            raise from_status(body_of(answer))
        if kind_of(answer) != "hello":
            raise MalformedMessageError(
                f"{self.address} answered a connection with '{kind_of(answer)}'"
            )
        theirs: pb.Hello = body_of(answer)
        check_protocol(self._hello, theirs, f"{self.peer} at {self.address}")
        if theirs.task != self.peer:
            raise ClusterUnreachableError(
                f"{self.address} should be {self.peer}, but is "
                f"{theirs.task or 'a client'}; correct the cluster description",
                task=self.peer,
                address=self.address,
            )
        if not theirs.shares_memory:
            self._forget_memory()
        elif theirs.HasField("local_socket"):
            self._offer = theirs.local_socket
        self._accepted.set()

    def _lost(self, code: grpc.StatusCode) -> JGError:
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return ClusterUnreachableError(
                f"a gRPC server answers at {self.address} where {self.peer} should "
                f"be, but it is not a jgraph server; check the port",
                task=self.peer,
                address=self.address,
            )
        return ended_link(self.peer, self.address, code.name.lower())


def _refuse(data: memoryview) -> None:
    raise MalformedMessageError("a task sent frames to the sender of an exchange")


def _end_failed(
    stream: "grpc.aio.StreamStreamCall[bytes, bytes]", sending: "asyncio.Task[None]"
) -> None:
    """Ends the stream of a sender that failed; whoever reads the stream says so."""
    if sending.cancelled() or (error := sending.exception()) is None:
        return
    if not isinstance(error, grpc.aio.AioRpcError | asyncio.InvalidStateError):
        _logger.error("Sending to a task failed.", exc_info=error)
    stream.cancel()
