"""The calling half of Asks: calls with one reply, over a stream that stays open.

Opening a stream for each call costs several times what the call itself does.
"""

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Final, final

import grpc

from jgraph.errors import JGError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.codec import Buffer, Prepared, encode, pack
from jgraph.rpc.decoder import Decoder
from jgraph.rpc.dial import call_error, deadline_error, is_cancelled, lost_call
from jgraph.rpc.frames import body_of, frame, kind_of
from jgraph.rpc.local_socket import connect, end_late
from jgraph.rpc.outbox import Outbox
from jgraph.rpc.status import from_status
from jgraph.rpc.transport import Address, Frame

ASKS_METHOD: Final = "/jgraph.v1.Task/Asks"
MAX_ASK_BYTES: Final = 1 << 20
"""A larger request has a stream of its own, so that small ones need not wait for it."""


@final
class AskLine:
    """Asks one server any number of things at a time.

    Args:
      address: where the server is.
      stream: of the method Asks, just opened.
      decoder: turns its chunks into frames.
      hello: who we are.
      near: take a socket that the server offers to callers of its machine.

    Attributes:
      is_broken: the stream ended; nothing can be asked any more.
    """

    def __init__(
        self,
        address: Address,
        stream: "grpc.aio.StreamStreamCall[bytes, bytes]",
        decoder: Decoder,
        hello: pb.Hello,
        *,
        near: bool,
    ) -> None:
        self.is_broken = False
        self._address = address
        self._stream = stream
        self._decoder = decoder
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._closing = False
        self._outbox = Outbox()
        self._hello = hello
        self._near = near
        self._welcome: asyncio.Future[pb.Hello] = (
            asyncio.get_running_loop().create_future()
        )
        self._refused: BaseException | None = None
        self._sending = asyncio.create_task(self._send())
        self._reading = asyncio.create_task(self._read())

    async def ask(self, method: str, request: Prepared, timeout_s: float) -> Frame:
        """Returns the reply.

        Raises:
          DeadlineError: no reply within ``timeout_s``.
          TaskLostError: the server went away before it.
          JGError: whatever the other side raised.
        """
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._outbox.put(request.encoded(sequence=number, method=method))
        try:
            async with asyncio.timeout(timeout_s):
                reply: Frame = await waiting
        except TimeoutError:
            raise deadline_error(method, self._address, timeout_s) from None
        except _Ended as ended:
            raise ended.error_of(method) from ended.__cause__
        finally:
            # Not there any more: it was answered, or there is nobody to tell.
            if self._waiting.pop(number, None) is not None:
                self._outbox.put(encode(frame(abandon=pb.Empty()), sequence=number))
        if kind_of(reply) == "status":
            raise from_status(body_of(reply))
        return reply

    async def close(self) -> None:
        """Ends the stream; what is asked fails."""
        self._closing = True
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def _send(self) -> None:
        # Why the stream failed is told by reading it.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for chunk in pack(encode(frame(hello=self._hello)).pieces):
                await self._stream.write(chunk)
            theirs = await self._welcome
            socket = None
            if self._near and theirs.HasField("local_socket"):
                socket = await connect(theirs.local_socket, self._feed)
            if socket is None:
                await self._outbox.run(self._stream.write)
                return
            socket.ended.add_done_callback(self._socket_ended)
            try:
                await self._outbox.run_over(socket)
            finally:
                socket.close()

    def _socket_ended(self, ended: "asyncio.Future[None]") -> None:
        self.is_broken = True  # also while the stream has not said why
        self._refused = ended.exception()
        end_late(self._stream, ended)

    async def _read(self) -> None:
        ended = _Ended(self._lost)
        try:
            async for chunk in self._stream:
                self._feed(chunk)
        except grpc.aio.AioRpcError as error:
            code = error.code()
            ended = _Ended(lambda method: self._failed(code, method))
            ended.__cause__ = error
        except JGError as error:
            told = error
            ended = _Ended(lambda _: told)
        except asyncio.CancelledError:
            # gRPC raises it as well when the other side cancels, i.e. shuts down.
            if is_cancelled() and not self._closing:
                raise
            if isinstance(self._refused, JGError):
                refused = self._refused
                ended = _Ended(lambda _: refused)
        finally:
            self.is_broken = True
            self._stream.cancel()
            self._sending.cancel()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(ended)
            self._waiting.clear()
            await asyncio.wait([self._sending])

    def _feed(self, chunk: Buffer) -> None:
        for reply in self._decoder.feed(chunk):
            self._take(reply)

    def _take(self, reply: Frame) -> None:
        if kind_of(reply) == "hello" and not self._welcome.done():
            self._welcome.set_result(body_of(reply))
            return
        number = reply.header.sequence
        if number == 0 and kind_of(reply) == "status":
            raise from_status(body_of(reply))
        reply.header.ClearField("sequence")
        waiting = self._waiting.pop(number, None)
        if waiting is not None and not waiting.done():  # else it was given up
            waiting.set_result(reply)

    def _lost(self, method: str) -> JGError:
        return lost_call(method, self._address, self._closing)

    def _failed(self, code: grpc.StatusCode, method: str) -> JGError:
        return call_error(code, method, self._address, 0.0)


class _Ended(Exception):  # noqa: N818  # what happened, not yet whose error it is
    """The stream ended; each method that waits has an error of its own."""

    def __init__(self, error_of: Callable[[str], JGError]) -> None:
        super().__init__()
        self.error_of = error_of
