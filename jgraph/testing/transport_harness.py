"""Test harness of ``transport_conformance``: a recording task, a pair."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, NoReturn, Protocol, TypeVar

from jgraph.errors import (
    FeedError,
    JGError,
    UnknownMethodError,
)
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Address, Frame, Tensor, Transport

WAIT_S: Final = 20.0
"""Every wait of a check ends by then."""
PS: Final = TaskName("/job:ps/task:0")
WORKER: Final = TaskName("/job:worker/task:0")
SECRET: Final = "/secret/path/of/the/server"

_ErrorT = TypeVar("_ErrorT", bound=JGError)


class MakeTransport(Protocol):
    """Makes a transport for a task, or for a client; all of one network."""

    def __call__(
        self,
        task: TaskName | None,
        *,
        bind: Address = ...,
        max_queued_bytes: int | None = ...,
    ) -> Transport:
        """Returns a new transport, not started."""


class Way(Protocol):
    """A way to call: ``call`` or ``asked``."""

    async def __call__(
        self,
        transport: Transport,
        address: Address,
        method: str,
        request: Frame,
        timeout_s: float = ...,
    ) -> list[Frame]:
        """Returns the replies."""


class Recorder:
    """A handler that keeps what arrives and answers a few methods.

    ``Echo`` gives the request back, ``Count`` as many frames as the step id of the
    request says, ``Fail`` a ``FeedError``, ``Crash`` an error that is not ours, and
    ``Hang`` nothing at all.
    """

    def __init__(self) -> None:
        self.frames: list[tuple[TaskName, Frame]] = []
        self.lost: list[tuple[TaskName, JGError]] = []
        self.hanging = 0
        self._changed = asyncio.Event()

    def frame_received(self, src: TaskName, frame: Frame) -> None:
        """Keeps the frame."""
        self.frames.append((src, frame))
        self._changed.set()

    def peer_lost(self, peer: TaskName, error: JGError) -> None:
        """Keeps the loss."""
        self.lost.append((peer, error))
        self._changed.set()

    async def handle_call(
        self, method: str, request: Frame
    ) -> AsyncGenerator[Frame, None]:
        """Answers the methods of the class docstring."""
        if method == "Echo":
            yield request
        elif method == "Count":
            for i in range(body_of(request).step_id):
                yield step(i)
        elif method == "Fail":
            raise FeedError("x is float64, the step wants float32", argument="x")
        elif method == "Crash":
            raise ValueError(SECRET)
        elif method == "Hang":
            await self._hang()
        else:
            raise UnknownMethodError(f"no method '{method}'", method=method)

    async def _hang(self) -> None:
        self.hanging += 1
        self._changed.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.hanging -= 1
            self._changed.set()

    async def wait(self, done: Callable[[], bool], what: str) -> None:
        """Waits until ``done()``, or fails naming ``what`` it waited for."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not done():
                    await self._changed.wait()
                    self._changed.clear()
        except TimeoutError:
            fail(
                f"no {what} within {WAIT_S} s; {len(self.frames)} frames came, lost: "
                f"{self.lost}"
            )

    async def wait_frames(self, n: int) -> list[Frame]:
        """Waits for ``n`` frames and returns all."""
        await self.wait(lambda: len(self.frames) >= n, f"{n} frames")
        return [frame for _, frame in self.frames]

    async def wait_lost(self, peer: TaskName) -> JGError:
        """Waits until ``peer`` is reported as lost; returns the last reason."""
        await self.wait(lambda: peer in dict(self.lost), f"loss of {peer}")
        return dict(self.lost)[peer]


def fail(message: str) -> NoReturn:
    """Fails the check."""
    raise AssertionError(message)


def expect(condition: bool, message: object) -> None:
    """Fails the check unless the condition holds."""
    if not condition:
        fail(str(message))


def step(number: int, *tensors: Tensor) -> Frame:
    """Returns a small frame that carries a number."""
    return frame(start_step=pb.StartStep(step_id=number), tensors=tensors)


def numbers(frames: list[Frame]) -> list[int]:
    """Returns the numbers that frames of ``step`` carry."""
    return [body_of(f).step_id for f in frames]


@asynccontextmanager
async def started(
    make: MakeTransport,
) -> AsyncIterator[tuple[Transport, Recorder, Transport, Recorder, Address]]:
    """Gives a ps and a worker that know each other, and the address of the ps."""
    ps, worker = make(PS), make(WORKER)
    at_ps, at_worker = Recorder(), Recorder()
    try:
        address = await ps.start(at_ps)
        peers = {PS: address, WORKER: await worker.start(at_worker)}
        ps.set_peers(peers)
        worker.set_peers(peers)
        yield ps, at_ps, worker, at_worker, address
    finally:
        await worker.close()
        await ps.close()


async def call(
    transport: Transport,
    address: Address,
    method: str,
    request: Frame,
    timeout_s: float = WAIT_S,
) -> list[Frame]:
    """Returns all replies of a call."""
    replies = transport.call(address, method, request, timeout_s=timeout_s)
    return [reply async for reply in replies]


async def asked(
    transport: Transport,
    address: Address,
    method: str,
    request: Frame,
    timeout_s: float = WAIT_S,
) -> list[Frame]:
    """Returns the reply of a call that has one, in a list as ``call`` does."""
    return [await transport.ask(address, method, request, timeout_s=timeout_s)]


async def call_fails(
    kind: type[_ErrorT],
    transport: Transport,
    address: Address,
    method: str,
    timeout_s: float = WAIT_S,
    way: Way = call,
) -> _ErrorT:
    """Returns the error of a call, which must be of class ``kind``."""
    try:
        await way(transport, address, method, step(0), timeout_s)
    except kind as error:
        return error
    fail(f"'{method}' succeeded, {kind.__name__} was due")
