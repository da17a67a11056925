"""Tasks of one machine on gRPC: when memory is shared, and when it is not."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from jgraph.errors import ConfigError, TaskLostError
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.resumable import dialing, numbers
from jgraph.rpc.transport import Address, Frame, Tensor
from jgraph.testing.transport_harness import PS, WORKER, Recorder, step
from tests.support.run_async import run_async
from tests.support.spawned import spawned

LARGE = np.arange(100_000, dtype=np.float32)
SMALL = np.arange(100, dtype=np.float32)


@asynccontextmanager
async def pair(ps: GrpcTransport, worker: GrpcTransport) -> AsyncIterator[Recorder]:
    at_ps = Recorder()
    address = await ps.start(at_ps)
    await worker.start(Recorder())
    worker.set_peers({PS: address})
    try:
        yield at_ps
    finally:
        await worker.close()
        await ps.close()


async def post(at_ps: Recorder, worker: GrpcTransport, *tensors: Tensor) -> Frame:
    """Posts a frame and takes it at the other end, so that nobody else holds it."""
    worker.post(PS, step(0, *tensors))
    await at_ps.wait_frames(1)
    return at_ps.frames.pop()[1]


def test_large_tensors_go_through_shared_memory_and_small_ones_do_not() -> None:
    async def main() -> None:
        ps, worker = GrpcTransport(PS), GrpcTransport(WORKER)
        async with pair(ps, worker) as at_ps:
            got = await post(at_ps, worker, SMALL, LARGE, SMALL, LARGE.T)
            for ours, theirs in zip(
                (SMALL, LARGE, SMALL, LARGE), got.tensors, strict=True
            ):
                np.testing.assert_array_equal(ours, theirs)
            sent, received = (
                worker.statistics().peers[PS],
                ps.statistics().peers[WORKER],
            )
            assert sent.shared_bytes_sent == 2 * LARGE.nbytes
            assert received.shared_bytes_received == 2 * LARGE.nbytes
            assert 2 * SMALL.nbytes < sent.bytes_sent < 3 * SMALL.nbytes
            assert worker.statistics().reserved_bytes > 0

    run_async(main())


@pytest.mark.parametrize("data_port", [0, None])
def test_tensors_in_shared_memory_are_acknowledged_as_those_in_the_stream(
    data_port: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory can be shared and the local socket is out of reach."""

    async def out_of_reach(*given: object) -> None:
        del given

    monkeypatch.setattr(dialing, "connect_local", out_of_reach)
    monkeypatch.setattr(numbers, "WINDOW_BYTES", 2 * LARGE.nbytes)

    async def main() -> None:
        ps = GrpcTransport(PS, data_port=data_port)
        worker = GrpcTransport(WORKER, data_port=data_port)
        async with pair(ps, worker) as at_ps:
            sent = asyncio.Event()
            for i in range(5):
                worker.post(PS, step(i, LARGE, LARGE, LARGE))
            worker.when_sent(PS, sent.set)
            assert len(await at_ps.wait_frames(5)) == 5
            await sent.wait()
            there = worker.statistics().peers[PS]
            assert there.shared_bytes_sent == 15 * LARGE.nbytes

    run_async(main())


def test_small_frame_and_small_tensors_stay_in_the_stream() -> None:
    async def main() -> None:
        worker = GrpcTransport(WORKER)
        async with pair(GrpcTransport(PS), worker) as at_ps:
            medium = np.ones(5000, np.float32)
            await post(at_ps, worker, medium)
            assert worker.statistics().peers[PS].shared_bytes_sent == 0
            await post(at_ps, worker, *[medium] * 10, *[SMALL] * 10)
            assert worker.statistics().peers[PS].shared_bytes_sent == 10 * medium.nbytes

    run_async(main())


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_shared_memory_is_off_when_either_side_says_so(who: str) -> None:
    async def main() -> None:
        ps = GrpcTransport(PS, same_machine="off" if who == "receiver" else "auto")
        worker = GrpcTransport(
            WORKER, same_machine="off" if who == "sender" else "auto"
        )
        async with pair(ps, worker) as at_ps:
            got = await post(at_ps, worker, LARGE)
            np.testing.assert_array_equal(got.tensors[0], LARGE)
            sent = worker.statistics().peers[PS]
            assert (sent.shared_bytes_sent, worker.statistics().reserved_bytes) == (
                0,
                0,
            )
            assert sent.bytes_sent > LARGE.nbytes

    run_async(main())


def test_unknown_option_says_what_to_type() -> None:
    with pytest.raises(ConfigError, match="same_machine='auto'"):
        GrpcTransport(PS, same_machine="on")  # type: ignore[arg-type]


def test_memory_does_not_grow_over_hundreds_of_large_posts() -> None:
    async def main() -> None:
        worker = GrpcTransport(WORKER)
        async with pair(GrpcTransport(PS), worker) as at_ps:
            tensor = np.ones(1 << 20, np.float32)
            files, reserved = 0, set()
            kept: list[Frame] = []
            for i in range(200):
                kept = [*kept[-2:], await post(at_ps, worker, tensor)]
                reserved.add(worker.statistics().reserved_bytes)
                if i == 10:
                    files = len(memory_files())
            assert len(reserved) == 1
            assert 0 < len(memory_files()) <= files
            assert worker.statistics().peers[PS].bytes_sent < 200 * 100

    run_async(main())


def test_full_memory_falls_back_to_the_stream_and_recovers() -> None:
    async def main() -> None:
        worker = GrpcTransport(WORKER, max_shared_bytes=1 << 20)
        async with pair(GrpcTransport(PS), worker) as at_ps:
            kept = [await post(at_ps, worker, LARGE + i) for i in range(6)]
            for i, got in enumerate(kept):
                np.testing.assert_array_equal(got.tensors[0], LARGE + i)
            sent = worker.statistics().peers[PS]
            assert sent.shared_bytes_sent == 2 * LARGE.nbytes
            assert sent.bytes_sent > 4 * LARGE.nbytes
            assert worker.statistics().reserved_bytes <= 1 << 20
            del kept, got
            await post(at_ps, worker, LARGE)
            sent = worker.statistics().peers[PS]
            assert sent.shared_bytes_sent == 3 * LARGE.nbytes

    run_async(main())


def test_memory_that_cannot_grow_leaves_tensors_to_the_stream() -> None:
    import resource

    async def main() -> None:
        worker = GrpcTransport(WORKER)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        async with pair(GrpcTransport(PS), worker) as at_ps:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
            try:
                got = await post(at_ps, worker, LARGE)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            np.testing.assert_array_equal(got.tensors[0], LARGE)
            assert worker.statistics().peers[PS].shared_bytes_sent == 0
            await post(at_ps, worker, LARGE)
            assert worker.statistics().peers[PS].shared_bytes_sent == LARGE.nbytes

    run_async(main())


def test_one_block_is_enough_for_one_tensor_at_a_time() -> None:
    """The transport itself holds nothing that it has delivered."""

    async def main() -> None:
        worker = GrpcTransport(WORKER, max_shared_bytes=LARGE.nbytes + 4096)
        async with pair(GrpcTransport(PS), worker) as at_ps:
            for _ in range(5):
                await post(at_ps, worker, LARGE)
            sent = worker.statistics().peers[PS]
            assert sent.shared_bytes_sent == 5 * LARGE.nbytes

    run_async(main())


def test_arrays_outlive_the_sender_and_its_memory_is_given_back() -> None:
    async def main() -> None:
        ps, worker = GrpcTransport(PS), GrpcTransport(WORKER)
        async with pair(ps, worker) as at_ps:
            worker.post(PS, step(0, LARGE))
            await worker.close()
            await at_ps.wait_lost(WORKER)
            assert worker.statistics().reserved_bytes == 0
            np.testing.assert_array_equal(at_ps.frames[0][1].tensors[0], LARGE)

    run_async(main())


def test_memory_is_not_reused_for_a_receiver_whose_stream_ended() -> None:
    """It may still read what it got; a new stream gets new memory."""

    async def main() -> None:
        worker = GrpcTransport(WORKER)
        async with pair(GrpcTransport(PS), worker) as at_ps:
            old = await post(at_ps, worker, LARGE)
            at_worker = Recorder()
            other = GrpcTransport(PS)
            worker.set_peers({PS: await other.start(at_worker)})
            new = await post(at_worker, worker, -LARGE)
            np.testing.assert_array_equal(old.tensors[0], LARGE)
            np.testing.assert_array_equal(new.tensors[0], -LARGE)
            await other.close()

    run_async(main())


def play(pipe: Connection, sends: bool) -> None:
    """A process with a ps that keeps what it gets, or a worker that sends to one."""

    async def main() -> None:
        transport, recorder = GrpcTransport(WORKER if sends else PS), Recorder()
        pipe.send(await transport.start(recorder))
        if sends:
            transport.set_peers({PS: pipe.recv()})
            transport.post(PS, step(0, LARGE, LARGE))
        else:
            await recorder.wait_frames(1)
            pipe.send(float(recorder.frames[0][1].tensors[1].sum()))
        await asyncio.Event().wait()

    asyncio.run(main())


def memory_files(process: int | str = "self") -> list[str]:
    """The memory files of jgraph that a process has open or mapped."""
    gc.collect()
    files = Path(f"/proc/{process}/fd").iterdir()
    opened = [os.readlink(link) for link in files if link.is_symlink()]
    mapped = Path(f"/proc/{process}/maps").read_text().splitlines()
    return [line for line in (*opened, *mapped) if "/memfd:jgraph" in line]


@pytest.mark.procs
@pytest.mark.slow
@pytest.mark.parametrize("killed", ["sender", "receiver"])
def test_kill_9_of_either_side_leaves_nothing(killed: str) -> None:
    async def kill_receiver(address: Address, pipe: Connection) -> None:
        worker, at_worker = GrpcTransport(WORKER), Recorder()
        await worker.start(at_worker)
        worker.set_peers({PS: address})
        worker.post(PS, step(0, LARGE, LARGE))
        assert await asyncio.to_thread(pipe.recv) == float(LARGE.sum())
        assert worker.statistics().reserved_bytes > 0
        assert process.pid is not None
        assert memory_files(process.pid)
        process.kill()
        assert isinstance(await at_worker.wait_lost(PS), TaskLostError)
        assert worker.statistics().reserved_bytes == 0
        await worker.close()

    async def kill_sender(_: Address, pipe: Connection) -> None:
        ps, at_ps = GrpcTransport(PS), Recorder()
        pipe.send(await ps.start(at_ps))
        (got,) = await at_ps.wait_frames(1)
        process.kill()
        assert isinstance(await at_ps.wait_lost(WORKER), TaskLostError)
        assert ps.statistics().peers[WORKER].shared_bytes_received == 2 * LARGE.nbytes
        for tensor in got.tensors:
            np.testing.assert_array_equal(tensor, LARGE)
        await ps.close()

    before, named = memory_files(), sorted(os.listdir("/dev/shm"))
    with spawned(play, killed == "sender") as (process, pipe):
        act = kill_sender if killed == "sender" else kill_receiver
        run_async(act(pipe.recv(), pipe))
    assert memory_files() == before
    assert sorted(os.listdir("/dev/shm")) == named
