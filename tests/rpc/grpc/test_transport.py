"""What only gRPC can get wrong: ports, host names, other servers, dead processes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from jgraph.errors import (
    AddressError,
    ClusterUnreachableError,
    InternalError,
    JGError,
    PortInUseError,
    TaskLostError,
)
from jgraph.graph.ir import TaskName
from jgraph.rpc.dial import CHANNEL_OPTIONS
from jgraph.rpc.grpc.health import HealthServer
from jgraph.rpc.grpc.listening import server_options
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.transport import Address, Frame
from jgraph.testing.transport_harness import PS, WORKER, Recorder, call, step
from tests.support.ps_process import ps_process
from tests.support.run_async import run_async

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def post_error(address: Address) -> JGError:
    """What a worker learns when it posts to a ps at ``address``."""
    worker, at_worker = GrpcTransport(WORKER), Recorder()
    await worker.start(at_worker)
    worker.set_peers({PS: address})
    worker.post(PS, step(1))
    error = await at_worker.wait_lost(PS)
    await worker.close()
    return error


async def call_error(address: Address) -> JGError:
    """What a client learns when it calls ``address``."""
    client = GrpcTransport(None)
    try:
        await call(client, address, "Echo", step(1))
    except JGError as error:
        return error
    finally:
        await client.close()
    raise AssertionError("the call succeeded")


@asynccontextmanager
async def listener(talk: Talk) -> AsyncIterator[Address]:
    """A TCP server that is not one of ours."""
    open_ones: list[asyncio.StreamWriter] = []

    async def accept(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        open_ones.append(writer)
        await talk(reader, writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in open_ones:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


async def say_nothing(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    with suppress(ConnectionError):
        await reader.read()
    writer.close()


async def talk_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    await say_nothing(reader, writer)


async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


def test_grpc_knows_every_option_that_is_set() -> None:
    # It passes over others silently.
    (library,) = Path(grpc.__file__).parent.glob("_cython/cygrpc*.so")
    known = library.read_bytes()
    names = {name for name, _ in (*server_options(), *CHANNEL_OPTIONS)}
    assert [name for name in names if name.encode() not in known] == []


@pytest.mark.slow
@pytest.mark.combined
@pytest.mark.parametrize("talk", [say_nothing, talk_http, hang_up])
@pytest.mark.parametrize("ask", [call_error, post_error])
def test_server_that_is_not_grpc_is_said_within_seconds(
    talk: Talk, ask: Callable[[Address], Awaitable[JGError]]
) -> None:
    async def main() -> None:
        async with listener(talk) as address, asyncio.timeout(5):
            error = await ask(address)
        assert isinstance(error, ClusterUnreachableError)
        assert address in error.message
        assert "does not answer as a jgraph server" in error.message

    run_async(main())


@pytest.mark.parametrize("ask", [call_error, post_error])
def test_grpc_server_of_somebody_else_is_said(
    ask: Callable[[Address], Awaitable[JGError]],
) -> None:
    async def main() -> None:
        other = HealthServer()
        address = f"127.0.0.1:{await other.start('127.0.0.1:0')}"
        error = await ask(address)
        await other.close()
        assert isinstance(error, ClusterUnreachableError)
        assert "not a jgraph server" in error.message

    run_async(main())


@asynccontextmanager
async def ends_every_stream(
    *ends: tuple[grpc.StatusCode, str],
) -> AsyncIterator[Address]:
    """A gRPC server that ends each stream as told, the last way over and over."""
    left = list(ends)

    async def end(_: AsyncIterator[bytes], context: Any) -> None:
        await context.abort(*(left.pop(0) if len(left) > 1 else left[0]))

    handler = grpc.stream_stream_rpc_method_handler(end)
    service, methods = "jgraph.v1.Task", dict.fromkeys(("Asks", "Exchange"), handler)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, methods),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


NOT_OURS = [
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
]


@pytest.mark.parametrize("code", NOT_OURS, ids=lambda code: code.name)
@pytest.mark.parametrize("ask", [call_error, post_error])
def test_stream_that_ends_before_a_hello_is_not_of_a_jgraph_server(
    ask: Callable[[Address], Awaitable[JGError]], code: grpc.StatusCode
) -> None:
    """As where a proxy or a web server answers instead of gRPC."""

    async def main() -> None:
        async with ends_every_stream((code, "somebody else")) as address:
            error = await ask(address)
        assert isinstance(error, ClusterUnreachableError)
        assert f"not a jgraph server ({code.name}); check the port" in error.message

    run_async(main())


@pytest.mark.parametrize("ask", [call_error, post_error])
def test_stream_whose_end_grpc_lost_is_opened_again(
    ask: Callable[[Address], Awaitable[JGError]],
) -> None:
    lost = (grpc.StatusCode.INTERNAL, "Internal error from Core")
    told = (grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    async def main() -> None:
        async with ends_every_stream(lost, told) as address:
            error = await ask(address)
        assert "not a jgraph server (UNIMPLEMENTED)" in error.message

    run_async(main())


def test_refused_connection_says_what_to_type() -> None:
    async def main() -> None:
        other = HealthServer()
        address = f"127.0.0.1:{await other.start('127.0.0.1:0')}"
        await other.close()
        async with asyncio.timeout(3):
            error = await call_error(address)
        assert isinstance(error, ClusterUnreachableError)
        assert error.message == (
            f"no jgraph server at {address} (connection refused); the host answered, "
            f"so the port is wrong or the server is not up. Check: jgraph status; "
            f"start: jgraph up"
        )

    run_async(main())


@pytest.mark.parametrize("ask", [call_error, post_error])
def test_host_that_does_not_resolve_is_named(
    ask: Callable[[Address], Awaitable[JGError]],
) -> None:
    async def main() -> None:
        error = await ask("no-such-host.invalid:8470")
        assert isinstance(error, AddressError)
        assert "cannot resolve host 'no-such-host.invalid'" in error.message

    run_async(main())


@pytest.mark.parametrize(
    "address", ["", "host", ":1", "host:", "host:70000", "xds:///a:1", "a b:1", "h:1x"]
)
def test_text_that_is_no_address_is_refused(address: str) -> None:
    async def main() -> None:
        error = await call_error(address)
        assert isinstance(error, AddressError)
        assert "write host:port" in error.message

    run_async(main())


def test_who_asks_while_this_side_closes_is_told_that_and_not_cancelled() -> None:
    async def main() -> None:
        heard = asyncio.Event()

        async def says_nothing(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            heard.set()
            await reader.read()

        async with listener(says_nothing) as address:
            client = GrpcTransport(None)
            asking = asyncio.create_task(call(client, address, "Echo", step(1)))
            await heard.wait()
            await client.close()
            with pytest.raises(TaskLostError, match="because this side closed"):
                await asking

    run_async(main())


def test_taken_port_is_named() -> None:
    async def main() -> None:
        first = GrpcTransport(PS)
        address = await first.start(Recorder())
        port = address.rpartition(":")[2]
        second = GrpcTransport(WORKER, bind=address)
        with pytest.raises(PortInUseError, match=f"port {port} of 127.0.0.1 is taken"):
            await second.start(Recorder())
        await second.close()
        await first.close()

    run_async(main())


def test_address_of_another_machine_cannot_be_bound() -> None:
    async def main() -> None:
        transport = GrpcTransport(PS, bind="192.0.2.1:0")
        with pytest.raises(AddressError, match=r"cannot listen at 192\.0\.2\.1:0"):
            await transport.start(Recorder())
        await transport.close()

    run_async(main())


def test_ipv6_address_works() -> None:
    async def main() -> None:
        transport, client = GrpcTransport(PS, bind="[::1]:0"), GrpcTransport(None)
        address = await transport.start(Recorder())
        (reply,) = await call(client, address, "Echo", step(2))
        assert reply.header.start_step.step_id == 2
        await client.close()
        await transport.close()

    run_async(main())


class Fragile(Recorder):
    """Cannot take frames."""

    def frame_received(self, src: TaskName, frame: Frame) -> None:
        raise ValueError("/secret/path")


def test_crash_of_the_receiver_reaches_the_sender_without_its_text() -> None:
    async def main() -> None:
        ps = GrpcTransport(PS)
        error = await post_error(await ps.start(Fragile()))
        await ps.close()
        assert isinstance(error, InternalError)
        assert "secret" not in str(error)

    run_async(main())


def test_peer_that_moved_is_lost_and_then_reached_at_its_new_address() -> None:
    async def main() -> None:
        old, new, worker = GrpcTransport(PS), GrpcTransport(PS), GrpcTransport(WORKER)
        at_old, at_new, at_worker = Recorder(), Recorder(), Recorder()
        await worker.start(at_worker)
        worker.set_peers({PS: await old.start(at_old)})
        worker.post(PS, step(1))
        await at_old.wait_frames(1)
        worker.set_peers({PS: await new.start(at_new)})
        worker.post(PS, step(2))
        await at_new.wait_frames(1)
        error = await at_worker.wait_lost(PS)
        assert isinstance(error, TaskLostError)
        for transport in (worker, old, new):
            await transport.close()

    run_async(main())


def test_statistics_count_frames_bytes_and_calls() -> None:
    async def main() -> None:
        ps, worker = GrpcTransport(PS), GrpcTransport(WORKER)
        at_ps = Recorder()
        address = await ps.start(at_ps)
        await worker.start(Recorder())
        worker.set_peers({PS: address})
        for i in range(3):
            worker.post(PS, step(i, np.zeros(1000, np.float32)))
        await at_ps.wait_frames(3)
        await call(worker, address, "Echo", step(1))
        sent, got = worker.statistics(), ps.statistics()
        assert (sent.calls_made, got.calls_served) == (1, 1)
        assert sent.peers[PS].frames_sent == got.peers[WORKER].frames_received == 3
        assert 12_000 < got.peers[WORKER].bytes_received <= sent.peers[PS].bytes_sent
        await worker.close()
        await ps.close()

    run_async(main())


@pytest.mark.procs
@pytest.mark.slow
def way_to_ps(worker: GrpcTransport) -> str:
    """Returns how frames leave for the ps; empty: none can yet."""
    link = worker.statistics().peers.get(PS)
    return "" if link is None else link.way


def test_killed_process_is_lost_and_its_calls_end() -> None:
    async def main(address: Address) -> None:
        worker, at_worker = GrpcTransport(WORKER), Recorder()
        await worker.start(at_worker)
        worker.set_peers({PS: address})
        worker.post(PS, step(1))
        async with asyncio.timeout(20):
            while not way_to_ps(worker):  # its link is not there yet
                await call(worker, address, "Echo", step(1))
        hanging = asyncio.create_task(call(worker, address, "Hang", step(1)))
        await call(worker, address, "Echo", step(1))
        process.kill()
        async with asyncio.timeout(5):
            assert isinstance(await at_worker.wait_lost(PS), TaskLostError)
            with pytest.raises(TaskLostError, match="'Hang'"):
                await hanging
        await worker.close()

    with ps_process() as (process, address):
        run_async(main(address))
