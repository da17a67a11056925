"""Frames of one machine over a Unix socket: who may connect, and what goes wrong."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

import numpy as np
import pytest

from jgraph.errors import MalformedMessageError, TaskLostError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.shared_memory import local_listener, local_socket
from jgraph.rpc.shared_memory.local_listener import LocalListener, LocalOffer
from jgraph.rpc.shared_memory.local_socket import LocalSocket, connect, new_socket
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


@asynccontextmanager
async def opened() -> AsyncIterator[LocalListener]:
    door = LocalListener()
    await door.open()
    try:
        yield door
    finally:
        door.close()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[LocalSocket]:
    """Both ends of every socket that the test makes."""
    made: list[LocalSocket] = []
    whole = LocalSocket.connection_made

    def keep(self: LocalSocket, transport: asyncio.BaseTransport) -> None:
        made.append(self)
        whole(self, transport)

    monkeypatch.setattr(LocalSocket, "connection_made", keep)
    monkeypatch.setattr(local_socket, "LAST_WORDS_S", 0.01)
    return made


def ignore(data: memoryview) -> None:
    """Takes bytes that do not matter."""


async def never_ends() -> None:
    """A stream that goes on."""
    await asyncio.Event().wait()


async def hung_up(name: str, said: bytes) -> bool:
    """Whether a door ends a connection that says this."""
    loop = asyncio.get_running_loop()
    with new_socket() as raw:
        await loop.sock_connect(raw, f"\0{name}")
        await loop.sock_sendall(raw, said)
        return await asyncio.wait_for(loop.sock_recv(raw, 64), 20) == b""


def test_ticket_opens_once() -> None:
    async def main() -> None:
        async with opened() as door:
            guests: list[LocalSocket] = []
            offer = door.offer(guests.append)
            first = await connect(offer, ignore)
            assert first is not None
            assert await connect(offer, ignore) is None
            assert len(guests) == 1
            first.close()

    run_async(main())


@pytest.mark.parametrize("wrong", ["another", "withdrawn"])
def test_other_tickets_open_nothing(wrong: str) -> None:
    async def main() -> None:
        async with opened() as door:
            guests: list[LocalSocket] = []
            offer = door.offer(guests.append)
            if wrong == "withdrawn":
                door.withdraw(offer)
            else:
                offer.ticket = bytes(32)
            assert await connect(offer, ignore) is None
            assert not guests

    run_async(main())


def test_caller_that_gets_another_welcome_sends_nothing() -> None:
    async def main() -> None:
        async with opened() as door:
            offer = door.offer(lambda _: None)
            offer.welcome = bytes(32)
            assert await connect(offer, ignore) is None

    run_async(main())


@pytest.mark.parametrize("name", ["jgraph-nobody-is-there", "/tmp/.X11-unix/X0", ""])
def test_name_that_leads_nowhere_is_out_of_reach(name: str) -> None:
    offer = pb.LocalSocket(name=name, ticket=bytes(32), welcome=bytes(32))
    assert run_async(connect(offer, ignore)) is None


def test_other_user_stays_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with opened() as door:
            guests: list[LocalSocket] = []
            offer = door.offer(guests.append)
            monkeypatch.setattr("os.geteuid", lambda: 54321)
            assert await connect(offer, ignore) is None
            assert await hung_up(offer.name, offer.ticket)
            assert not guests

    run_async(main())


def test_guest_that_shows_nothing_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_listener, "HANDSHAKE_TIMEOUT_S", 0.01)

    async def main() -> None:
        async with opened() as door:
            assert await hung_up(door.offer(lambda _: None).name, b"half")

    run_async(main())


def test_too_many_guests_are_sent_away_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_listener, "MAX_GUESTS", 0)

    async def main() -> None:
        async with opened() as door:
            assert await hung_up(door.offer(lambda _: None).name, b"")

    run_async(main())


def test_refused_bytes_end_the_stream_beside_the_socket() -> None:
    def refuse(data: memoryview) -> NoReturn:
        raise MalformedMessageError(f"{bytes(data)!r} is no frame")

    async def main() -> None:
        async with opened() as door:
            offer = LocalOffer(door, refuse)
            caller = await connect(offer.message, ignore)
            assert caller is not None
            caller.write_now(b"nonsense")
            with pytest.raises(MalformedMessageError, match="nonsense"):
                await offer.beside(never_ends())
            await asyncio.wait_for(caller.ended, 20)

    run_async(main())


def test_what_was_sent_before_the_end_of_the_stream_is_read() -> None:
    async def main() -> None:
        async with opened() as door:
            heard = bytearray()
            offer = LocalOffer(door, heard.extend)
            caller = await connect(offer.message, ignore)
            assert caller is not None
            caller.write_now(bytes(1 << 20))
            caller.close()
            await offer.beside(asyncio.sleep(0))
            assert len(heard) == 1 << 20

    run_async(main())


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
    knock = local_socket._knock

    async def fails(offer: pb.LocalSocket) -> None:
        if way == "welcomed too late":
            late = await knock(offer)
            assert late is not None
            late.close()
        raise OSError(way)

    monkeypatch.setattr(local_socket, "_knock", fails)
    caplog.set_level(logging.INFO, "jgraph.rpc.exchange.stream")

    async def main() -> None:
        async with started(GrpcTransport) as (ps, at_ps, worker, _, address):
            for i in range(3):
                worker.post(PS, step(i))
                assert numbers(await asked(worker, address, "Echo", step(i))) == [i]
            assert numbers(await at_ps.wait_frames(3)) == [0, 1, 2]
            await ps.close()

    run_async(main())
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1
    assert f"Frames for {PS} go through a gRPC stream" in said[0]


def test_socket_that_breaks_is_a_lost_task_on_both_sides(
    ends: list[LocalSocket],
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


def test_socket_that_breaks_fails_what_is_asked(ends: list[LocalSocket]) -> None:
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
        "calls.stream.LAST_WORDS_S",
        "shared_memory.local_listener.HANDSHAKE_TIMEOUT_S",
    ):
        monkeypatch.setattr(f"jgraph.rpc.{name}", 1e6)

    async def main() -> None:
        async with started(GrpcTransport) as (_, _, worker, _, address):
            for way in (asked, call):
                assert numbers(await way(worker, address, "Echo", step(7))) == [7]
            async with asyncio.timeout(20):
                await worker.close()

    run_async(main())
