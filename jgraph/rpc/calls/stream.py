"""One call stream to a server, from its Hello to its end."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias, final

import grpc

from jgraph.errors import JGError, TaskLostError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.dial import SHUTTING_DOWN, is_cancelled, lost_its_end, unanswered
from jgraph.rpc.frames import body_of, frame, kind_of
from jgraph.rpc.resumable.backlog import Backlog
from jgraph.rpc.resumable.numbers import ReceivedFrames
from jgraph.rpc.resumable.outbox import Outbox, as_it_is
from jgraph.rpc.sockets.connecting import DataDialer, connect_local, end_late
from jgraph.rpc.sockets.frame_socket import LAST_WORDS_S, FrameSocket, Take
from jgraph.rpc.sockets.pipe import StreamPipe
from jgraph.rpc.status import from_status
from jgraph.rpc.transport import Address, Frame
from jgraph.rpc.wire.codec import Buffer, Encoded, encode, pack
from jgraph.rpc.wire.decoder import Decoder

UNACKNOWLEDGED_S: Final = 30.0
"""Who acknowledges nothing for so long does not read."""
Stream: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"


@final
class StreamState:
    """What outlives a stream of calls, on either side of it.

    Attributes:
      outbox: frames for the other side.
      received: the frames of it that arrived.
    """

    def __init__(self) -> None:
        self.outbox: Outbox[Encoded] = Outbox(
            Backlog(), as_it_is, give_up_s=UNACKNOWLEDGED_S
        )
        self.received = ReceivedFrames()

    def took(self, nbytes: int) -> None:
        """Tells the other side now and then that a chunk of frames arrived."""
        if self.received.is_ack_due(nbytes):
            self.outbox.tell(self.received.tell())


@final
@dataclass(frozen=True, slots=True)
class Ended:
    """Why a stream of calls ended.

    Attributes:
      error: what was wrong with it, if it did not just break.
      may_resume: it broke, and both sides know where to go on.
    """

    error: JGError | None = None
    may_resume: bool = False


@final
class CallStream:
    """Sends the frames of a conversation and reads the replies, until it ends.

    No frame is sent before the server has said who it is.

    Args:
      address: where the server is.
      stream: of the method Asks, just opened.
      make_decoder: gives what turns its chunks, or those of a socket, into frames.
      hello: who we are.
      conversation: what goes over it.
      take: gets each reply.
      incarnation: of the server that accepted the first stream; 0: this is the first.
      ended: called when nothing can be sent any more, also before ``run`` returns.
      near: take a socket that the server offers to callers of its machine.
      data: connects to its data port; None: nothing does.

    Attributes:
      incarnation: of the server, as soon as it has said it.
    """

    def __init__(
        self,
        address: Address,
        stream: Stream,
        make_decoder: Callable[[], Decoder],
        hello: pb.Hello,
        conversation: StreamState,
        take: Callable[[Frame], None],
        ended: Callable[[], None],
        *,
        incarnation: int,
        near: bool,
        data: DataDialer | None,
    ) -> None:
        self.incarnation = incarnation
        self._address = address
        self._stream = stream
        self._make_decoder = make_decoder
        self._hello = hello
        self._talk = conversation
        self._take = take
        self._ended = ended
        self._resumes = incarnation != 0
        self._near = near and not self._resumes
        self._data = data
        self._welcome: asyncio.Future[pb.Hello] = (
            asyncio.get_running_loop().create_future()
        )
        self._socket: FrameSocket | None = None
        self._refused: BaseException | None = None

    @property
    def was_accepted(self) -> bool:
        """Whether the server said who it is."""
        return self._welcome.done()

    async def run(self) -> Ended:
        """Returns why it ended."""
        sending = asyncio.create_task(self._send())
        sending.add_done_callback(self._end_failed)
        decoder = self._make_decoder()
        try:
            async for chunk in self._stream:
                self._feed(decoder, chunk)
            return Ended()
        except grpc.aio.AioRpcError as error:
            return self._broke(error.code(), error.details() or "")
        except JGError as error:
            return Ended(error=error)
        except asyncio.CancelledError:
            # gRPC raises it as well when the other side cancels, i.e. shuts down.
            if is_cancelled():
                raise
            return self._broke(grpc.StatusCode.CANCELLED, "")
        finally:
            self._stream.cancel()
            sending.cancel()
            await asyncio.wait([sending])

    async def finish(self) -> None:
        """Waits until all has left and the server has ended the stream; 1 s at most."""
        # gRPC's own error is that of a connection that breaks just then.
        ends = (TimeoutError, asyncio.CancelledError, grpc.aio.AioRpcError)
        with suppress(*ends, grpc.aio.InternalError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._talk.outbox.flushed()
                if self._socket is not None:
                    # The server closes it first: else it may lose what we said last.
                    await asyncio.shield(self._socket.ended)
                await self._stream.done_writing()
                await self._stream.code()

    def _broke(self, code: grpc.StatusCode, details: str) -> Ended:
        if isinstance(self._refused, JGError):
            return Ended(error=self._refused)
        is_new = not (self.was_accepted or self._resumes)
        is_known = is_new and not lost_its_end(code, details)
        if is_known and (error := unanswered(code, self._address)) is not None:
            return Ended(error=error)
        # Before the server has answered, nothing was sent that it could have taken.
        may_resume = self._socket is None or self._socket.keeps
        return Ended(may_resume=may_resume and details != SHUTTING_DOWN)

    def _end_failed(self, sending: "asyncio.Task[None]") -> None:
        """Ends the stream if sending failed; whoever reads the stream says so."""
        if not sending.cancelled() and (error := sending.exception()) is not None:
            self._refused = error
            self._stream.cancel()

    async def _send(self) -> None:
        first = pb.Hello(resumes=self._resumes, received=self._talk.received.last)
        first.MergeFrom(self._hello)
        for chunk in pack(encode(frame(hello=first)).pieces):
            await self._stream.write(chunk)
        theirs = await self._welcome
        if self._resumes:  # so the server learns where replies shall go
            self._talk.outbox.tell(self._talk.received.tell())
        # The stream says why it ends, perhaps in the middle of a frame over the socket.
        decoder = self._make_decoder()
        take = partial(self._feed, decoder)
        self._socket = socket = await self._connect(theirs, take)
        if socket is None:
            await self._talk.outbox.run(StreamPipe(self._stream.write), theirs.received)
            return
        socket.hand_to(take, decoder.room)
        socket.ended.add_done_callback(self._socket_ended)
        try:
            await self._talk.outbox.run(socket, theirs.received)
        finally:
            socket.close()

    async def _connect(self, theirs: pb.Hello, take: Take) -> FrameSocket | None:
        """Returns the socket that goes with the stream, if one is within reach."""
        if self._near and theirs.HasField("local_socket"):
            socket = await connect_local(theirs.local_socket, take)
            if socket is not None:
                return socket
        if self._data is None or not theirs.HasField("data_socket"):
            return None
        offer = theirs.data_socket
        return await self._data.connect(self._address, offer, "", take)

    def _socket_ended(self, ended: "asyncio.Future[None]") -> None:
        assert self._socket is not None  # which ended
        self._refused = ended.exception()
        if not self._socket.keeps:
            self._ended()  # also while the stream has not said why
        end_late(self._stream, ended)

    def _feed(self, decoder: Decoder, chunk: Buffer) -> None:
        for reply in decoder.feed(chunk):
            self._reply(reply)
        if self._socket is None or self._socket.keeps:
            self._talk.took(len(chunk))

    def _reply(self, reply: Frame) -> None:
        kind = kind_of(reply)
        if kind == "ack":
            self._talk.outbox.acknowledge(body_of(reply).received)
        elif kind == "hello" and not self._welcome.done():
            self._greet(body_of(reply))
        elif kind == "status" and not reply.header.sequence:
            refused = self._resumes and not self._welcome.done()
            raise self._given_up() if refused else from_status(body_of(reply))
        else:
            self._talk.received.last += 1
            self._take(reply)

    def _greet(self, theirs: pb.Hello) -> None:
        if self._resumes and theirs.incarnation != self.incarnation:
            raise self._given_up()
        self.incarnation = theirs.incarnation
        self._welcome.set_result(theirs)

    def _given_up(self) -> TaskLostError:
        return TaskLostError(
            f"the connection to {self._address} broke, and the server there gave it up "
            "or was started again since; look at its log",
            address=self._address,
        )
