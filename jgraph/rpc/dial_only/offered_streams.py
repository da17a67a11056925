"""Streams that tasks which only dial have opened, for whoever would dial them."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final, final

import grpc

from jgraph.errors import ClusterBusyError, ClusterUnreachableError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.sockets.pipe import StreamPipe
from jgraph.rpc.transport import Address
from jgraph.rpc.wire.codec import encode

OFFER_METHOD: Final = "/jgraph.v1.Task/Offer"
END: Final = b""
"""A message that no frame makes: its sender has said all, or why it stops follows."""
MAX_OFFERED: Final = 8
"""Streams of one task that wait to be taken; it opens the next when one is."""
_EOF: Final[object] = grpc.aio.EOF  # type: ignore[attr-defined]  # stubs lack it


@final
class OfferedStream:
    """A stream that the other side opened, used as if this side had.

    Args:
      context: gRPC's, of the stream.

    Attributes:
      over: done when nobody here uses it any more, or it broke.
    """

    def __init__(self, context: Any) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._context = context
        self._is_taken = False
        self._reading: asyncio.Future[Any] | None = None
        self._read_on()

    async def write(self, chunk: bytes) -> None:
        """Sends a chunk.

        Raises:
          asyncio.InvalidStateError: the stream is over.
        """
        if self.over.done():
            raise asyncio.InvalidStateError("the stream is over")
        try:
            await self._context.write(chunk)
        except grpc.aio.BaseError as error:
            raise asyncio.InvalidStateError("the stream broke") from error

    async def done_writing(self) -> None:
        """Does nothing: the last frame says that it is the last."""

    def cancel(self) -> bool:
        """Ends the stream; says whether it was there."""
        if self.over.done():
            return False
        self.over.set_result(None)
        return True

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._chunks()

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        """Yields what comes, until the other side has said all.

        Raises:
          grpc.aio.AioRpcError: the stream broke, or was given up.
        """
        while (chunk := await self._read()) != END:
            if chunk is _EOF:
                raise _broke("")
            yield chunk
        if (why := await self._read()) is not _EOF:
            raise _broke(why.decode(errors="replace"))

    async def _read(self) -> Any:
        reading = self._reading or self._read_on()
        await asyncio.wait({reading, self.over}, return_when=asyncio.FIRST_COMPLETED)
        if self.over.done():  # what is still read ends with the stream
            raise _broke("")
        self._reading = None
        try:
            return reading.result()
        except (grpc.aio.BaseError, asyncio.CancelledError):
            raise _broke("") from None

    def _read_on(self) -> "asyncio.Future[Any]":
        reading: asyncio.Future[Any] = asyncio.ensure_future(self._context.read())
        reading.add_done_callback(self._has_read)
        self._reading = reading
        return reading

    def _has_read(self, reading: "asyncio.Future[Any]") -> None:
        if not reading.cancelled():
            reading.exception()  # seen: nobody may wait for it
        if not self._is_taken:  # the task that offered it closes
            self.cancel()

    def take(self) -> None:
        """Begins to use it."""
        self._is_taken = True


def _broke(why: str) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    code = grpc.StatusCode.UNAVAILABLE
    return grpc.aio.AioRpcError(code, nothing, nothing, why, None)


@final
class OfferedStreams:
    """Keeps the streams that tasks offer, by the addresses that stand for the tasks."""

    def __init__(self) -> None:
        self._offered: dict[Address, deque[OfferedStream]] = {}
        self._waiting: dict[Address, set[asyncio.Future[None]]] = {}

    async def offer(self, address: Address, context: Any) -> None:
        """Keeps a stream until it was taken, and is over.

        Raises:
          ClusterBusyError: many of the task are there already.
        """
        offered = self._offered.setdefault(address, deque())
        if len(offered) >= MAX_OFFERED:
            raise ClusterBusyError(
                f"{MAX_OFFERED} streams of {address} wait here already; it opens the "
                "next one when one was taken"
            )
        stream = OfferedStream(context)
        offered.append(stream)
        for waiting in self._waiting.get(address, ()):
            if not waiting.done():
                waiting.set_result(None)
        try:
            await asyncio.shield(stream.over)
        finally:
            stream.cancel()
            if stream in offered:
                offered.remove(stream)
            if not offered and self._offered.get(address) is offered:
                del self._offered[address]

    async def wait(self, address: Address, timeout_s: float) -> None:
        """Waits until a task offers a stream.

        Raises:
          ClusterUnreachableError: it did not, in that time.
        """
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(address, set())
        waiting.add(arrived)
        try:
            async with asyncio.timeout(timeout_s):
                if not self._offered.get(address):
                    await arrived
        except TimeoutError:
            raise ClusterUnreachableError(
                f"{address} only dials, and has no connection to here for "
                f"{timeout_s:g} s; look whether its process runs, and reaches this one",
                address=address,
                may_be_starting=True,
            ) from None
        finally:
            waiting.discard(arrived)
            if not waiting and self._waiting.get(address) is waiting:
                del self._waiting[address]

    @asynccontextmanager
    async def take(
        self, address: Address, method: str, names: Iterable[bytes], timeout_s: float
    ) -> AsyncIterator[OfferedStream]:
        """Gives a stream to a task that only dials.

        Args:
          address: which stands for the task.
          method: of which the stream is.
          names: whom it is for, in the certificate of that one; none: for this task.
          timeout_s: how long to wait for one.

        Raises:
          ClusterUnreachableError: there is none, in that time.
        """
        taken = frame(taken=pb.Taken(method=method, names=list(names)))
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while True:
            await self.wait(address, max(end - loop.time(), 0.0))
            if not (offered := self._offered.get(address)):
                continue  # another one took it
            # An older one may be of a connection that broke: not known here yet.
            stream = offered.pop()
            stream.take()
            try:
                try:
                    await StreamPipe(stream.write).write(encode(taken).pieces)
                except asyncio.InvalidStateError:
                    continue
                yield stream
            finally:  # also of one whose taker is given up before it has it
                stream.cancel()
            return
