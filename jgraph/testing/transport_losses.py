"""Transport conformance: lost tasks; see ``transport_conformance``."""

import asyncio

from jgraph.errors import (
    ClusterUnreachableError,
    PortInUseError,
    RoleError,
    TaskLostError,
    UnknownDeviceError,
)
from jgraph.graph.ir import TaskName
from jgraph.testing.transport_harness import (
    PS,
    WORKER,
    MakeTransport,
    Recorder,
    call,
    expect,
    fail,
    numbers,
    started,
    step,
)


async def sender_learns_that_the_receiver_closed(make: MakeTransport) -> None:
    """The error names the task and its address."""
    async with started(make) as (ps, at_ps, worker, at_worker, address):
        worker.post(PS, step(0))
        await at_ps.wait_frames(1)
        await ps.close()
        error = await at_worker.wait_lost(PS)
        expect(isinstance(error, TaskLostError), repr(error))
        expect(PS in error.message and address in error.message, error)


async def receiver_learns_that_the_sender_closed(make: MakeTransport) -> None:
    """After the last frames, which close still delivers."""
    async with started(make) as (_, at_ps, worker, at_worker, _):
        for i in range(100):
            worker.post(PS, step(i))
        await worker.close()
        error = await at_ps.wait_lost(WORKER)
        expect(isinstance(error, TaskLostError) and WORKER in error.message, error)
        expect(numbers([f for _, f in at_ps.frames]) == list(range(100)), "lost some")
        expect(not at_worker.lost, at_worker.lost)


async def frames_posted_before_the_peer_listens_arrive(make: MakeTransport) -> None:
    """Tasks may start in any order."""
    async with started(make) as (ps, _, worker, at_worker, address):
        await ps.close()
        worker.post(PS, step(7))
        late, at_late = make(PS, bind=address), Recorder()
        await late.start(at_late)
        try:
            expect(numbers(await at_late.wait_frames(1)) == [7], at_late.frames)
            expect(not at_worker.lost, at_worker.lost)
        finally:
            await late.close()


async def peer_that_never_listens_is_lost_in_seconds(make: MakeTransport) -> None:
    """A post never blocks and never waits for ever."""
    async with started(make) as (ps, _, worker, at_worker, address):
        await ps.close()
        worker.post(PS, step(0))
        async with asyncio.timeout(5):
            error = await at_worker.wait_lost(PS)
        expect(isinstance(error, ClusterUnreachableError), repr(error))
        expect(f"no jgraph server for {PS} at {address}" in error.message, error)


async def peer_without_address_is_lost(make: MakeTransport) -> None:
    """Reported like any other loss, not raised."""
    nobody = TaskName("/job:ps/task:9")
    async with started(make) as (_, _, worker, at_worker, _):
        worker.post(nobody, step(0))
        expect(not at_worker.lost, "peer_lost was called inside post")
        error = await at_worker.wait_lost(nobody)
        expect(isinstance(error, UnknownDeviceError), repr(error))


async def another_task_at_the_address_gets_nothing(make: MakeTransport) -> None:
    """Who listens is checked before the first frame."""
    other = TaskName("/job:ps/task:1")
    async with started(make) as (_, at_ps, worker, at_worker, address):
        worker.set_peers({other: address})
        worker.post(other, step(0))
        error = await at_worker.wait_lost(other)
        expect(isinstance(error, ClusterUnreachableError | RoleError), repr(error))
        expect(other in error.message, error)
        expect(PS in error.message or "ps-0.jgraph" in error.message, error)
        expect(not at_ps.frames, "a frame for another task was delivered")


async def posts_reach_a_task_that_was_started_again(make: MakeTransport) -> None:
    """After the loss is reported, the next post connects anew."""
    async with started(make) as (ps, at_ps, worker, at_worker, address):
        worker.post(PS, step(0))
        await at_ps.wait_frames(1)
        await ps.close()
        await at_worker.wait_lost(PS)
        again, at_again = make(PS, bind=address), Recorder()
        await again.start(at_again)
        try:
            for i in (5, 6):
                worker.post(PS, step(i))
            expect(numbers(await at_again.wait_frames(2)) == [5, 6], at_again.frames)
        finally:
            await again.close()


async def posts_after_close_are_ignored(make: MakeTransport) -> None:
    """Work that ends while a task shuts down has nobody to tell."""
    async with started(make) as (_, at_ps, worker, at_worker, _):
        worker.post(PS, step(0))
        await worker.close()
        worker.post(PS, step(1))
        await at_ps.wait_lost(WORKER)
        expect(numbers([f for _, f in at_ps.frames]) == [0], at_ps.frames)
        expect(not at_worker.lost, at_worker.lost)


async def close_is_idempotent_and_frees_the_address(make: MakeTransport) -> None:
    """The address is taken while it is used, and free at once afterwards."""
    async with started(make) as (ps, at_ps, worker, _, address):
        worker.post(PS, step(0))
        await at_ps.wait_frames(1)
        second = make(PS, bind=address)
        try:
            await second.start(Recorder())
        except PortInUseError as error:
            expect(address.rpartition(":")[2] in error.message, error)
        else:
            fail(f"two transports listen at {address}")
        await ps.close()
        await ps.close()
        third = make(PS, bind=address)
        expect(await third.start(Recorder()) == address, "another address")
        (echo,) = await call(worker, address, "Echo", step(4))
        expect(numbers([echo]) == [4], echo)
        await third.close()
        await second.close()
