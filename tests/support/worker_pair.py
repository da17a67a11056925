"""A worker and a ps whose connection passes a proxy, and what each of them heard."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.testing.tcp_proxy import TcpProxy
from jgraph.testing.transport_harness import PS, WORKER, Recorder, numbers

Remote = partial(GrpcTransport, same_machine="off")


@dataclass
class Pair:
    """A worker that reaches a ps through a proxy; the ps knows the worker."""

    proxy: TcpProxy
    ps: GrpcTransport
    at_ps: Recorder
    worker: GrpcTransport
    at_worker: Recorder

    async def has(self, n: int) -> list[int]:
        return numbers(await self.at_ps.wait_frames(n))


@asynccontextmanager
async def paired() -> AsyncIterator[Pair]:
    ps, at_ps, worker, at_worker = Remote(PS), Recorder(), Remote(WORKER), Recorder()
    address = await ps.start(at_ps)
    async with TcpProxy(address) as proxy:
        ps.set_peers({WORKER: await worker.start(at_worker)})
        worker.set_peers({PS: proxy.address})
        try:
            yield Pair(proxy, ps, at_ps, worker, at_worker)
        finally:
            await worker.close()
            await ps.close()
