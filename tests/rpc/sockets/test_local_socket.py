"""Frames of one machine over a Unix socket: who may connect, and what goes wrong."""

import asyncio
import logging
from functools import partial
from typing import Any

import numpy as np
import pytest

from jgraph.errors import TaskLostError
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.sockets import connecting, frame_socket
from jgraph.rpc.sockets.frame_socket import FrameSocket
from jgraph.testing.transport_harness import (
    PS,
    WORKER,
    Recorder,
    asked,
    call,
    numbers,
    started,
    step,
)
from tests.support.run_async import run_async


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[FrameSocket]:
    """Both ends of every socket that the test makes."""
    made: list[FrameSocket] = []
    whole = FrameSocket.connection_made

    def keep(self: FrameSocket, transport: asyncio.BaseTransport) -> None:
        made.append(self)
        whole(self, transport)

    monkeypatch.setattr(FrameSocket, "connection_made", keep)
    monkeypatch.setattr(frame_socket, "LAST_WORDS_S", 0.01)
    return made


def test_small_frames_do_not_overtake_large_ones() -> None:
    def worker_without_room(*args: object, **kwargs: object) -> GrpcTransport:
        return GrpcTransport(*args, max_shared_bytes=1 << 16, **kwargs)  # type: ignore[arg-type]

    async def main() -> None:
        async with started(worker_without_room) as (_, at_ps, worker, _, _):
            worker.post(PS, step(0))
            await at_ps.wait_frames(1)  # the socket is idle from here on
            large = np.ones(3 << 20, np.uint8)
            for i in range(1, 60):
                worker.post(PS, step(i, *[large] * (i % 3 == 0)))
            assert numbers(await at_ps.wait_frames(60)) == list(range(60))

    run_async(main())


@pytest.mark.parametrize("way", ["no such address", "welcomed too late"])
def test_socket_out_of_reach_leaves_frames_and_calls_to_the_stream(
    way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shown = connecting._shown

    async def fails(*given: Any) -> FrameSocket:
        if way == "welcomed too late":
            (await shown(*given)).close()
        raise OSError(way)

    monkeypatch.setattr(connecting, "_shown", fails)
    caplog.set_level(logging.INFO, "jgraph.rpc.resumable.dialing")

    async def main() -> None:
        alone = partial(GrpcTransport, data_port=None)
        async with started(alone) as (ps, at_ps, worker, _, address):
            for i in range(3):
                worker.post(PS, step(i))
                assert numbers(await asked(worker, address, "Echo", step(i))) == [i]
            assert numbers(await at_ps.wait_frames(3)) == [0, 1, 2]
            await ps.close()

    run_async(main())
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1
    assert f"Frames for {PS} do not go through a socket of this machine" in said[0]


def test_socket_that_breaks_is_a_lost_task_on_both_sides(
    ends: list[FrameSocket],
) -> None:
    async def main() -> None:
        async with started(GrpcTransport) as (_, at_ps, worker, at_worker, _):
            worker.post(PS, step(0))
            await at_ps.wait_frames(1)
            for end in ends:
                end.close()
            assert isinstance(await at_worker.wait_lost(PS), TaskLostError)
            assert isinstance(await at_ps.wait_lost(WORKER), TaskLostError)
            worker.post(PS, step(1))  # over a new connection
            assert numbers(await at_ps.wait_frames(2)) == [0, 1]

    run_async(main())


def test_socket_that_breaks_fails_what_is_asked(ends: list[FrameSocket]) -> None:
    async def main() -> None:
        ps, client, at_ps = GrpcTransport(PS), GrpcTransport(None), Recorder()
        address = await ps.start(at_ps)
        hanging = asyncio.create_task(asked(client, address, "Hang", step(0)))
        await at_ps.wait(lambda: at_ps.hanging == 1, "call")
        for end in ends:
            end.close()
        with pytest.raises(TaskLostError, match="went away during 'Hang'"):
            await hanging
        assert numbers(await asked(client, address, "Echo", step(7))) == [7]
        await client.close()
        await ps.close()

    run_async(main())


def test_neither_side_waits_for_the_other_to_close_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (
        "calls.caller.LAST_WORDS_S",
        "resumable.dialing.LAST_WORDS_S",
        "sockets.offer.HANDSHAKE_TIMEOUT_S",
    ):
        monkeypatch.setattr(f"jgraph.rpc.{name}", 1e6)

    async def main() -> None:
        async with started(GrpcTransport) as (_, _, worker, _, address):
            for way in (asked, call):
                assert numbers(await way(worker, address, "Echo", step(7))) == [7]
            async with asyncio.timeout(20):
                await worker.close()

    run_async(main())
