"""Whatever is sent to the port of a task, it answers clearly and stays up."""

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from multiprocessing.context import SpawnProcess
from pathlib import Path

import grpc
import numpy as np
import pytest

from jgraph.errors import (
    FencedError,
    MalformedMessageError,
    MessageTooLargeError,
    VersionError,
)
from jgraph.rpc.calls.caller import ASKS_METHOD
from jgraph.rpc.dial import CHANNEL_OPTIONS
from jgraph.rpc.exchange.link import EXCHANGE_METHOD
from jgraph.rpc.frames import (
    PROTOCOL,
    body_of,
    frame,
    hello,
    installed_version,
    kind_of,
)
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.transport import Address, Frame
from jgraph.rpc.wire.decoder import Decoder
from jgraph.testing.transport_harness import PS, WORKER, Recorder, call, step
from tests.support.bad_frames import data, error_in
from tests.support.ps_process import ps_process
from tests.support.run_async import run_async

pytestmark = pytest.mark.usefixtures("nothing_is_left")

HELLO = frame(hello=hello(WORKER, incarnation=5))


@asynccontextmanager
async def ps(max_frame_bytes: int = 1 << 20) -> AsyncIterator[tuple[Recorder, Address]]:
    """A ps that must still answer at the end."""
    transport, recorder = GrpcTransport(PS, max_frame_bytes=max_frame_bytes), Recorder()
    address = await transport.start(recorder)
    client = GrpcTransport(None)
    try:
        yield recorder, address
        (reply,) = await call(client, address, "Echo", step(3))
        assert body_of(reply).step_id == 3
    finally:
        await client.close()
        await transport.close()


async def send(method: str, address: Address, chunks: Iterable[bytes]) -> list[Frame]:
    """Sends raw chunks to a method; returns the frames that come back."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        dial = channel.stream_stream(f"/jgraph.v1.Task/{method}", None, None)
        decoder = Decoder()
        stream = dial(iter(chunks), timeout=20)
        return [f async for chunk in stream for f in decoder.feed(chunk)]


def raw_bytes(seed: int) -> bytes:
    preface = [b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
    return preface[seed % 3] + random.Random(seed).randbytes(200 * seed)


@pytest.mark.parametrize("seed", range(6))
def test_server_survives_random_bytes_on_its_port(seed: int) -> None:
    async def main() -> None:
        async with ps() as (recorder, address):
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            with suppress(ConnectionError):
                writer.write(raw_bytes(seed))
                writer.write_eof()
                async with asyncio.timeout(20):
                    await reader.read()
            writer.close()
            assert not recorder.frames

    run_async(main())


NO_TASK = frame(hello=hello(None, incarnation=5))
NO_INCARNATION = frame(hello=hello(WORKER, incarnation=0))
BAD_EXCHANGES = {
    "random bytes": ([b"\x00\x01random bytes instead"], "not a jgraph message"),
    "nothing": ([], "ended before its first frames"),
    "no Hello": ([data(step(1))], "begins with a Hello frame; 'start_step'"),
    "a client": ([data(NO_TASK)], "is not from a task"),
    "no incarnation": ([data(NO_INCARNATION)], "is not from a task"),
    "a gap": ([data(HELLO), data(step(1)), data(step(3), first=3)], "are missing"),
    "the last number there is": (
        [data(HELLO), data(step(1)), data(step(3), first=2**64 - 1)],
        "are missing",
    ),
    "half a frame": ([data(HELLO), data(step(1))[:-2]], "middle of a frame"),
}


@pytest.mark.bad_input_row(13)
@pytest.mark.parametrize("case", BAD_EXCHANGES)
def test_bad_exchange_is_answered_with_a_status(case: str) -> None:
    chunks, said = BAD_EXCHANGES[case]

    async def main() -> None:
        async with ps() as (_, address):
            frames = await send("Exchange", address, chunks)
            assert kind_of(frames[0]) == "hello"
            error = error_in(frames)
            assert isinstance(error, MalformedMessageError)
            assert said in error.message

    run_async(main())


@pytest.mark.row(7)
def test_repeated_frame_is_delivered_once() -> None:
    async def main() -> None:
        async with ps() as (recorder, address):
            again = data(step(7), step(8))
            await send("Exchange", address, [data(HELLO), again, again])
            assert [body_of(f).step_id for _, f in recorder.frames] == [7, 8]
            assert recorder.frames[0][0] == WORKER

    run_async(main())


@pytest.mark.bad_input_row(3)
def test_older_incarnation_is_refused_after_a_newer_one() -> None:
    async def main() -> None:
        async with ps() as (recorder, address):
            newer = frame(hello=hello(WORKER, incarnation=6))
            for first in (HELLO, newer):
                await send("Exchange", address, [data(first), data(step(1))])
            frames = await send("Exchange", address, [data(HELLO), data(step(2))])
            error = error_in(frames)
            assert isinstance(error, FencedError)
            assert "started again" in error.message
            assert [body_of(f).step_id for _, f in recorder.frames] == [1, 1]

    run_async(main())


@pytest.mark.bad_input_row(4)
@pytest.mark.parametrize("version", [PROTOCOL - 1, 99])
def test_other_version_of_the_protocol_is_named_on_both_sides(version: int) -> None:
    async def main() -> None:
        async with ps() as (recorder, address):
            other = frame(hello=hello(WORKER, incarnation=5, protocol=version))
            error = error_in(await send("Exchange", address, [data(other)]))
            assert isinstance(error, VersionError)
            worker, at_worker = GrpcTransport(WORKER, protocol=version), Recorder()
            await worker.start(at_worker)
            worker.set_peers({PS: address})
            worker.post(PS, step(1))
            error = await at_worker.wait_lost(PS)
            await worker.close()
            assert isinstance(error, VersionError)
            assert f"protocol {PROTOCOL} " in error.message
            assert f"this side {version} " in error.message
            assert not recorder.frames

    run_async(main())


@pytest.mark.bad_input_row(4)
def test_another_jgraph_is_named_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    own = installed_version("jgraph")

    async def main() -> None:
        async with ps() as (recorder, address):
            with monkeypatch.context() as other:
                other.setattr("jgraph.rpc.frames.installed_version", lambda _: "9.9")
                worker, at_worker = GrpcTransport(WORKER), Recorder()
                greeting = frame(hello=hello(WORKER, incarnation=5))
            error = error_in(await send("Exchange", address, [data(greeting)]))
            assert isinstance(error, VersionError)
            assert f"runs jgraph 9.9, this side {own}" in error.message
            await worker.start(at_worker)
            worker.set_peers({PS: address})
            worker.post(PS, step(1))
            error = await at_worker.wait_lost(PS)
            await worker.close()
            assert isinstance(error, VersionError)
            assert "one version of jgraph everywhere" in error.message
            assert not recorder.frames

    run_async(main())


@pytest.mark.bad_input_row(16)
def test_chunk_over_the_limit_of_grpc_is_refused_by_grpc() -> None:
    async def main() -> None:
        async with ps() as (_, address):
            unlimited = [("grpc.max_send_message_length", -1)]
            async with grpc.aio.insecure_channel(address, unlimited) as channel:
                dial = channel.stream_stream(ASKS_METHOD, None, None)
                for compression in (None, grpc.Compression.Gzip):
                    stream = dial(
                        iter([bytes(32 << 20)]), timeout=20, compression=compression
                    )
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        assert [chunk async for chunk in stream]
                    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    run_async(main())


@pytest.mark.bad_input_row(16)
@pytest.mark.parametrize("method", [ASKS_METHOD, EXCHANGE_METHOD])
def test_a_chunk_too_large_when_unpacked_is_one_line_of_the_log_at_most(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC ends the stream, and what is answered meets its end or does not."""
    bomb, streams = bytes(5 << 20), 12

    async def main() -> None:
        async with ps() as (_, address):
            unlimited = [("grpc.max_send_message_length", -1)]
            async with grpc.aio.insecure_channel(address, unlimited) as channel:
                dial = channel.stream_stream(method, None, None)
                for n in range(streams):
                    first = [data(HELLO)] * (n % 2)
                    stream = dial(
                        iter([*first, bomb]), compression=grpc.Compression.Gzip
                    )
                    with suppress(grpc.aio.AioRpcError):
                        async for _ in stream:
                            pass

    run_async(main())
    assert len(caplog.records) <= streams
    assert not [record for record in caplog.records if record.exc_info]


def most_memory(process: SpawnProcess) -> int:
    """The most bytes that a process has had in memory at once."""
    said = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    return int(said.partition("VmHWM:")[2].split()[0]) << 10


@pytest.mark.bad_input_row(16)
@pytest.mark.procs
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not tell")
def test_memory_stays_flat_whatever_a_compressed_chunk_would_be() -> None:
    bomb = 128 << 20

    async def send_compressed(address: Address, nbytes: int) -> grpc.StatusCode:
        unlimited = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(address, unlimited) as channel:
            stream = channel.stream_stream(ASKS_METHOD, None, None)(
                iter([bytes(nbytes)]), timeout=60, compression=grpc.Compression.Gzip
            )
            with suppress(grpc.aio.AioRpcError):
                assert [chunk async for chunk in stream]
            return await stream.code()

    with ps_process() as (process, address):
        # What is not too large is unpacked: this is no message of ours.
        assert run_async(send_compressed(address, 1000)) is grpc.StatusCode.OK
        before = most_memory(process)
        refused = run_async(send_compressed(address, bomb), timeout_s=90)
        assert refused is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert most_memory(process) - before < bomb // 8


@pytest.mark.bad_input_row(16)
def test_frame_over_the_limit_is_refused_while_it_is_still_being_sent() -> None:
    async def main() -> None:
        async with ps(max_frame_bytes=100_000) as (recorder, address):
            large = step(1, np.zeros(4_000_000))
            worker, at_worker = GrpcTransport(WORKER), Recorder()
            await worker.start(at_worker)
            worker.set_peers({PS: address})
            with pytest.raises(MessageTooLargeError, match="limit of 100,000"):
                await call(worker, address, "Echo", large)
            worker.post(PS, large)
            error = await at_worker.wait_lost(PS)
            assert isinstance(error, MessageTooLargeError)
            await worker.close()
            assert not recorder.frames

    run_async(main())
