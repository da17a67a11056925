"""Dialling end of a task that listens nowhere: streams offered to each other task."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, final

import grpc

from jgraph.errors import JGError, MalformedMessageError
from jgraph.graph.device import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.dial import CONNECT_TIMEOUT_S, SHUTTING_DOWN, is_cancelled
from jgraph.rpc.dial_only.address import is_dial_only
from jgraph.rpc.dial_only.offered_streams import END, OFFER_METHOD
from jgraph.rpc.frames import body_of, frame, kind_of
from jgraph.rpc.grpc.channels import Channels
from jgraph.rpc.security.tls import ANY_TASK, expected_at
from jgraph.rpc.sockets.frame_socket import LAST_WORDS_S
from jgraph.rpc.sockets.pipe import StreamPipe
from jgraph.rpc.status import from_status
from jgraph.rpc.transport import Address, Frame
from jgraph.rpc.wire.codec import encode
from jgraph.rpc.wire.decoder import Decoder

_AGAIN_S: Final = 0.25
_LATER_S: Final = 2.0
"""Between two tries to reach a task, once it was away: nobody tells that it is back."""
_EOF: Final[object] = grpc.aio.EOF  # type: ignore[attr-defined]  # stubs lack it
_logger = logging.getLogger(__name__)


@final
class DialledContext:
    """What gRPC gives who accepts a stream, for one that this side opened.

    Args:
      call: the stream.

    Attributes:
      names: of who uses it, in the certificate of that one.
    """

    def __init__(self, call: Any) -> None:
        self.names: Sequence[bytes] = ()
        self._call = call
        self._is_over = False
        # gRPC gives the stream up if who reads or writes is cancelled: these are not.
        self._reading: asyncio.Future[Any] | None = None
        self._writing: asyncio.Future[Any] | None = None

    async def read(self) -> Any:
        """Returns a chunk, or gRPC's end of a stream.

        Raises:
          grpc.aio.InternalError: the stream broke.
        """
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._call.read())
        chunk = await self._or_broke(self._reading)
        self._reading = None
        return chunk

    async def write(self, chunk: bytes) -> None:
        """Sends a chunk.

        Raises:
          grpc.aio.InternalError: the stream broke.
        """
        if self._writing is not None:
            await self._or_broke(self._writing)
        self._writing = asyncio.ensure_future(self._call.write(chunk))
        await self._or_broke(self._writing)
        self._writing = None

    async def _or_broke(self, doing: "asyncio.Future[Any]") -> Any:
        try:
            return await asyncio.shield(doing)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise grpc.aio.InternalError("the stream broke") from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise grpc.aio.InternalError("the stream was given up") from None

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        """Says why the stream ends before it is over."""
        del code
        await self.end(details)

    async def end(self, why: str = "") -> None:
        """Says that all is said, and waits a little until the other side knows."""
        if self._is_over:
            return
        self._is_over = True
        with suppress(grpc.aio.InternalError, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self.write(END)
                if why:
                    await self.write(why.encode())
                await self._or_broke(asyncio.ensure_future(self._call.done_writing()))
                while await self.read() is not _EOF:
                    pass

    async def close(self) -> None:
        """Ends the stream, whatever was said."""
        self._call.cancel()
        doing = [one for one in (self._reading, self._writing) if one is not None]
        await asyncio.gather(*doing, return_exceptions=True)

    def auth_context(self) -> dict[str, tuple[bytes, ...]]:
        """Returns what gRPC knows of who uses it."""
        return {"x509_subject_alternative_name": tuple(self.names)}

    def peer(self) -> str:
        """Returns nothing: sockets beside such a stream there are not."""
        return ""


Serve = Callable[[str, DialledContext], Awaitable[None]]
"""Serves a stream of a method to its end."""


@final
class Offering:
    """Keeps a stream offered to each task that listens, and serves those it takes.

    Args:
      hello: who we are.
      channels: connect to other tasks.
      serve: serves a stream that was taken.
    """

    def __init__(self, hello: pb.Hello, channels: Channels, serve: Serve) -> None:
        self._hello = hello
        self._channels = channels
        self._serve = serve
        self._peers: dict[TaskName, tuple[Address, asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def addresses(self) -> list[Address]:
        """Of the tasks that streams are offered to."""
        return [address for address, _ in self._peers.values()]

    def set_peers(self, peers: dict[TaskName, Address]) -> None:
        """Tells where other tasks are; those that only dial are offered nothing."""
        wanted = {
            task: address
            for task, address in peers.items()
            if task != self._hello.task and not is_dial_only(address)
        }
        for task, (address, offering) in list(self._peers.items()):
            if wanted.get(task) != address:
                del self._peers[task]
                self._ending.add(offering)
                offering.add_done_callback(self._ending.discard)
                offering.cancel()
        for task, address in wanted.items():
            if task not in self._peers:
                working = self._offer_for_ever(task, address)
                self._peers[task] = address, asyncio.create_task(working)

    async def close(self) -> None:
        """Offers nothing more; what is served has ended."""
        tasks = [*self._ending, *(offering for _, offering in self._peers.values())]
        self._peers.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _offer_for_ever(self, task: TaskName, address: Address) -> None:
        logged, pause_s = "", _AGAIN_S
        while True:
            try:
                channel = await self._connected(task, address)
                try:
                    logged, pause_s = "", _AGAIN_S
                    await self._offer_over(channel, task)
                finally:
                    await channel.close(None)
            except JGError as error:
                if error.code != logged:  # one line while it lasts
                    logged = error.code
                    _logger.warning("%s is not offered a stream: %s", task, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LATER_S)

    async def _connected(self, task: TaskName, address: Address) -> grpc.aio.Channel:
        """Returns a channel to a task; one that is given up half way outlives a loop.

        Raises:
          JGError: as ``open_channel``.
        """
        connecting = self._channels.open(address, CONNECT_TIMEOUT_S, task=task)
        opening = asyncio.ensure_future(connecting)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            await asyncio.wait([opening], timeout=LAST_WORDS_S)
            opening.cancel()
            with suppress(JGError, asyncio.CancelledError):
                await (await opening).close(None)
            raise

    async def _offer_over(self, channel: grpc.aio.Channel, task: TaskName) -> None:
        """Offers one stream after another, until the connection breaks.

        Raises:
          JGError: the other side takes none.
        """
        names = [expected_at(task).encode(), ANY_TASK.encode()]
        serving = set[asyncio.Task[None]]()
        try:
            while True:
                context = DialledContext(self._channels.stream(channel, OFFER_METHOD))
                try:
                    taken = await self._taken(context)
                except BaseException:
                    await context.end(SHUTTING_DOWN)
                    await context.close()
                    raise
                if taken is None:
                    await context.close()
                    return
                context.names = list(taken.names) or names
                one = asyncio.create_task(self._served(context, taken.method))
                serving.add(one)
                one.add_done_callback(serving.discard)
        finally:
            remaining = list(serving)
            if remaining:  # they end with the connection, or as the transport closes
                await asyncio.wait(remaining, timeout=LAST_WORDS_S)
            for one in remaining:
                one.cancel()
            await asyncio.gather(*remaining, return_exceptions=True)

    async def _taken(self, context: DialledContext) -> pb.Taken | None:
        """Returns for what a stream is taken; None: the connection broke.

        Raises:
          JGError: why it is not.
        """
        decoder, arrived = Decoder(), list[Frame]()
        with suppress(grpc.aio.InternalError):
            first = encode(frame(hello=self._hello))
            await StreamPipe(context.write).write(first.pieces)
            while not arrived and (chunk := await context.read()) is not _EOF:
                arrived = decoder.feed(chunk)
        if not arrived:
            return None
        if kind_of(arrived[0]) == "status":
            raise from_status(body_of(arrived[0]))
        if kind_of(arrived[0]) != "taken":
            raise MalformedMessageError(
                f"an offered stream was answered with '{kind_of(arrived[0])}'"
            )
        taken: pb.Taken = body_of(arrived[0])
        return taken

    async def _served(self, context: DialledContext, method: str) -> None:
        try:
            with suppress(grpc.aio.InternalError):
                await self._serve(method, context)
            await context.end()
        finally:
            await context.close()
