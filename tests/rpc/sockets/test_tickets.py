"""Sockets beside streams, of each kind: who may connect, and how long that is tried."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeAlias

import pytest

from jgraph.errors import MalformedMessageError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.security.certificates import make_certificates
from jgraph.rpc.sockets import listener
from jgraph.rpc.sockets.connecting import connect_local
from jgraph.rpc.sockets.frame_socket import FrameSocket
from jgraph.rpc.sockets.listener import Caller, Ticket
from jgraph.rpc.sockets.offer import SocketEnded, SocketOffer
from jgraph.testing.transport_harness import PS, WORKER
from tests.support.doors import KINDS, Door, Kind, ignore, opened
from tests.support.run_async import run_async

pytestmark = pytest.mark.usefixtures("nothing_is_left")

Open: TypeAlias = Callable[[], AbstractAsyncContextManager[Door]]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs")
    make_certificates(directory, [PS, WORKER])
    return directory


@pytest.fixture(params=KINDS)
def door(request: pytest.FixtureRequest, certificates: Path) -> Open:
    return partial(opened, request.param, certificates)


async def never_ends() -> None:
    """A stream that goes on."""
    await asyncio.Event().wait()


def never() -> bool:
    """The other side has never said all."""
    return False


def no_room(least: int) -> None:
    """Bytes are taken as they come."""


def test_ticket_opens_once(door: Open) -> None:
    async def main() -> None:
        async with door() as there:
            guests: list[FrameSocket] = []
            ticket = there.offer(guests.append)
            first = await there.connect(ticket)
            assert first is not None
            assert await there.connect(ticket) is None
            assert len(guests) == 1
            first.close()
            await asyncio.wait_for(guests[0].ended, 20)

    run_async(main())


@pytest.mark.parametrize("wrong", ["another", "withdrawn", "late"])
def test_other_tickets_open_nothing(
    wrong: str, door: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "TICKET_S", 0.0 if wrong == "late" else 60.0)

    async def main() -> None:
        async with door() as there:
            guests: list[FrameSocket] = []
            ticket = there.offer(guests.append)
            if wrong == "withdrawn":
                there.listener.withdraw(ticket)
            elif wrong == "another":
                ticket = Ticket(bytes(32), ticket.answer)
            assert await there.connect(ticket) is None
            assert not guests

    run_async(main())


def test_caller_that_gets_another_welcome_sends_nothing(door: Open) -> None:
    async def main() -> None:
        async with door() as there:
            ticket = there.offer(lambda _: None)
            assert await there.connect(Ticket(ticket.number, bytes(32))) is None

    run_async(main())


@pytest.mark.parametrize("name", ["jgraph-nobody-is-there", "/tmp/.X11-unix/X0", ""])
def test_name_that_leads_nowhere_is_out_of_reach(name: str) -> None:
    offer = pb.LocalSocket(name=name, ticket=bytes(32), welcome=bytes(32))
    assert run_async(connect_local(offer, ignore)) is None


def test_other_user_stays_outside(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with opened("unix", certificates) as there:
            guests: list[FrameSocket] = []
            ticket = there.offer(guests.append)
            monkeypatch.setattr("os.geteuid", lambda: 54321)
            assert await there.connect(ticket) is None
            assert await there.hung_up(there.offer(guests.append).number)
            assert not guests

    run_async(main())


OTHERS: dict[Kind, Caller] = {
    "tcp": Caller(host="127.0.0.9"),
    "tls": Caller(names=frozenset({"worker-1.jgraph", "task.jgraph"})),
}


@pytest.mark.parametrize("kind", list(OTHERS))
def test_ticket_of_another_caller_opens_nothing(kind: Kind, certificates: Path) -> None:
    """Who has seen the ticket of another still has another certificate or address."""

    async def main() -> None:
        async with opened(kind, certificates) as there:
            guests: list[FrameSocket] = []
            ticket = there.listener.offer(OTHERS[kind], guests.append)
            assert await there.connect(ticket) is None
            assert not guests

    run_async(main())


def test_port_of_another_task_gets_no_ticket(certificates: Path) -> None:
    """The certificate there is checked first, as where the stream goes."""

    async def main() -> None:
        async with opened("tls", certificates) as there:
            guests: list[FrameSocket] = []
            ticket = there.offer(guests.append)
            offer = pb.DataSocket(
                port=there.listener.port, ticket=ticket.number, welcome=ticket.answer
            )
            connect = there.dialer.connect
            assert await connect("127.0.0.1:1", offer, WORKER, ignore) is None
            assert not guests
            right = await connect("127.0.0.1:1", offer, PS, ignore)  # it is still good
            assert right is not None
            right.close()
            await asyncio.wait_for(guests[0].ended, 20)

    run_async(main())


@pytest.mark.parametrize("said", [b"", b"half", bytes(31)])
def test_guest_that_shows_nothing_is_sent_away(
    said: bytes, door: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_TIMEOUT_S", 0.05)

    async def main() -> None:
        async with door() as there:
            assert await there.hung_up(said)

    run_async(main())


@pytest.mark.parametrize(
    "said", [bytes(32), b"GET / HTTP/1.1\r\n\r\n" * 9, b"x" * 9999]
)
def test_garbage_ends_connections_with_one_line(
    said: bytes, door: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "jgraph")

    async def main() -> None:
        async with door() as there:
            for _ in range(5):
                assert await there.hung_up(said)
            guests: list[FrameSocket] = []
            right = await there.connect(there.offer(guests.append))
            assert right is not None
            right.close()
            await asyncio.wait_for(guests[0].ended, 20)

    run_async(main())
    (line,) = [m for m in caplog.messages if m.startswith("Refused a connection to ")]
    assert line.endswith("without a ticket; 1 so far.")


def test_too_many_guests_are_sent_away_at_once(
    door: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_TIMEOUT_S", 1e6)
    monkeypatch.setattr(listener, "MAX_GUESTS", 3)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with door() as there:
            silent = [there.raw() for _ in range(3)]
            for raw, where in silent:
                await loop.sock_connect(raw, where)
            assert await there.hung_up(b"")
            for raw, _ in silent:
                raw.close()
            guests: list[FrameSocket] = []
            right = None
            while right is None:  # until it has noticed that they are gone
                right = await there.connect(there.offer(guests.append))
            right.close()
            await asyncio.wait_for(guests[0].ended, 20)

    run_async(main())


@asynccontextmanager
async def offered(
    door: Open, take: Callable[[bytes], object]
) -> AsyncIterator[tuple[SocketOffer, FrameSocket]]:
    """An offer of a ps, and the connection of a worker that takes it."""
    async with door() as there:

        def taken(data: memoryview) -> None:
            take(bytes(data))

        offer = SocketOffer(there.caller, no_room, taken)
        hello = pb.Hello()
        offer.put_into(hello, there.doors, is_near=True)
        socket = await there.greeted(hello)
        assert socket is not None
        yield offer, socket


def test_refused_bytes_end_the_stream_beside_the_socket(door: Open) -> None:
    def refuse(data: bytes) -> NoReturn:
        raise MalformedMessageError(f"{data!r} is no frame")

    async def main() -> None:
        async with offered(door, refuse) as (offer, socket):
            socket.write_now(b"nonsense")
            with pytest.raises(MalformedMessageError, match="nonsense"):
                await offer.beside(never_ends(), never)
            await asyncio.wait_for(socket.ended, 20)

    run_async(main())


def test_what_was_sent_before_the_end_of_the_stream_is_read(door: Open) -> None:
    async def main() -> None:
        heard = bytearray()
        async with offered(door, heard.extend) as (offer, socket):
            socket.write_now(bytes(1 << 20))
            socket.close()
            await offer.beside(asyncio.sleep(0), never)
            assert len(heard) == 1 << 20

    run_async(main())


def test_socket_that_ends_early_ends_its_stream(door: Open) -> None:
    async def main() -> None:
        heard = bytearray()
        async with offered(door, heard.extend) as (offer, socket):
            socket.write_now(b"some")
            socket.close()
            with pytest.raises(SocketEnded):
                await offer.beside(never_ends(), never)
            assert heard == b"some"

    run_async(main())


def test_connection_that_is_not_used_does_not_count(door: Open) -> None:
    """Its caller did not wait for the welcome, and goes on over the stream."""

    async def main() -> None:
        async with offered(door, len) as (offer, socket):
            socket.close()
            await offer.beside(asyncio.sleep(0.05), never)
            assert offer.socket is None

    run_async(main())
