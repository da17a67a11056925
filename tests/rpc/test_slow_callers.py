"""Who begins and does not go on, or opens ever more streams, takes little of a task."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import grpc
import numpy as np
import pytest

from jgraph.errors import (
    ClusterBusyError,
    ClusterUnreachableError,
    DeadlineError,
    JGError,
)
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.calls.caller import ASKS_METHOD
from jgraph.rpc.dial import CHANNEL_OPTIONS
from jgraph.rpc.exchange.link import EXCHANGE_METHOD
from jgraph.rpc.frames import body_of, frame, hello, kind_of
from jgraph.rpc.grpc import server_port
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.resumable import accepting
from jgraph.rpc.resumable.admission_control import RequestBudget
from jgraph.rpc.sockets.connecting import connect_local
from jgraph.rpc.transport import Address, Frame
from jgraph.rpc.wire.codec import LENGTH, MAX_HEADER_BYTES, pack
from jgraph.rpc.wire.decoder import Decoder
from jgraph.testing.transport_harness import (
    PS,
    WAIT_S,
    WORKER,
    Recorder,
    asked,
    numbers,
    step,
)
from tests.support.asks import HELLO, LARGE, LIMIT, Asks, ask, error_in, intake, told
from tests.support.run_async import run_async

BEGUN = ask(1, step(1, LARGE))[:100_000]


@asynccontextmanager
async def opened(
    address: Address, method: str = ASKS_METHOD, first: bytes = HELLO
) -> AsyncIterator[tuple[Asks, Frame]]:
    """A stream that has said Hello, and what the server said."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stream = channel.stream_stream(method, None, None)(None, timeout=WAIT_S)
        await stream.write(first)
        chunk = await stream.read()
        assert isinstance(chunk, bytes)
        (welcome,) = Decoder().feed(chunk)
        assert kind_of(welcome) == "hello"
        yield stream, welcome


async def writer(
    stream: Asks, welcome: Frame | None
) -> Callable[[bytes], Awaitable[None]]:
    """What sends over a stream, or over the socket that its server offered."""
    if welcome is None:
        return stream.write
    socket = await connect_local(body_of(welcome).local_socket, lambda data: None)
    assert socket is not None
    at_hand = socket
    return lambda chunk: at_hand.write((chunk,))


async def drip(write: Callable[[bytes], Awaitable[None]]) -> None:
    """Begins a large call, and then sends a byte of it now and then."""
    for chunk in pack([BEGUN]):
        await write(chunk)
    while True:
        await asyncio.sleep(0.02)
        await write(b"\1")


async def rest_of(stream: Asks) -> list[Frame]:
    decoder, got = Decoder(), list[Frame]()
    while isinstance(chunk := await stream.read(), bytes):
        got += decoder.feed(chunk)
    return got


async def end_of_dripping(address: Address, *, near: bool) -> JGError:
    """Returns why a call ends of which a byte comes now and then.

    Once in some hundred times gRPC's client tells of a byte that was on its way as the
    stream ended, and not of what the server said: such a call is made again.
    """
    for _ in range(5):
        async with opened(address) as (stream, welcome):
            write = await writer(stream, welcome if near else None)
            sending = asyncio.create_task(drip(write))
            try:
                return error_in(await rest_of(stream))
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.INTERNAL:
                    raise
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
    raise AssertionError("gRPC's client told of its own bytes five times")


@pytest.mark.bad_input_row(17)
@pytest.mark.parametrize("near", [True, False])
def test_call_that_goes_on_a_byte_at_a_time_is_refused_and_loses_its_room(
    near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "LOOK_EVERY_S", 0.1)

    async def main() -> None:
        server, client = GrpcTransport(PS, max_request_bytes=LIMIT), GrpcTransport(None)
        address = await server.start(Recorder())
        error = await end_of_dripping(address, near=near)
        assert isinstance(error, DeadlineError)
        assert f"what {PS} has room for did not go on arriving" in error.message
        assert server._room.taken == 0
        assert numbers(await asked(client, address, "Echo", step(3, LARGE))) == [3]
        await client.close()
        await server.close()

    run_async(main())


@pytest.mark.bad_input_row(17)
@pytest.mark.parametrize("near", [True, False])
def test_callers_that_begin_large_headers_and_fall_silent_are_dropped(
    near: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accepting, "LOOK_EVERY_S", 0.5)
    begun = LENGTH.pack(MAX_HEADER_BYTES) + b"x" * 1000

    async def main() -> None:
        server = GrpcTransport(PS, max_request_bytes=MAX_HEADER_BYTES * 3 // 2)
        client = GrpcTransport(None)
        address = await server.start(Recorder())
        is_taken, take = asyncio.Event(), server._room.take

        def noted(nbytes: int, *, always: bool = False) -> bool:
            is_taken.set()
            return take(nbytes, always=always)

        server._room.take = noted  # type: ignore[method-assign]  # as is seen below
        async with opened(address) as (first, here), opened(address) as (second, there):
            await (await writer(first, here if near else None))(begun)
            async with asyncio.timeout(WAIT_S):
                await is_taken.wait()
            await (await writer(second, there if near else None))(begun)
            assert isinstance(error_in(await rest_of(second)), ClusterBusyError)
            assert isinstance(error_in(await rest_of(first)), DeadlineError)
            assert server._room.taken == 0
        assert numbers(await asked(client, address, "Echo", step(3, LARGE))) == [3]
        await client.close()
        await server.close()

    run_async(main())


@pytest.mark.bad_input_row(17)
def test_call_that_goes_on_slowly_is_waited_for() -> None:
    room = RequestBudget(LIMIT)
    stream = intake(room)
    call = ask(1, step(1, LARGE))
    at = 0
    while at < len(call):
        assert room.taken == (LARGE.nbytes if at else 0)
        stream.decoder.feed(call[at : at + (64 << 10)])
        at += 64 << 10
        assert not stream.is_stuck()
    assert stream.begin(1, "Echo", PS) == LARGE.nbytes


@pytest.mark.bad_input_row(17)
def test_process_that_was_frozen_reads_on_before_it_gives_a_call_up() -> None:
    stream = intake(RequestBudget(LIMIT))
    stream.decoder.feed(BEGUN)
    assert [stream.is_stuck() for _ in range(2)] == [False] * 2
    stream.decoder.feed(BEGUN)
    assert [stream.is_stuck() for _ in range(3)] == [False, False, True]


@pytest.mark.bad_input_row(17)
def test_room_that_is_kept_for_a_call_that_does_not_come_is_given_back() -> None:
    async def main() -> None:
        room = RequestBudget(LIMIT)
        stream = intake(room)
        await stream.reserve(LIMIT, "Echo", PS)
        taken = []
        for _ in range(4):
            assert not stream.is_stuck()
            taken.append(room.taken)
        assert taken == [LIMIT, LIMIT, 0, 0]
        stream.decoder.feed(ask(1, step(1, np.ones(LIMIT, np.uint8))))
        assert stream.begin(1, "Echo", PS) == room.taken == LIMIT

    run_async(main())


@pytest.mark.bad_input_row(17)
def test_more_streams_than_a_server_takes_are_refused_until_one_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_port, "MAX_CONCURRENT_STREAMS", 3)

    async def main() -> None:
        server, client = GrpcTransport(PS), GrpcTransport(None)
        address = await server.start(Recorder())
        async with AsyncExitStack() as one_ends, AsyncExitStack() as others:
            await one_ends.enter_async_context(opened(address))
            for _ in range(2):  # of other connections: the bound is the server's
                await others.enter_async_context(opened(address))
            with pytest.raises(ClusterUnreachableError, match="too many calls at once"):
                await asked(client, address, "Echo", step(1))
            await one_ends.aclose()
            replies = list[Frame]()
            async with asyncio.timeout(WAIT_S):
                while not replies:  # the server may still have to learn of it
                    with suppress(ClusterUnreachableError):
                        replies = await asked(client, address, "Echo", step(2))
            assert numbers(replies) == [2]
        await client.close()
        await server.close()

    run_async(main())


@pytest.mark.bad_input_row(17)
def test_large_header_of_a_posted_frame_counts_before_it_has_arrived(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As that of a call: who begins one and falls silent keeps others out meanwhile."""
    monkeypatch.setattr(accepting, "LOOK_EVERY_S", 0.5)
    begun = LENGTH.pack(MAX_HEADER_BYTES) + b"x" * 1000
    task = told(frame(hello=hello(WORKER, incarnation=5)))

    async def main() -> None:
        server, client = GrpcTransport(PS, max_request_bytes=LIMIT), GrpcTransport(None)
        address = await server.start(Recorder())
        async with opened(address, EXCHANGE_METHOD, task) as (stream, _):
            await stream.write(begun)
            while not server._room.taken:
                await asked(client, address, "Echo", step(1))
            reply = await asked(client, address, "Echo", step(3, LARGE))
            assert numbers(reply) == [3]
            assert isinstance(error_in(await rest_of(stream)), DeadlineError)
            assert server._room.taken == 0
        await client.close()
        await server.close()

    run_async(main())
    assert f"calls, others have {MAX_HEADER_BYTES:,}" in caplog.text


def test_large_header_of_a_posted_frame_gives_its_room_back() -> None:
    async def main() -> None:
        server, worker, at_ps = GrpcTransport(PS), GrpcTransport(WORKER), Recorder()
        taken, take = list[int](), server._room.take

        def noted(nbytes: int, *, always: bool = False) -> bool:
            taken.append(nbytes)
            return take(nbytes, always=always)

        server._room.take = noted  # type: ignore[method-assign]  # as is seen below
        address = await server.start(at_ps)
        await worker.start(Recorder())
        worker.set_peers({PS: address})
        worker.post(PS, frame(call=pb.Call(method="x" * (1 << 20))))
        await at_ps.wait_frames(1)
        assert [nbytes >> 20 for nbytes in taken] == [1]
        assert server._room.taken == 0
        await worker.close()
        await server.close()

    run_async(main())
