"""A client and a ps whose connection passes a proxy, and what the ps was asked."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from jgraph.errors import JGError
from jgraph.graph.ir import TaskName
from jgraph.rpc.frames import body_of
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.transport import Frame
from jgraph.testing.tcp_proxy import TcpProxy
from jgraph.testing.transport_harness import PS, WAIT_S, asked, numbers, step

Remote = partial(GrpcTransport, same_machine="off")
LARGE = 4 << 20


class Counting:
    """A handler that keeps which calls it was asked, and answers when it may.

    ``Echo`` gives the request back, ``Large`` is answered by ``LARGE`` bytes, ``Count``
    by as many frames as its number says.
    """

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.stopped = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._changed = asyncio.Event()

    def frame_received(self, src: TaskName, frame: Frame) -> None: ...

    def peer_lost(self, peer: TaskName, error: JGError) -> None: ...

    async def handle_call(self, method: str, request: Frame) -> AsyncIterator[Frame]:
        self.asked.append(body_of(request).step_id)
        self._changed.set()
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.stopped += 1
            self._changed.set()
            raise
        if method == "Echo":
            yield request
        elif method == "Large":
            yield step(body_of(request).step_id, np.zeros(LARGE, np.uint8))
        else:
            for i in range(body_of(request).step_id):
                yield step(i, np.full(5000, i, np.int32))

    async def wait(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not done():
                self._changed.clear()
                await self._changed.wait()


@dataclass
class Pair:
    """A client that reaches a ps through a proxy."""

    proxy: TcpProxy
    at_ps: Counting
    client: GrpcTransport

    async def ask(self, number: int, nbytes: int = 0) -> int:
        request = step(number, np.zeros(nbytes, np.uint8))
        reply = await asked(self.client, self.proxy.address, "Echo", request)
        assert reply[0].tensors[0].nbytes == nbytes
        return numbers(reply)[0]

    def asking(self, number: int) -> "asyncio.Task[int]":
        return asyncio.create_task(self.ask(number))


@asynccontextmanager
async def paired(
    data_port: int | None = 0, *, greets: bool = True
) -> AsyncIterator[Pair]:
    """A pair, of which the ps was asked 0 if the client greets it."""
    at_ps = Counting()
    ps, client = (Remote(task, data_port=data_port) for task in (PS, None))
    async with TcpProxy(await ps.start(at_ps)) as proxy:
        try:
            pair = Pair(proxy, at_ps, client)
            if greets:
                await pair.ask(0)
            yield pair
        finally:
            await client.close()
            await ps.close()
