"""Connections of gRPC that break: each frame arrives once, or its loss is told."""

import asyncio
import weakref

import numpy as np
import pytest

from jgraph.errors import TaskLostError
from jgraph.rpc.resumable import accepting, dialing, numbers as resumable_numbers
from jgraph.testing.transport_harness import PS, WORKER, Recorder, numbers, step
from tests.support.run_async import run_async
from tests.support.worker_pair import Remote, paired

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.mark.row(6)
def test_each_frame_arrives_once_however_often_the_connection_is_cut() -> None:
    async def main() -> None:
        async with paired() as pair:
            for i in range(300):
                pair.worker.post(PS, step(i, np.full(500, i, np.int32)))
                if i % 60 == 30:
                    await pair.has(i - 20)
                    pair.proxy.cut()
            assert await pair.has(300) == list(range(300))
            assert [*pair.at_ps.lost, *pair.at_worker.lost] == []

    run_async(main())


def test_frame_that_is_cut_in_two_arrives_whole() -> None:
    async def main() -> None:
        async with paired() as pair:
            pair.worker.post(PS, step(0))
            await pair.has(1)
            pair.proxy.cut_after_bytes = pair.proxy.passed_bytes + (3 << 20)
            large = np.arange(2 << 20, dtype=np.float32)
            pair.worker.post(PS, step(1, large))
            pair.worker.post(PS, step(2))
            assert await pair.has(3) == [0, 1, 2]
            assert not pair.proxy.cut_after_bytes  # it happened
            np.testing.assert_array_equal(pair.at_ps.frames[1][1].tensors[0], large)
            assert not pair.at_ps.lost

    run_async(main())


def test_what_was_posted_while_the_connection_was_down_follows_in_order() -> None:
    async def main() -> None:
        async with paired() as pair:
            pair.worker.post(PS, step(0))
            await pair.has(1)
            pair.proxy.cut()
            for i in range(1, 5):
                pair.worker.post(PS, step(i))
                await asyncio.sleep(0)
            assert await pair.has(5) == [0, 1, 2, 3, 4]

    run_async(main())


def test_receiver_that_was_started_again_is_lost_and_gets_nothing_old() -> None:
    async def main() -> None:
        async with paired() as pair:
            again, at_again = Remote(PS), Recorder()
            pair.worker.post(PS, step(0))
            await pair.has(1)
            pair.proxy.lead_to(await again.start(at_again))
            pair.proxy.cut()
            error = await pair.at_worker.wait_lost(PS)
            assert isinstance(error, TaskLostError)
            assert "started again since" in error.message
            assert not at_again.frames
            pair.worker.post(PS, step(1))
            assert numbers(await at_again.wait_frames(1)) == [1]
            await again.close()

    run_async(main())


def test_sender_whose_address_refuses_is_lost_at_once() -> None:
    async def main() -> None:
        async with paired() as pair:
            pair.worker.post(PS, step(0))
            await pair.has(1)
            pair.ps.set_peers({WORKER: "127.0.0.1:1"})
            pair.proxy.lead_to("127.0.0.1:1")
            pair.proxy.cut()
            async with asyncio.timeout(3):
                assert isinstance(await pair.at_ps.wait_lost(WORKER), TaskLostError)

    run_async(main())


def test_both_sides_give_up_a_connection_that_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dialing, "RESUME_S", 0.1)
    monkeypatch.setattr(accepting, "RETURN_S", 0.3)

    async def main() -> None:
        async with paired() as pair:
            pair.worker.post(PS, step(0))
            await pair.has(1)
            pair.proxy.lead_to("127.0.0.1:1")
            pair.proxy.cut()
            assert isinstance(await pair.at_worker.wait_lost(PS), TaskLostError)
            assert isinstance(await pair.at_ps.wait_lost(WORKER), TaskLostError)

    run_async(main())


def test_sender_that_comes_back_too_late_learns_that_it_was_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accepting, "RETURN_S", 0.0)
    monkeypatch.setattr(dialing, "RESUME_POLL_S", 0.2)

    async def main() -> None:
        async with paired() as pair:
            pair.worker.post(PS, step(0))
            await pair.has(1)
            pair.proxy.cut()
            await pair.at_ps.wait_lost(WORKER)
            error = await pair.at_worker.wait_lost(PS)
            assert "cannot be resumed" in error.message
            pair.worker.post(PS, step(1))
            assert await pair.has(2) == [0, 1]

    run_async(main())


def test_sender_stops_when_nothing_is_acknowledged_and_goes_on_when_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resumable_numbers, "WINDOW_FRAMES", 8)
    monkeypatch.setattr(resumable_numbers, "ACK_FRAMES", 4)

    async def main() -> None:
        async with paired() as pair:
            for i in range(100):
                pair.worker.post(PS, step(i))
            assert await pair.has(100) == list(range(100))

    run_async(main())


def test_memory_of_frames_that_arrived_is_given_back() -> None:
    async def main() -> None:
        async with paired() as pair:
            freed = asyncio.Event()
            large = np.ones(1 << 17, np.uint8)
            weakref.finalize(large, freed.set)
            pair.worker.post(PS, step(0, large))
            del large
            await pair.has(1)
            async with asyncio.timeout(20):
                await freed.wait()

    run_async(main())
