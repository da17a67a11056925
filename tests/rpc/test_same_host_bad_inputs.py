"""What a hostile or mistaken sender can say about shared memory, and what it gets."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest

from jgraph.errors import MalformedMessageError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.dial import CHANNEL_OPTIONS
from jgraph.rpc.frames import body_of, frame, hello, kind_of
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.shared_memory.memory_blocks import Budget
from jgraph.rpc.shared_memory.shared_memory import SendMemory
from jgraph.rpc.shared_memory.slabs import Slabs
from jgraph.rpc.status import from_status
from jgraph.rpc.transport import Address, Frame
from jgraph.rpc.wire.codec import encode, pack, prepare
from jgraph.rpc.wire.decoder import Decoder
from jgraph.testing.transport_harness import PS, WORKER, Recorder, call, step
from tests.support.run_async import run_async

LARGE = np.arange(100_000, dtype=np.float32)


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[Recorder, Address]]:
    """A ps that must still answer at the end."""
    transport, recorder, client = GrpcTransport(PS), Recorder(), GrpcTransport(None)
    address = await transport.start(recorder)
    try:
        yield recorder, address
        await call(client, address, "Echo", step(3))
    finally:
        await client.close()
        await transport.close()


async def exchange(
    address: Address, first: pb.Hello, *later: bytes
) -> tuple[pb.Hello, list[Frame]]:
    """Dials like a sender; returns the answering Hello and what followed."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        accepted = asyncio.Event()

        async def requests() -> AsyncGenerator[bytes, None]:
            yield b"".join(pack(encode(frame(hello=first)).pieces))
            await accepted.wait()
            for data in later:
                yield data

        dial = channel.stream_stream("/jgraph.v1.Task/Exchange", None, None)
        decoder, got = Decoder(), list[Frame]()
        async for chunk in dial(requests(), timeout=20):
            got += decoder.feed(chunk)
            accepted.set()
    return body_of(got[0]), got[1:]


def announced(memory: pb.SharedMemory) -> pb.Hello:
    first = hello(WORKER, incarnation=5)
    first.shared_memory.CopyFrom(memory)
    return first


@pytest.mark.parametrize("case", ["other nonce", "no process", "no such file"])
def test_memory_out_of_reach_is_declined_with_one_line(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    memory = SendMemory(Slabs(Budget(1 << 20)))
    said = memory.announcement()
    if case == "other nonce":
        said.nonce = bytes(32)
    elif case == "no process":
        said.pid = 2**40
    else:
        said.fd = 2**31

    async def main() -> None:
        async with listening() as (at_ps, address):
            for _ in range(3):
                answer, rest = await exchange(address, announced(said))
                assert not answer.shares_memory
                assert not rest
            assert not at_ps.frames

    caplog.set_level(logging.INFO, "jgraph.rpc.exchange.receiver")
    run_async(main())
    memory.close()
    lines = [
        r.getMessage() for r in caplog.records if "shared memory" in r.getMessage()
    ]
    assert len(lines) == 1
    assert f"Tensors from {WORKER} come through the stream" in lines[0]


BAD_HANDLES = {
    "other file": (pb.SharedBlock(fd=0, offset=4096), "not shared memory"),
    "past the end": (pb.SharedBlock(fd=1, offset=1 << 40), "has"),
    "slot past the end": (pb.SharedBlock(fd=1, offset=4096, slot=1 << 31), "slot"),
}


@pytest.mark.parametrize("agreed", [True, False])
@pytest.mark.parametrize("case", BAD_HANDLES)
def test_hostile_handle_ends_the_stream_with_a_status(case: str, agreed: bool) -> None:
    memory = SendMemory(Slabs(Budget(1 << 20)))
    lent = memory.lend(LARGE)
    assert lent is not None
    handle, said = pb.SharedBlock(), BAD_HANDLES[case][1]
    handle.CopyFrom(BAD_HANDLES[case][0])
    if handle.fd:
        handle.fd, handle.slab = lent[0].fd, lent[0].slab
    bad = prepare(step(1, LARGE)).encoded({0: handle}, sequence=1)

    async def main() -> None:
        async with listening() as (at_ps, address):
            first = announced(memory.announcement())
            if not agreed:
                first.ClearField("shared_memory")
            answer, rest = await exchange(address, first, *pack(bad.pieces))
            assert answer.shares_memory == agreed
            assert kind_of(rest[-1]) == "status"
            error = from_status(body_of(rest[-1]))
            assert isinstance(error, MalformedMessageError)
            assert (said if agreed else "not agreed on") in error.message
            assert not at_ps.frames

    run_async(main())
    memory.close()
