"""A process that listens as a ps."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.transport import Address
from jgraph.testing.transport_harness import PS, Recorder
from tests.support.spawned import spawned


def serve_until_killed(pipe: Connection) -> None:
    async def main() -> None:
        transport = GrpcTransport(PS)
        pipe.send(await transport.start(Recorder()))
        await asyncio.Event().wait()

    asyncio.run(main())


@contextmanager
def ps_process() -> Iterator[tuple[SpawnProcess, Address]]:
    """A ps of its own process, and where it listens."""
    with spawned(serve_until_killed) as (process, pipe):
        yield process, pipe.recv()
