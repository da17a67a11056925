"""Network inside of one process: connections that are late, cut, or out of reach.

TCP for the data ports, and streams of gRPC as ``grpc.aio`` has them. Each end learns
of a cut by itself, and one perhaps much later than the other.
"""

import asyncio
import itertools
import random
import socket as sockets
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, final

import grpc

from jgraph.rpc.dial import diagnose, split_address

WINDOW_BYTES: Final = 256 << 10


@final
class Network:
    """What connections of one process pass.

    Args:
      seed: of what is drawn.

    Attributes:
      chance: what is drawn from it: when things arrive, and in which pieces.
      delay_s: the longest that bytes take.
      notice_s: the longest until an end learns of a cut.
      refuses_data: connections to data ports are refused.
      slow_data: how likely it is that one takes seconds.
      stalled_until: all that comes before this time is noticed then, at once.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.delay_s = 0.004
        self.notice_s = 0.03
        self.refuses_data = False
        self.slow_data = 0.0
        self.stalled_until = 0.0
        self._ports = itertools.count(1000)
        self._listening: dict[int, Listening | Server] = {}
        self._open: set[_Cut] = set()

    def cut(self, share: float = 1.0) -> None:
        """Breaks connections, each with that likelihood."""
        for connection in sorted(self._open, key=lambda one: one.number):
            if self.chance.random() < share:
                connection.cut()

    def delay(self) -> float:
        """Returns how long something takes now."""
        return self.chance.random() ** 3 * self.delay_s

    def listen(self, host: str, port: int) -> Any:
        """Returns what stands for a listening socket."""
        del host
        number = port or next(self._ports)
        self._listening[number] = listening = Listening(self, number)
        return listening

    def end(self, port: int) -> None:
        """Lets nobody connect to a port any more."""
        self._listening.pop(port, None)

    def server(self, **_: Any) -> "Server":
        """Returns what stands for ``grpc.aio.server``."""
        return Server(self)

    def open_server(self, server: "Server", port: int) -> int:
        """Returns the port that leads to a server from now on (0: a free one)."""
        number = port or next(self._ports)
        if number in self._listening:
            raise RuntimeError("the port is taken")
        self._listening[number] = server
        return number

    async def connect(
        self, make: Callable[[], Any], port: int
    ) -> tuple[asyncio.Transport, Any]:
        """Connects to a port, or raises what a socket raises."""
        await asyncio.sleep(self.delay())
        there = self._listening.get(port)
        if there is None:
            raise ConnectionRefusedError
        if isinstance(there, Server):  # whether somebody listens is asked so
            return _Nothing(), make()
        if self.refuses_data:
            raise ConnectionRefusedError
        if self.chance.random() < self.slow_data:
            await asyncio.sleep(self.chance.uniform(0, 4))
        connection = _Tcp(self)
        there.arrive(connection.ends[1])
        return connection.ends[0].begin(make)

    async def open_channel(
        self, address: str, *, timeout_s: float, patient: bool, task: str = "", **_: Any
    ) -> "Channel":
        """Returns what stands for a connected channel."""
        port = split_address(address)[1]
        end = asyncio.get_running_loop().time() + (timeout_s if patient else 0.0)
        while True:
            await asyncio.sleep(self.delay())
            server = self._listening.get(port)
            if isinstance(server, Server):
                return Channel(self, server)
            if asyncio.get_running_loop().time() >= end:
                raise await diagnose(address, timeout_s=timeout_s, task=task)
            await asyncio.sleep(0.05)

    def add(self, connection: "_Cut") -> None:
        """Takes a connection that may be cut."""
        self._open.add(connection)

    def remove(self, connection: "_Cut") -> None:
        """Forgets one that is over."""
        self._open.discard(connection)


class _Cut:
    """What breaks as one."""

    _numbers = itertools.count()

    def __init__(self, network: Network) -> None:
        self.number = next(self._numbers)
        self.network = network
        self.is_cut = False
        self.ways: list[_Way] = []
        network.add(self)

    def cut(self) -> None:
        """Lets nothing through any more; the ends learn of it, each at its time."""
        if self.is_cut:
            return
        self.is_cut = True
        self.network.remove(self)
        loop = asyncio.get_running_loop()
        for way in self.ways:
            way.end()
        for notice in self.noticing():
            delay = self.network.chance.random() ** 2 * self.network.notice_s
            loop.call_at(max(loop.time() + delay, self.network.stalled_until), notice)

    def noticing(self) -> list[Callable[[], None]]:
        """Returns what each end does when it learns of the cut."""
        raise NotImplementedError


class _Way:
    """One direction: first in, first out, each after a while."""

    def __init__(self, connection: _Cut, take: Callable[[Any], None]) -> None:
        self._connection = connection
        self._take = take
        self._waiting: deque[tuple[float, Any]] = deque()
        self._is_paused = False
        self._due: asyncio.TimerHandle | None = None
        connection.ways.append(self)

    def send(self, what: Any) -> None:
        if self._connection.is_cut:
            return
        due = asyncio.get_running_loop().time() + self._connection.network.delay()
        if self._waiting:
            due = max(due, self._waiting[-1][0])
        self._waiting.append((due, what))
        self._schedule()

    def end(self) -> None:
        """Loses what has not arrived yet."""
        now = asyncio.get_running_loop().time()
        while self._waiting and self._waiting[-1][0] > now:
            self._waiting.pop()

    def pause(self) -> None:
        self._is_paused = True

    def go_on(self) -> None:
        self._is_paused = False
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and self._due is None and not self._is_paused:
            loop = asyncio.get_running_loop()
            stalled = self._connection.network.stalled_until
            due = max(self._waiting[0][0], loop.time(), stalled)
            self._due = loop.call_at(due, self._deliver)

    def _deliver(self) -> None:
        self._due = None
        if self._waiting and not self._is_paused:
            self._take(self._waiting.popleft()[1])
        self._schedule()


# ------------------------------------------------------------------------- TCP


@final
class Listening:
    """What stands for a listening socket."""

    def __init__(self, network: Network, port: int) -> None:
        self._network = network
        self._port = port
        self._arrived: asyncio.Queue[_End] = asyncio.Queue()

    def setblocking(self, flag: bool) -> None: ...

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self._port

    def arrive(self, end: "_End") -> None:
        self._arrived.put_nowait(end)

    async def accept(self) -> "_End":
        return await self._arrived.get()

    def close(self) -> None:
        self._network.end(self._port)


class _Nothing(asyncio.Transport):
    """A connection that is closed at once."""

    def __init__(self) -> None:
        super().__init__()

    def is_closing(self) -> bool:
        return True

    def close(self) -> None: ...


class _Socket:
    """What ``get_extra_info`` gives."""

    family = sockets.AF_INET

    def setsockopt(self, *_: object) -> None: ...


@final
class _Tcp(_Cut):
    """A connection of two ends."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.ends = _End(self), _End(self)
        self.ends[0].join(self.ends[1])
        self.ends[1].join(self.ends[0])

    def noticing(self) -> list[Callable[[], None]]:
        return [end.lose for end in self.ends]


@final
class _End(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, connection: _Tcp) -> None:
        super().__init__()
        self._connection = connection
        self._protocol: Any = None
        self._unread: deque[bytes] = deque()
        self._other: _End = self
        self._way = _Way(connection, self._passed)
        self._under_way = 0
        self._is_closing = self._is_lost = self._is_paused = False

    def join(self, other: "_End") -> None:
        self._other = other

    def begin(self, make: Callable[[], Any]) -> tuple[asyncio.Transport, Any]:
        self._protocol = make()
        self._protocol.connection_made(self)
        unread, self._unread = self._unread, deque()
        for data in unread:
            self._arrived(data)
        if self._is_lost:
            self._protocol.connection_lost(None)
        return self, self._protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        found = {"socket": _Socket(), "peername": ("127.0.0.1", 1)}
        return found.get(name, default)

    def set_write_buffer_limits(
        self, high: int | None = None, low: int | None = None
    ) -> None: ...

    def get_write_buffer_size(self) -> int:
        return self._under_way

    def is_closing(self) -> bool:
        return self._is_closing

    def writelines(self, parts: Any) -> None:
        for part in parts:
            self.write(part)

    def write(self, data: Any) -> None:
        if self._is_closing:
            return
        left = bytes(data)
        while left:
            n = self._connection.network.chance.randrange(1, 1 << 17)
            piece, left = left[:n], left[n:]
            self._way.send(piece)
            self._under_way += len(piece)
        if self._under_way > WINDOW_BYTES and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def _passed(self, data: bytes) -> None:
        """Hands on what has come to the other end."""
        self._under_way -= len(data)
        if self._is_paused and self._under_way <= WINDOW_BYTES // 4:
            self._is_paused = False
            if not self._is_lost:
                self._protocol.resume_writing()
        self._other._arrived(data)

    def _arrived(self, data: bytes) -> None:
        if self._is_lost:
            return
        if self._protocol is None:
            self._unread.append(data)
            return
        if not data:
            self.close()
            return
        while data and not self._is_closing:
            into = self._protocol.get_buffer(-1)
            n = min(len(into), len(data))
            into[:n] = data[:n]
            self._protocol.buffer_updated(n)
            data = data[n:]

    def pause_reading(self) -> None:
        self._other._way.pause()

    def resume_reading(self) -> None:
        self._other._way.go_on()

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._way.send(b"")
            asyncio.get_running_loop().call_soon(self.lose)

    def abort(self) -> None:
        self._is_closing = True
        self._connection.cut()
        self.lose()

    def lose(self) -> None:
        self._is_closing = True
        if not self._is_lost:
            self._is_lost = True
            if self._protocol is not None:
                self._protocol.connection_lost(None)


# ------------------------------------------------------------------------ gRPC


@final
class _Details:
    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


@final
class Server:
    """What stands for a server of gRPC."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._handlers: tuple[Any, ...] = ()
        self._port = 0
        self.running: set[asyncio.Task[None]] = set()

    def add_generic_rpc_handlers(self, handlers: tuple[Any, ...]) -> None:
        self._handlers = handlers

    def add_insecure_port(self, bind: str) -> int:
        self._port = self._network.open_server(self, int(bind.rpartition(":")[2]))
        return self._port

    async def start(self) -> None:
        await asyncio.sleep(self._network.delay())

    async def stop(self, grace: float | None) -> None:
        self._network.end(self._port)
        if grace and self.running:
            await asyncio.wait(self.running, timeout=grace)
        for task in list(self.running):
            task.cancel()

    def begin(self, method: str, call: "_Call") -> "asyncio.Task[None]":
        found = self._handlers[0].service(_Details(method))
        task = asyncio.create_task(call.served(found.stream_stream))
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        return task


@final
class Channel(_Cut):
    """What stands for a channel: one connection, with the streams on it."""

    def __init__(self, network: Network, server: Server) -> None:
        super().__init__(network)
        self._server = server
        self._calls: list[_Call] = []
        self._is_noticed = False

    def noticing(self) -> list[Callable[[], None]]:
        def here() -> None:
            self._is_noticed = True
            for call in self._calls:
                call.fail(grpc.StatusCode.UNAVAILABLE, "connection reset by peer")

        def there() -> None:
            for call in self._calls:
                call.context.hang_up()

        return [here, there]

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        del try_to_connect
        if self._is_noticed:
            return grpc.ChannelConnectivity.TRANSIENT_FAILURE
        return grpc.ChannelConnectivity.READY

    def stream_stream(self, method: str, *_: Any) -> Callable[..., "_Call"]:
        def open_stream(*_: Any, **__: Any) -> "_Call":
            call = _Call(self, self._server, method)
            self._calls.append(call)
            if self._is_noticed:
                call.fail(grpc.StatusCode.UNAVAILABLE, "connection reset by peer")
            return call

        return open_stream

    async def close(self, grace: float | None) -> None:
        del grace
        for call in self._calls:
            call.cancel()


class _Aborted(BaseException):
    """What ``abort`` raises."""


_EOF: Final[object] = grpc.aio.EOF  # type: ignore[attr-defined]  # stubs lack it


@final
class _Call:
    """One stream, as its caller has it."""

    def __init__(self, channel: Channel, server: Server, method: str) -> None:
        self._channel = channel
        self.context = _Context(channel, self)
        self._replies: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._status: asyncio.Future[tuple[grpc.StatusCode, str]] = (
            asyncio.get_running_loop().create_future()
        )
        self._was_cancelled = False
        self._up = _Way(channel, self.context.take)
        self._down = _Way(channel, self._take)
        self._window = _Window()
        self._server = server
        self._up.send(method)  # begins it there

    def begin(self, method: str) -> None:
        self.context.task = self._server.begin(method, self)

    def fail(self, code: grpc.StatusCode, details: str) -> None:
        if not self._status.done():
            self._status.set_result((code, details))
            self._replies.put_nowait(None)
            self._window.open()

    def _take(self, what: Any) -> None:
        if isinstance(what, tuple):
            self.fail(*what)
        elif not self._status.done():
            self.context.window.give(len(what))
            self._replies.put_nowait(what)

    def _raise(self) -> None:
        if self._was_cancelled:
            raise asyncio.CancelledError
        code, details = self._status.result()
        if code is not grpc.StatusCode.OK:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(code, nothing, nothing, details, None)

    async def write(self, data: bytes) -> None:
        assert isinstance(data, bytes)
        if self._status.done():
            raise asyncio.InvalidStateError("RPC already finished")
        self._up.send(data)
        try:
            await self._window.take(len(data))
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self._status.done():
            self._raise()

    def passed(self, nbytes: int) -> None:
        self._window.give(nbytes)

    async def done_writing(self) -> None:
        if not self._status.done():
            self._up.send(None)

    async def code(self) -> grpc.StatusCode:
        return (await asyncio.shield(self._status))[0]

    def cancel(self) -> None:
        if not self._status.done():
            self._was_cancelled = True
            self.fail(grpc.StatusCode.CANCELLED, "Locally cancelled")
            self._up.send(_Aborted)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (reply := await self._replies.get()) is not None:
            yield reply
        self._raise()

    async def served(self, handler: Callable[..., Any]) -> None:
        """Runs the handler of the server, and sends how it ended."""
        status = grpc.StatusCode.OK, ""
        try:
            await handler(None, self.context)
        except _Aborted as aborted:
            status = aborted.args
        except asyncio.CancelledError:
            status = grpc.StatusCode.CANCELLED, ""
        except grpc.aio.InternalError as error:
            status = grpc.StatusCode.UNKNOWN, str(error)
        self.context.is_over = True
        self._down.send(status)

    def reply(self, data: bytes) -> None:
        self._down.send(data)


@final
class _Window:
    """So many bytes are under way, at most."""

    def __init__(self) -> None:
        self._under_way = 0
        self._is_open = asyncio.Event()
        self._is_open.set()

    async def take(self, nbytes: int) -> None:
        self._under_way += nbytes
        if self._under_way > WINDOW_BYTES:
            self._is_open.clear()
        await asyncio.sleep(0)
        await self._is_open.wait()

    def give(self, nbytes: int) -> None:
        self._under_way -= nbytes
        if self._under_way <= WINDOW_BYTES:
            self._is_open.set()

    def open(self) -> None:
        self._under_way = -(1 << 60)
        self._is_open.set()


@final
class _Context:
    """One stream, as its server has it."""

    def __init__(self, channel: Channel, call: _Call) -> None:
        self._channel = channel
        self._call = call
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None
        self.window = _Window()
        self.is_over = False
        self._is_closed = False

    def take(self, what: Any) -> None:
        if isinstance(what, str):
            self._call.begin(what)
        elif what is _Aborted:
            self.hang_up()
        else:
            self._requests.put_nowait(what)

    def hang_up(self) -> None:
        """The caller is gone: what reads sees an end, and the handler is cancelled."""
        self._is_closed = True
        self._requests.put_nowait(None)
        self.window.open()
        if self.task is not None and not self.is_over:
            chance = self._channel.network.chance
            loop = asyncio.get_running_loop()
            # Reading may see it before, as the two are woken in any order.
            if chance.random() < 0.5:
                self.task.cancel()
            else:
                loop.call_later(chance.random() * 0.002, self.task.cancel)

    def auth_context(self) -> dict[str, Any]:
        return {}

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def read(self) -> Any:
        if self._is_closed:
            return _EOF
        data = await self._requests.get()
        if data is None:
            return _EOF
        self._call.passed(len(data))
        return data

    async def write(self, data: bytes) -> None:
        assert isinstance(data, bytes)
        if self._is_closed:
            raise grpc.aio.InternalError('Failed "execute_batch"')
        self._call.reply(data)
        await self.window.take(len(data))

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        raise _Aborted(code, details)
