"""What a mistaken or hostile caller can send over a stream of calls."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest

from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.calls.answering import MAX_UNANSWERED
from jgraph.rpc.calls.caller import ASKS_METHOD
from jgraph.rpc.dial import CHANNEL_OPTIONS
from jgraph.rpc.frames import PROTOCOL, body_of, frame, hello, kind_of
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.resumable import outbox
from jgraph.rpc.sockets.connecting import connect_local
from jgraph.rpc.transport import Address, Frame
from jgraph.rpc.wire.codec import encode, pack, prepare
from jgraph.rpc.wire.decoder import Decoder
from jgraph.testing.transport_harness import PS, Recorder, asked, numbers, step
from tests.support.asks import HELLO, Asks, error_in, send, told
from tests.support.run_async import run_async


@asynccontextmanager
async def ps() -> AsyncIterator[Address]:
    """A ps that must still answer at the end."""
    transport = GrpcTransport(PS)
    address, client = await transport.start(Recorder()), GrpcTransport(None)
    try:
        yield address
        assert numbers(await asked(client, address, "Echo", step(3))) == [3]
    finally:
        await client.close()
        await transport.close()


def ask(number: int, method: str = "Echo", request: Frame | None = None) -> bytes:
    encoded = prepare(request or step(1)).encoded(sequence=number, method=method)
    return b"".join(pack(encoded.pieces))


BAD = {
    "random bytes": ([b"\x00\x01random bytes instead"], "not a jgraph message"),
    "nothing": ([], "ended before its first frames"),
    "no Hello": ([ask(1)], "begins with a Hello frame; 'start_step'"),
    "a second Hello": ([HELLO, HELLO], "'hello' came with number 0"),
    "bad type": (
        [HELLO, ask(1, request=step(1, np.ones(2))).replace(b"float64", b"object_")],
        "dtype 'object_', which is not allowed",
    ),
    "nothing to resume": (
        [told(frame(hello=pb.Hello(protocol=PROTOCOL, line=3, resumes=True)))],
        "cannot be resumed",
    ),
    "no number": ([HELLO, ask(0)], "came with number 0"),
    "no method": ([HELLO, ask(1, "")], "and method ''"),
    "a number twice": ([HELLO, ask(1, "Hang") + ask(1)], "call 1 was made twice"),
    "half a call": ([HELLO, ask(1)[:-1]], "middle of a frame"),
    "another protocol": (
        [told(frame(hello=hello(None, 5, protocol=99)))],
        "speaks protocol 99",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_stream_of_calls_ends_with_a_status(case: str) -> None:
    chunks, said = BAD[case]

    async def main() -> None:
        async with ps() as address:
            assert said in error_in(await send(address, chunks)).message

    run_async(main())


def test_nobody_waits_for_a_call_that_was_never_made() -> None:
    async def main() -> None:
        async with ps() as address:
            given_up = prepare(frame(abandon=pb.Empty())).encoded(sequence=7)
            got = await send(address, [HELLO, b"".join(given_up.pieces)])
            assert [kind_of(f) for f in got] == ["hello"]

    run_async(main())


def test_calls_given_up_as_soon_as_they_were_made_take_no_place_of_others() -> None:
    abandon = frame(abandon=pb.Empty())
    made = [
        ask(number, "Hang") + b"".join(encode(abandon, sequence=number).pieces)
        for number in range(1, MAX_UNANSWERED + 2)
    ]

    async def main() -> None:
        async with ps() as address:
            got = await send(address, [HELLO, b"".join(made), ask(5000)])
            assert [kind_of(f) for f in got if not f.header.HasField("ack")] == [
                "hello",
                "start_step",
            ]

    run_async(main())


@pytest.mark.parametrize("near", [True, False])
def test_server_reads_no_calls_of_one_who_takes_no_replies(
    near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "FULL_BYTES", 4 << 20)

    async def over_the_stream(stream: Asks) -> int:
        return await calls_taken(stream.write)

    async def over_a_socket(stream: Asks) -> int:
        chunk = await stream.read()
        assert isinstance(chunk, bytes)
        (welcome,) = Decoder().feed(chunk)
        socket = await connect_local(body_of(welcome).local_socket, lambda data: None)
        assert socket is not None
        socket.pause_reading()
        sent = await calls_taken(lambda chunk: socket.write((chunk,)))
        socket.close()
        await socket.ended
        return sent

    async def main() -> None:
        async with (
            ps() as address,
            grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel,
        ):
            stream = channel.stream_stream(ASKS_METHOD, None, None)(None, timeout=20)
            await stream.write(HELLO)
            sent = await (over_a_socket if near else over_the_stream)(stream)
            assert sent < 100  # what fits into the server and the kernel

    run_async(main())


async def calls_taken(write: Callable[[bytes], Awaitable[None]]) -> int:
    """Calls a hundred times, or until the other side takes no more."""
    large = step(1, np.zeros(1 << 20, np.uint8))
    for number in range(1, 100):
        try:
            async with asyncio.timeout(2):
                for chunk in pack([ask(number, "Echo", large)]):
                    await write(chunk)
        except TimeoutError:
            return number
    return 100
