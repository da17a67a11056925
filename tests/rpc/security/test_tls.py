"""Who may talk to whom over TLS, and what the others are told."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from jgraph.errors import (
    CertificateError,
    ClusterUnreachableError,
    JGError,
    PlainTextError,
    RoleError,
)
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.dial import diagnose
from jgraph.rpc.exchange.link import EXCHANGE_METHOD
from jgraph.rpc.frames import body_of, frame, hello, kind_of
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.security.certificates import Authority, make_certificates
from jgraph.rpc.security.tls import TLS, Identity, check_caller
from jgraph.rpc.transport import Address
from jgraph.rpc.wire.codec import encode, pack
from jgraph.rpc.wire.decoder import Decoder
from jgraph.testing.transport_harness import (
    PS,
    WORKER,
    Recorder,
    call,
    numbers,
    step,
)
from tests.support.run_async import run_async

OTHER = TaskName("/job:ps/task:1")


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls") / "certs"
    make_certificates(directory, [PS, WORKER, OTHER])
    return directory


@pytest.fixture(scope="module")
def other_certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls") / "others"
    make_certificates(directory, [PS, WORKER])
    return directory


@pytest.fixture(scope="module")
def expired(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls") / "expired"
    make_certificates(directory, [PS, WORKER], days=-1)
    return directory


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client's certificate has expired, and that of the authority has not."""
    directory = tmp_path_factory.mktemp("late")
    authority = Authority(days=1.0)
    (directory / "ca.crt").write_bytes(authority.certificate)
    for task, days in ((PS, 1.0), (None, -1.0)):
        authority._days = days
        for name, content in authority.files_of(task).items():
            (directory / name).write_bytes(content)
    return directory


def tls(directory: Path | None, task: TaskName | None) -> TLS | None:
    return None if directory is None else TLS.of(directory, task)


@asynccontextmanager
async def serving(
    directory: Path | None, task: TaskName = PS
) -> AsyncIterator[tuple[Address, Recorder]]:
    server, recorder = GrpcTransport(task, tls=tls(directory, task)), Recorder()
    try:
        yield await server.start(recorder), recorder
    finally:
        await server.close()


async def call_error(address: Address, directory: Path | None) -> JGError:
    """What a client learns that calls."""
    client = GrpcTransport(None, tls=tls(directory, None))
    try:
        await call(client, address, "Echo", step(1))
    except JGError as error:
        return error
    finally:
        await client.close()
    raise AssertionError("the call succeeded")


async def post_error(address: Address, directory: Path | None) -> JGError:
    """What a worker learns that posts."""
    worker, recorder = GrpcTransport(WORKER, tls=tls(directory, WORKER)), Recorder()
    await worker.start(recorder)
    worker.set_peers({PS: address})
    try:
        worker.post(PS, step(1))
        return await recorder.wait_lost(PS)
    finally:
        await worker.close()


Ask = Callable[[Address, Path | None], Awaitable[JGError]]
both_ways = pytest.mark.parametrize("ask", [call_error, post_error])


def check(ask: Ask, server: Path | None, caller: Path | None) -> JGError:
    """Returns the error; fails if it takes long, or if a frame got through."""

    async def main() -> JGError:
        async with serving(server) as (address, at_ps), asyncio.timeout(8):
            error = await ask(address, caller)
            assert not at_ps.frames
            assert address in error.message
            return error

    return run_async(main())


@both_ways
def test_certificate_of_another_authority_is_refused(
    ask: Ask, certs: Path, other_certs: Path
) -> None:
    error = check(ask, certs, other_certs)
    assert isinstance(error, CertificateError)
    assert f"was not signed by {other_certs / 'ca.crt'}" in error.message


@both_ways
def test_plain_text_to_a_server_with_tls_says_what_to_give(
    ask: Ask, certs: Path
) -> None:
    error = check(ask, certs, None)
    assert isinstance(error, PlainTextError)
    assert "speaks TLS, and this side plain text; give certificates" in error.message


@both_ways
def test_tls_to_a_server_without_says_so(ask: Ask, certs: Path) -> None:
    error = check(ask, None, certs)
    assert isinstance(error, PlainTextError)
    assert "speaks plain text, and this side TLS" in error.message


def test_another_tasks_certificate_at_the_address_is_refused(certs: Path) -> None:
    async def main() -> None:
        async with serving(certs, OTHER) as (address, recorder), asyncio.timeout(8):
            error = await post_error(address, certs)
            assert isinstance(error, RoleError)
            assert (
                f"{address} should be {PS}, but has the certificate of ps-1.jgraph"
                in (error.message)
            )
            assert not recorder.frames

    run_async(main())


def read(files: TLS) -> Identity:
    """The identity, without what ``load`` checks."""
    return Identity(files, *(p.read_bytes() for p in (files.cert, files.key, files.ca)))


def test_certificate_that_expires_while_a_server_runs_is_told(expired: Path) -> None:
    async def main() -> None:
        server = grpc.aio.server()
        credentials = read(TLS.of(expired, PS)).server_credentials()
        port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        client = read(TLS.of(expired, None))
        try:
            error = await diagnose(f"127.0.0.1:{port}", identity=client)
        finally:
            await server.stop(None)
        assert isinstance(error, CertificateError)
        assert f"the server at 127.0.0.1:{port} has expired" in error.message

    run_async(main())


def test_server_that_refuses_our_certificate_is_told(
    certs: Path, other_certs: Path, late: Path
) -> None:
    """Of a foreign authority, or expired by the clock of the server alone."""
    foreign = read(TLS.of(other_certs, None))
    foreign = replace(foreign, ca=(certs / "ca.crt").read_bytes())

    async def main() -> None:
        for directory, ours in ((certs, foreign), (late, read(TLS.of(late, None)))):
            async with serving(directory) as (address, _):
                error = await diagnose(address, identity=ours)
                assert isinstance(error, CertificateError)
                assert (
                    f"the server at {address} refused the certificate "
                    f"{ours.files.cert}; it may be of another run of `jgraph certs`, "
                    f"or expired by the clock of that host" == error.message
                )

    run_async(main())


def test_expired_files_are_refused_before_anything_is_dialled(expired: Path) -> None:
    with pytest.raises(CertificateError, match=r"worker-0\.crt expired at \d{4}-"):
        GrpcTransport(WORKER, tls=TLS.of(expired, WORKER))


def test_caller_without_a_certificate_or_with_a_bad_one_gets_no_connection(
    other_certs: Path, late: Path
) -> None:
    ca = (late / "ca.crt").read_bytes()
    pairs = [
        [(directory / f"client.{end}").read_bytes() for end in ("key", "crt")]
        for directory in (late, other_certs)
    ]
    options = [("grpc.ssl_target_name_override", "ps-0.jgraph")]

    async def main() -> None:
        async with serving(late) as (address, _):
            for pair in ([], *pairs):
                credentials = grpc.ssl_channel_credentials(ca, *pair)
                async with grpc.aio.secure_channel(
                    address, credentials, options=options
                ) as channel:
                    replies = channel.stream_stream(EXCHANGE_METHOD, None, None)(
                        iter([b"x"]), timeout=5
                    )
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        _ = [reply async for reply in replies]
                    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    run_async(main())


def test_client_may_not_speak_as_a_task(certs: Path) -> None:
    identity = TLS.of(certs, None).load(None)
    options = [("grpc.ssl_target_name_override", "ps-0.jgraph")]

    async def main() -> None:
        async with (
            serving(certs) as (address, at_ps),
            grpc.aio.secure_channel(
                address, identity.channel_credentials(), options=options
            ) as channel,
        ):
            chunks = pack(encode(frame(hello=hello(WORKER, 5))).pieces)
            stream = channel.stream_stream(EXCHANGE_METHOD, None, None)(chunks)
            decoder = Decoder()
            answers = [a async for chunk in stream for a in decoder.feed(chunk)]
            assert [kind_of(answer) for answer in answers] == ["hello", "status"]
            status: pb.Status = body_of(answers[1])
            assert status.code == "JG-113"
            assert "is of client.jgraph, not of /job:worker/task:0" in status.message
            assert not at_ps.frames

    run_async(main())


def test_certificate_without_a_role_may_call_nothing() -> None:
    with pytest.raises(RoleError, match=r"is of stranger\.example, not of a task or"):
        check_caller([b"stranger.example"], None)
    check_caller([b"client.jgraph"], None)
    check_caller([b"ps-0.jgraph", b"task.jgraph"], None)


def test_shared_memory_works_beside_encrypted_streams(certs: Path) -> None:
    large = np.arange(1 << 18, dtype=np.float32)

    async def main() -> None:
        ps = GrpcTransport(PS, tls=TLS.of(certs, PS))
        worker = GrpcTransport(WORKER, tls=TLS.of(certs, WORKER))
        at_ps = Recorder()
        worker.set_peers({PS: await ps.start(at_ps)})
        await worker.start(Recorder())
        for i in range(2):
            worker.post(PS, step(i, large))
        got = await at_ps.wait_frames(2)
        assert numbers(got) == [0, 1]
        np.testing.assert_array_equal(got[1].tensors[0], large)
        assert worker.statistics().peers[PS].shared_bytes_sent == 2 * large.nbytes
        del got
        await worker.close()
        await ps.close()

    run_async(main())


def test_files_that_do_not_fit_are_said(certs: Path, other_certs: Path) -> None:
    good = TLS.of(certs, PS)
    for wrong, message in (
        (TLS(good.cert, TLS.of(certs, OTHER).key, good.ca), "is not the key of"),
        (TLS(good.cert, good.key, other_certs / "ca.crt"), "was not signed by"),
        (TLS(good.cert, good.cert, good.ca), "is not PEM as"),
        (TLS(certs / "none.crt", good.key, good.ca), "cannot read .*none.crt"),
    ):
        with pytest.raises(CertificateError, match=message):
            wrong.load(PS)
    with pytest.raises(RoleError, match=r"of ps-0\.jgraph, task\.jgraph, and a client"):
        good.load(None)


def test_keys_are_the_owners_alone_and_are_not_overwritten(certs: Path) -> None:
    assert certs.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in certs.glob("*.key")} == {0o600}
    assert not (certs / "ca.key").exists()
    with pytest.raises(CertificateError, match="has certificates already"):
        make_certificates(certs, [PS])


def test_identity_does_not_print_its_key(certs: Path) -> None:
    assert "PRIVATE KEY" not in repr(TLS.of(certs, PS).load(PS))


@both_ways
def test_nobody_at_the_address_is_still_said(ask: Ask, certs: Path) -> None:
    async def main() -> None:
        async with serving(certs) as (address, _):
            pass
        error = await ask(address, certs)
        assert isinstance(error, ClusterUnreachableError)
        assert "connection refused" in error.message

    run_async(main())
