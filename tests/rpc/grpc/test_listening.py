"""What nobody closed does not outlive its event loop."""

import asyncio
import errno
import gc
import socket
from collections.abc import Awaitable, Callable

import pytest

from jgraph.rpc.grpc import server_port
from jgraph.rpc.grpc.health import HealthServer
from jgraph.rpc.grpc.server_port import ServerPort
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.sockets.listener import new_data_socket
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


def test_who_cannot_open_one_door_closes_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[socket.socket] = []
    make = new_data_socket

    def data_socket(host: str, port: int) -> socket.socket:
        opened.append(make(host, port))
        return opened[-1]

    def no_socket() -> tuple[socket.socket, str]:
        raise OSError(errno.EMFILE, "no more files")

    monkeypatch.setattr(server_port, "new_data_socket", data_socket)
    monkeypatch.setattr(server_port, "new_local_socket", no_socket)

    async def main() -> None:
        port = ServerPort("127.0.0.1:0", 0, None, None, seals=False)
        with pytest.raises(OSError, match="no more files"):
            port.open_doors(near=True)
        before = asyncio.current_task()
        await asyncio.wait(asyncio.all_tasks() - {before}, timeout=10)
        assert opened[0].fileno() == -1

    asyncio.run(main())
