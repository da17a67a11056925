"""Connections that never show a token are limited in age and number; files run low."""

import asyncio
import errno
import logging
import os
import resource
from contextlib import closing
from pathlib import Path

import pytest

from jgraph.rpc import open_files
from jgraph.rpc.grpc import listening
from jgraph.rpc.grpc.health import HealthServer
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.security.certificates import make_certificates
from jgraph.rpc.security.tls import TLS
from jgraph.rpc.security.token import Token
from jgraph.rpc.transport import Address
from jgraph.testing.transport_harness import PS, Recorder, asked, numbers, step
from tests.support.run_async import run_async

pytestmark = pytest.mark.usefixtures("nothing_is_left")

# What a client of HTTP/2 says first, and empty settings.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
WAIT_S = 20
TOKEN = Token("0123456789abcdef0123456789abcdef", Path("token"))


async def until_closed(address: Address, first: bytes) -> None:
    """Connects, says something, answers nothing, and waits for the end."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    with closing(writer):
        writer.write(first)
        async with asyncio.timeout(WAIT_S):
            try:
                while await reader.read(4096):
                    pass
            except ConnectionError:
                pass


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "IDLE_S", 1.5)
    monkeypatch.setattr(listening, "GREETING_S", 1.5)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("first", [b"", PREFACE], ids=["silent", "no stream"])
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_connection_that_asks_nothing_is_ended_and_one_with_a_stream_is_not(
    first: bytes, tls: bool, tmp_path: Path
) -> None:
    if tls:
        make_certificates(tmp_path, [PS])

    async def main() -> None:
        theirs, ours = (TLS.of(tmp_path, t) if tls else None for t in (PS, None))
        server = GrpcTransport(PS, token=TOKEN, tls=theirs)
        client = GrpcTransport(None, token=TOKEN, tls=ours)
        address = await server.start(Recorder())
        assert numbers(await asked(client, address, "Echo", step(1))) == [1]
        (opening,) = client._routes._channels._shared.values()
        await asyncio.gather(*(until_closed(address, first) for _ in range(3)))
        assert numbers(await asked(client, address, "Echo", step(2))) == [2]
        assert list(client._routes._channels._shared.values()) == [
            opening
        ]  # it was never cut
        await client.close()
        await server.close()

    run_async(main())


@pytest.mark.usefixtures("short")
def test_idle_connections_take_no_more_than_half_of_the_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening, "file_limit", lambda: 40)
    monkeypatch.setattr(listening, "IDLE_S", 60)

    async def main() -> None:
        server, client = (
            GrpcTransport(PS, token=TOKEN),
            GrpcTransport(None, token=TOKEN),
        )
        address = await server.start(Recorder())
        assert numbers(await asked(client, address, "Echo", step(1))) == [1]
        idle = [asyncio.create_task(until_closed(address, PREFACE)) for _ in range(30)]
        ended, left = set[asyncio.Task[None]](), set(idle)
        async with asyncio.timeout(WAIT_S):
            while len(ended) < 11:  # 20 may be there, and one of them is the client
                done, left = await asyncio.wait(
                    left, return_when=asyncio.FIRST_COMPLETED
                )
                ended |= done
        assert numbers(await asked(client, address, "Echo", step(2))) == [2]
        assert len(left) == 19
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await client.close()
        await server.close()

    run_async(main())


@pytest.mark.usefixtures("short")
def test_health_port_ends_connections_that_ask_nothing() -> None:
    async def main() -> None:
        server = HealthServer()
        port = await server.start("127.0.0.1:0")
        await until_closed(f"127.0.0.1:{port}", PREFACE)
        await server.close()

    run_async(main())


class Lines(logging.Handler):
    """Lines of a log, and who waits for the next."""

    def __init__(self) -> None:
        super().__init__()
        self.said: asyncio.Queue[str] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.put_nowait(record.getMessage())


def test_files_that_run_low_are_told_once_with_what_to_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_files, "LOOK_EVERY_S", 0.01)
    looks = asyncio.Queue[float]()
    look = open_files.FileWatch.look

    def counted(watch: open_files.FileWatch, now: float) -> None:
        look(watch, now)
        looks.put_nowait(now)

    monkeypatch.setattr(open_files.FileWatch, "look", counted)
    monkeypatch.setattr(open_files, "_watch", open_files.FileWatch())

    async def main() -> None:
        lines = Lines()
        logging.getLogger("jgraph.rpc.open_files").addHandler(lines)
        server, health = GrpcTransport(PS), HealthServer()
        await server.start(Recorder())
        await health.start("127.0.0.1:0")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        few = 2 * open_files.files_open()
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
        try:
            async with asyncio.timeout(WAIT_S):
                line = await lines.said.get()
                for _ in range(looks.qsize() + 4):
                    await looks.get()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            logging.getLogger("jgraph.rpc.open_files").removeHandler(lines)
        assert f"of the {few} files that this process may open" in line
        assert f"ulimit -n {min(hard, 65_536)}" in line
        assert lines.said.empty()
        await health.close()
        await server.close()

    run_async(main())


def test_files_are_told_again_after_a_minute_and_not_where_there_are_enough(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch = open_files.FileWatch()
    monkeypatch.setattr(open_files, "file_limit", lambda: 100)
    for now, count in ((0.0, 49), (1.0, 50), (30.0, 99), (60.9, 99), (61.0, 100)):
        monkeypatch.setattr(open_files, "files_open", lambda count=count: count)
        watch.look(now)
    told = [line.partition(" files")[0] for line in caplog.messages]
    assert told == ["50 of the 100", "100 of the 100"]


@pytest.mark.parametrize("code", [errno.ENFILE, errno.EACCES, errno.ENOENT])
def test_a_server_goes_on_where_the_system_does_not_tell_of_files(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks after files also stops the server when it ends."""
    monkeypatch.setattr(open_files, "LOOK_EVERY_S", 0.01)
    looks = asyncio.Queue[str]()

    def refused(path: str, flags: int) -> int:
        looks.put_nowait(path)
        raise OSError(code, os.strerror(code))

    async def main() -> None:
        server, client = GrpcTransport(PS), GrpcTransport(None)
        address = await server.start(Recorder())
        monkeypatch.setattr(os, "open", refused)
        async with asyncio.timeout(WAIT_S):
            for _ in range(3):
                await looks.get()
            replies = await asked(client, address, "Echo", step(7), WAIT_S)
        monkeypatch.undo()
        assert numbers(replies) == [7]
        await client.close()
        await server.close()

    run_async(main())
