"""What nobody closed does not outlive its event loop."""

import asyncio
import gc
import socket
from collections.abc import Awaitable, Callable

import pytest

from jgraph.rpc.grpc.health import HealthServer
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.testing.transport_harness import PS, Recorder, asked, step


async def transport() -> int:
    server, client = GrpcTransport(PS), GrpcTransport(None)
    address = await server.start(Recorder())
    await asked(client, address, "Echo", step(1))
    return int(address.rpartition(":")[2])


async def health() -> int:
    return await HealthServer().start("127.0.0.1:0")


@pytest.mark.usefixtures("little_garbage")
@pytest.mark.parametrize("start", [transport, health])
def test_server_of_a_program_that_failed_stops_with_its_loop(
    start: Callable[[], Awaitable[int]],
) -> None:
    """Else gRPC would wait for it, forever, where its memory is collected."""
    ports = []

    async def main() -> None:
        ports.append(await start())
        with socket.create_connection(("127.0.0.1", ports[0]), timeout=10):
            raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        asyncio.run(main())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports[0]), timeout=10)
    gc.collect()  # warnings of what was not closed are errors
