"""Dialing end of a resumable link: hello, choice of a pipe, resumption, end."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Final, Generic, TypeAlias, TypeVar, final

import grpc

from jgraph.errors import AddressError, ClusterUnreachableError, JGError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.dial import (
    SHUTTING_DOWN,
    is_cancelled,
    is_refused,
    lost_its_end,
    unanswered,
)
from jgraph.rpc.frames import body_of, check_protocol, frame, kind_of
from jgraph.rpc.resumable.numbers import ReceivedFrames
from jgraph.rpc.resumable.outbox import Outbox, Sendable
from jgraph.rpc.shared_memory.shared_memory import SendMemory
from jgraph.rpc.sockets.connecting import DataDialer, connect_local, end_late
from jgraph.rpc.sockets.frame_socket import LAST_WORDS_S, FrameSocket, Take
from jgraph.rpc.sockets.pipe import Pipe, Stream, StreamPipe
from jgraph.rpc.status import from_status
from jgraph.rpc.transport import Address, Frame
from jgraph.rpc.wire.codec import Buffer, Encoded, encode
from jgraph.rpc.wire.decoder import Decoder

HELLO_TIMEOUT_S: Final = 10.0
"""How long either side waits for the first frame of the other."""
RESUME_S: Final = 3.0
"""How long a task whose connection broke is tried to be reached again."""
RESUME_POLL_S: Final = 0.05
"""Between two tries: that an address answers again shows only by asking."""

_logger = logging.getLogger(__name__)
_Item = TypeVar("_Item", bound=Sendable)
OpenStream: TypeAlias = Callable[[bool], AbstractAsyncContextManager[Stream]]
"""Opens a stream; keeps trying if nobody listens yet, and it is told to."""


class LinkLost(Exception):  # noqa: N818  # perhaps it goes on
    """The connection broke.

    Attributes:
      why: what is known of that.
      may_resume: another may go on; nothing was lost on this one.
      was_accepted: the other side had answered on it.
    """

    def __init__(
        self, why: str = "", *, may_resume: bool = False, was_accepted: bool = False
    ) -> None:
        super().__init__(why)
        self.why = why
        self.may_resume = may_resume
        self.was_accepted = was_accepted


@final
class DialingEnd(Generic[_Item]):
    """Sends the frames of an outbox to one address, each once, and reads what comes.

    A connection that breaks is made again, and what had not arrived is sent again, in
    both directions; not if nobody listens at the address any more, or another
    incarnation of the task does, or the other side gave the link up. No frame is
    written before the other side has said who it is.

    Args:
      address: of the other side.
      hello: who we are, and which of our lines this is.
      outbox: what to send.
      open_stream: connects.
      make_decoder: gives what turns the bytes of a stream or a socket into frames.
      take: gets each frame that arrives, and counts it in ``received``.
      task: that should be there; empty for any.
      near: take a socket that the other side offers to callers of its machine.
      data: connects to its data port; None: nothing does.
      make_memory: gives memory to share with a task of the same machine, or None.
      lend: encodes a frame whose tensors may go through that memory.
      goes_on: whether to connect again if the connection breaks.
      leads: is told which way frames leave.

    Attributes:
      received: what arrived.
      incarnation: of the task that accepted the first stream; 0 before that.
      is_broken: nothing can be sent any more.
    """

    def __init__(
        self,
        address: Address,
        hello: pb.Hello,
        outbox: Outbox[_Item],
        open_stream: OpenStream,
        make_decoder: Callable[[], Decoder],
        take: Callable[[Frame], None],
        *,
        task: str = "",
        near: bool,
        data: DataDialer | None,
        make_memory: Callable[[], SendMemory | None] = lambda: None,
        lend: Callable[[SendMemory, _Item, int], Awaitable[Encoded]] | None = None,
        goes_on: Callable[[], bool] = lambda: True,
        leads: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.received = ReceivedFrames()
        self.incarnation = 0
        self.is_broken = False
        self._address = address
        self._hello = hello
        self._outbox = outbox
        self._open_stream = open_stream
        self._make_decoder = make_decoder
        self._take = take
        self._task = task
        self._near = near
        self._data = data
        self._make_memory = make_memory
        self._lend = lend
        self._goes_on = goes_on
        self._leads = leads
        self._now = asyncio.get_running_loop().time
        # Of the stream that there is now.
        self._resumes = False
        self._memory: SendMemory | None = None
        self._socket: FrameSocket | None = None
        self._refused: JGError | None = None
        self._theirs: asyncio.Future[pb.Hello]

    async def run(self) -> None:
        """Connects, sends and reads until the outbox is finished and all is there.

        Raises:
          LinkLost: the connection broke, and could not be made again.
          AddressError: the host of the address does not resolve.
          ClusterUnreachableError: the task is not at its address.
          VersionError: the other side speaks another version of the protocol.
          JGError: why the other side ended the link.
        """
        lost: LinkLost | None = None
        until = self._now() + RESUME_S
        try:
            while True:
                try:
                    async with self._open_stream(lost is None) as stream:
                        return await self._converse(stream)
                except LinkLost as error:
                    if not error.may_resume:
                        raise
                    if error.was_accepted:
                        until = self._now() + RESUME_S
                    lost = error
                except (AddressError, ClusterUnreachableError) as error:
                    # Later a name may be unknown for a moment as well.
                    is_other = error.details.get("may_be_starting") is None
                    known = self.incarnation or isinstance(error, AddressError)
                    if lost is None or (is_other and not known):
                        raise
                if not (self._goes_on() and await self._may_redial(until)):
                    raise lost
        finally:
            self.is_broken = True
            self._outbox.clear()

    async def _may_redial(self, until: float) -> bool:
        """Waits a little; says False if it is too late, or nobody listens."""
        if self._now() >= until or await is_refused(self._address):
            return False
        await asyncio.sleep(RESUME_POLL_S)
        return True

    async def _converse(self, stream: Stream) -> None:
        """Sends and reads over one stream; returns when all is sent and is there."""
        self._resumes = self.incarnation != 0
        self._theirs = asyncio.get_running_loop().create_future()
        self._socket = self._refused = None
        self._memory = self._make_memory()
        sending = asyncio.create_task(self._send(stream))
        sending.add_done_callback(partial(self._end_failed, stream))
        try:
            await self._read(stream)
        except grpc.aio.AioRpcError as error:
            raise self._lost(error.code(), error.details() or "") from error
        except asyncio.CancelledError:
            # gRPC raises it as well when the other side cancels, i.e. shuts down.
            if is_cancelled():
                raise
            raise self._lost(grpc.StatusCode.CANCELLED, "") from None
        finally:
            stream.cancel()
            sending.cancel()
            await asyncio.wait([sending])
            self._share_no_memory()

    def _lost(self, code: grpc.StatusCode, details: str) -> Exception:
        if self._refused is not None:
            return self._refused
        was_accepted = self._theirs.done()
        is_new = not (was_accepted or self._resumes)
        if is_new and not lost_its_end(code, details):
            refused = unanswered(code, self._address, self._task)
            if refused is not None:
                return refused
        # Before the other side has answered, nothing was sent that it could have taken.
        keeps = self._socket is None or self._socket.keeps
        may_resume = keeps and details != SHUTTING_DOWN
        return LinkLost(may_resume=may_resume, was_accepted=was_accepted)

    def _end_failed(self, stream: Stream, sending: "asyncio.Task[None]") -> None:
        """Ends the stream if sending failed; whoever reads the stream says so."""
        if sending.cancelled() or (error := sending.exception()) is None:
            return
        if isinstance(error, grpc.aio.AioRpcError | asyncio.InvalidStateError):
            return  # it has ended, and why may still be to be read
        if isinstance(error, JGError):
            self._refused = error
        else:
            _logger.error("Sending over a link failed.", exc_info=error)
        stream.cancel()

    async def _send(self, stream: Stream) -> None:
        """Writes what is queued; a failure of the stream is told by reading it."""
        first = pb.Hello(resumes=self._resumes, received=self.received.last)
        first.MergeFrom(self._hello)
        if self._memory is not None:
            first.shared_memory.CopyFrom(self._memory.announcement())
        streamed = StreamPipe(stream.write)
        await streamed.write(encode(frame(hello=first)).pieces)
        theirs = await self._theirs
        if self._resumes:  # so the other side learns through what it shall send
            self._outbox.tell(self.received.tell())
        # The stream says why it ends, perhaps in the middle of a frame over the socket.
        decoder = self._make_decoder()
        take = partial(self._feed, decoder)
        self._socket = socket = await self._connect(theirs, take)
        self._leads(self._way())
        if socket is None:
            await self._send_over(streamed, theirs.received)
        else:
            socket.hand_to(take, decoder.room)
            socket.ended.add_done_callback(partial(self._socket_ended, stream, socket))
            try:
                await self._send_over(socket, theirs.received)
                # Closing it now would take back what the other side has not read yet.
                await asyncio.wait({socket.ended}, timeout=LAST_WORDS_S)
            finally:
                socket.close()
        await stream.done_writing()

    async def _connect(self, theirs: pb.Hello, take: Take) -> FrameSocket | None:
        """Returns the socket that goes with the stream, if one is within reach."""
        if self._near and theirs.HasField("local_socket"):
            socket = await connect_local(theirs.local_socket, take)
            if socket is not None:
                return socket
            if self._task:  # else there are many links to it
                _logger.info(
                    "Frames for %s do not go through a socket of this machine: that is "
                    "out of reach from here.",
                    self._task,
                )
        if self._data is None or not theirs.HasField("data_socket"):
            return None
        offer = theirs.data_socket
        return await self._data.connect(self._address, offer, self._task, take)

    def _way(self) -> str:
        if self._memory is not None:
            return "shared memory"
        return "gRPC stream" if self._socket is None else self._socket.way

    async def _send_over(self, pipe: Pipe, received: int) -> None:
        """Sends what the other side has not got, and then what is queued."""
        self._outbox.lend = None
        if self._memory is not None and self._lend is not None:
            self._outbox.lend = partial(self._lend, self._memory)
        await self._outbox.run(pipe, received)
        await pipe.write(encode(frame(goodbye=pb.Empty())).pieces)

    def _socket_ended(
        self, stream: Stream, socket: FrameSocket, ended: "asyncio.Future[None]"
    ) -> None:
        if not socket.keeps:
            self.is_broken = True  # also while the stream has not said why
        if socket is self._socket and isinstance(error := ended.exception(), JGError):
            self._refused = error
        end_late(stream, ended)

    async def _read(self, stream: Stream) -> None:
        decoder = self._make_decoder()
        limit = asyncio.timeout(HELLO_TIMEOUT_S)
        try:
            async with limit:
                async for chunk in stream:
                    self._feed(decoder, chunk)
                    if self._theirs.done():
                        limit.reschedule(None)
        except TimeoutError as error:
            if not limit.expired():
                raise
            where = self._task and f"{self._task} at "
            raise ClusterUnreachableError(
                f"{where}{self._address} accepted a connection, but did not "
                f"introduce itself within {HELLO_TIMEOUT_S:g} s",
                task=self._task,
                address=self._address,
            ) from error
        if self._refused is not None:
            raise self._refused
        if not self._outbox.is_finishing:
            raise LinkLost("ended by the other side")

    def _feed(self, decoder: Decoder, chunk: Buffer) -> None:
        for arrived in decoder.feed(chunk):
            self._arrived(arrived)
        keeps = self._socket is None or self._socket.keeps
        if keeps and self.received.is_ack_due(len(chunk)):
            self._outbox.tell(self.received.tell())

    def _arrived(self, arrived: Frame) -> None:
        kind = kind_of(arrived)
        if kind == "ack" and self._theirs.done():
            self._outbox.acknowledge(body_of(arrived).received)
        elif kind == "hello" and not self._theirs.done():
            self._greet(body_of(arrived))
        elif kind == "status" and not arrived.header.sequence:
            raise from_status(body_of(arrived))
        else:
            self._take(arrived)

    def _greet(self, theirs: pb.Hello) -> None:
        where = f"{self._task} at {self._address}" if self._task else self._address
        check_protocol(self._hello, theirs, where)
        if self._task and theirs.task != self._task:
            raise ClusterUnreachableError(
                f"{self._address} should be {self._task}, but is "
                f"{theirs.task or 'a client'}; correct the cluster description",
                task=self._task,
                address=self._address,
            )
        if self._resumes and theirs.incarnation != self.incarnation:
            raise LinkLost("started again since")
        self.incarnation = theirs.incarnation
        if not theirs.shares_memory:
            self._share_no_memory()
        self._theirs.set_result(theirs)

    def _share_no_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
