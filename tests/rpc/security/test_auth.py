"""Who may call: tokens and roles, checked before anything is decoded."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from jgraph.errors import (
    JGError,
    NotAllowedError,
    TokenError,
    UnknownMethodError,
)
from jgraph.rpc.calls.caller import ASKS_METHOD
from jgraph.rpc.exchange.link import EXCHANGE_METHOD
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.security.auth import Roles, check_role
from jgraph.rpc.security.certificates import make_certificates
from jgraph.rpc.security.tls import TLS
from jgraph.rpc.security.token import TOKEN_FILE, Token, find_token
from jgraph.rpc.transport import Address
from jgraph.testing.transport_harness import PS, WORKER, Recorder, call, step
from tests.support.run_async import run_async

ECHO: Roles = {"Echo": frozenset({"client"})}


def token(directory: Path, name: str = "token") -> Token:
    return Token.make(directory / name)


@asynccontextmanager
async def serving(
    own: Token, roles: Roles | None = None, tls: TLS | None = None
) -> AsyncIterator[tuple[Address, Recorder]]:
    server, recorder = GrpcTransport(PS, token=own, roles=roles, tls=tls), Recorder()
    try:
        yield await server.start(recorder), recorder
    finally:
        await server.close()


async def error_of(transport: GrpcTransport, address: Address, method: str) -> JGError:
    await transport.start(Recorder())
    try:
        with pytest.raises(JGError) as caught:
            await call(transport, address, method, step(1))
        with pytest.raises(JGError) as asked:
            await transport.ask(address, method, step(1), timeout_s=10)
        assert str(asked.value) == str(caught.value)
        return caught.value
    finally:
        await transport.close()


@pytest.mark.bad_input_row(1)
def test_who_has_the_token_may_call_and_nobody_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        right, wrong = token(tmp_path), token(tmp_path, "other")
        async with serving(right) as (address, _):
            client = GrpcTransport(None, token=right)
            await client.start(Recorder())
            assert await call(client, address, "Echo", step(1))
            await client.close()
            for _ in range(2):
                client = GrpcTransport(None, token=wrong)
                error = await error_of(client, address, "Echo")
                assert isinstance(error, TokenError)
                assert error.code == "JG-114"
                assert "another token" in error.message
                assert wrong.value not in error.message
        said = [r.getMessage() for r in caplog.records if "without the token" in r.msg]
        assert len(said) == 1  # the second within a minute is only counted
        assert right.value not in caplog.text
        assert wrong.value not in caplog.text

    with caplog.at_level(logging.DEBUG):
        run_async(scenario())


def test_a_task_with_another_token_delivers_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        right, wrong = token(tmp_path), token(tmp_path, "other")
        async with serving(right) as (address, at_ps):
            worker, at_worker = GrpcTransport(WORKER, token=wrong), Recorder()
            await worker.start(at_worker)
            worker.set_peers({PS: address})
            worker.post(PS, step(3))
            assert isinstance(await at_worker.wait_lost(PS), TokenError)
            assert at_ps.frames == []
            await worker.close()

    run_async(scenario())


@pytest.mark.bad_input_row(1)
@pytest.mark.parametrize("method", [EXCHANGE_METHOD, ASKS_METHOD, "/x.Y/Z"])
def test_nothing_is_read_of_a_stream_without_the_token(
    tmp_path: Path, method: str
) -> None:
    async def scenario() -> None:
        async with serving(token(tmp_path)) as (address, _):
            channel = grpc.aio.insecure_channel(address)
            for shown in ("", "Bearer ", "Bearer é", f"Basic {'0' * 64}"):
                metadata = (
                    ("authorization", shown.encode("ascii", "ignore").decode()),
                )
                stream = channel.stream_stream(method, None, None)(
                    None, metadata=metadata
                )
                # Not one message has to be sent for the answer.
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stream.read()
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert caught.value.details() == "JG-114"
            await channel.close(None)

    run_async(scenario())


@pytest.mark.bad_input_row(17)
def test_a_thousand_strangers_do_not_keep_a_member_waiting(tmp_path: Path) -> None:
    async def scenario() -> None:
        right = token(tmp_path)
        async with serving(right) as (address, _):
            channel = grpc.aio.insecure_channel(address)
            knocking = channel.stream_stream(ASKS_METHOD, None, None)
            streams = [knocking(None) for _ in range(1000)]
            codes = await asyncio.gather(*(stream.code() for stream in streams))
            assert set(codes) == {grpc.StatusCode.UNAUTHENTICATED}
            await channel.close(None)
            client = GrpcTransport(None, token=right)
            await client.start(Recorder())
            assert await call(client, address, "Echo", step(1))
            await client.close()

    run_async(scenario())


@pytest.mark.bad_input_row(2)
def test_a_certificate_of_another_role_may_not_call(tmp_path: Path) -> None:
    make_certificates(tmp_path / "certs", [PS, WORKER])
    own = Token.read(tmp_path / "certs" / "token")

    async def scenario() -> None:
        files = TLS.of(tmp_path / "certs", PS)
        async with serving(own, ECHO, files) as (address, _):
            files = TLS.of(tmp_path / "certs", None)
            client = GrpcTransport(None, token=own, tls=files)
            await client.start(Recorder())
            assert await call(client, address, "Echo", step(1))
            await client.close()
            files = TLS.of(tmp_path / "certs", WORKER)
            worker = GrpcTransport(WORKER, token=own, tls=files)
            error = await error_of(worker, address, "Echo")
            assert str(error) == ("JG-115 role 'task' may not call 'Echo', only client")
            # A certificate alone is not enough.
            files = TLS.of(tmp_path / "certs", None)
            other = GrpcTransport(None, token=token(tmp_path, "other"), tls=files)
            assert isinstance(await error_of(other, address, "Echo"), TokenError)

    run_async(scenario())


def test_a_method_that_is_not_in_the_table_is_denied_to_all(tmp_path: Path) -> None:
    async def scenario() -> None:
        own = token(tmp_path)
        async with serving(own, ECHO) as (address, _):
            client = GrpcTransport(None, token=own)
            error = await error_of(client, address, "Count")
            assert isinstance(error, UnknownMethodError)

    run_async(scenario())
    for names in (None, [b"client.jgraph"], [b"task.jgraph"]):
        with pytest.raises(UnknownMethodError):
            check_role({}, "Echo", names)


def test_a_certificate_of_no_role_may_call_nothing() -> None:
    with pytest.raises(NotAllowedError, match="role 'nobody'"):
        check_role(ECHO, "Echo", [b"someone.else"])


def test_a_token_is_random_and_its_owners_alone(tmp_path: Path) -> None:
    made = token(tmp_path / "new")
    assert made.path.stat().st_mode & 0o777 == 0o600
    assert made.path.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in made.path.parent.iterdir()] == ["token"]
    assert token(tmp_path / "new") == made
    assert token(tmp_path, "other").value != made.value
    assert len(bytes.fromhex(made.value)) == 32
    assert made.value not in repr(made)


def test_a_token_is_replaced_only_when_told(tmp_path: Path) -> None:
    first = token(tmp_path)
    second = Token.make(first.path, replace=True)
    assert second.value != first.value
    assert token(tmp_path) == second
    assert second.path.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


@pytest.mark.skipif(os.name != "posix", reason="there are no such modes")
def test_a_token_that_others_may_read_is_refused(tmp_path: Path) -> None:
    made = token(tmp_path)
    made.path.chmod(0o640)
    with pytest.raises(TokenError, match=r"others may read .* chmod 600"):
        Token.read(made.path)


@pytest.mark.parametrize("content", ["", "short", "é" * 64, "a b" * 20])
def test_a_file_without_a_token_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(content, encoding="utf-8")
    with pytest.raises(TokenError, match="token") as caught:
        Token.read(path)
    assert not content or content not in str(caught.value)


def test_where_a_token_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, named, beside = (token(tmp_path, name) for name in ("g", "n", "c/token"))
    monkeypatch.setenv("JGRAPH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(TOKEN_FILE, raising=False)
    own = find_token()
    assert own.path == tmp_path / "home" / "token"
    assert find_token(None, tmp_path / "c") == beside
    assert find_token(None, tmp_path) != beside
    monkeypatch.setenv(TOKEN_FILE, str(named.path))
    assert find_token(None, tmp_path / "c") == named
    assert find_token(given.path) == given
    with pytest.raises(TokenError, match="No such file"):
        find_token(tmp_path / "missing")


def test_arrays_travel_as_before(tmp_path: Path) -> None:
    async def scenario() -> None:
        own = token(tmp_path)
        async with serving(own) as (address, at_ps):
            worker = GrpcTransport(WORKER, token=own)
            await worker.start(Recorder())
            worker.set_peers({PS: address})
            worker.post(PS, step(3, np.arange(4.0)))
            (arrived,) = await at_ps.wait_frames(1)
            assert np.asarray(arrived.tensors[0]).tolist() == [0, 1, 2, 3]
            await worker.close()

    run_async(scenario())
