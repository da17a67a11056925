"""What goes on while names do not resolve, and after certificates have expired."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509

from jgraph.errors import AddressError, CertificateError, JGError, TaskLostError
from jgraph.rpc import dial
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.security.certificates import make_certificates
from jgraph.rpc.security.tls import TLS
from jgraph.testing.tcp_proxy import TcpProxy
from jgraph.testing.transport_harness import (
    PS,
    WAIT_S,
    WORKER,
    Recorder,
    asked,
    numbers,
    step,
)
from tests.support.encrypted_offers import data_through
from tests.support.run_async import run_async

pytestmark = pytest.mark.usefixtures("nothing_is_left")


class Resolver:
    """Knows no name while it is down."""

    def __init__(self) -> None:
        self.is_down = False
        self.asked = 0
        self.was_asked = asyncio.Event()

    async def resolve(self, address: str, timeout_s: float) -> None:
        self.asked += 1
        if self.is_down:
            self.was_asked.set()
            raise AddressError(f"cannot resolve '{address}'", address=address)


@dataclass
class Pair:
    """A worker and a client that reach a ps through a proxy."""

    proxy: TcpProxy
    at_ps: Recorder
    worker: GrpcTransport
    at_worker: Recorder
    client: GrpcTransport
    address: str


@asynccontextmanager
async def pair(host: str, certificates: Path | None = None) -> AsyncIterator[Pair]:
    files = [
        None if certificates is None else TLS.of(certificates, task)
        for task in (PS, WORKER, None)
    ]
    ps, worker, client = (
        GrpcTransport(task, same_machine="off", tls=tls)
        for task, tls in zip((PS, WORKER, None), files, strict=True)
    )
    at_ps, at_worker = Recorder(), Recorder()
    async with TcpProxy(await ps.start(at_ps)) as proxy:
        address = f"{host}:{proxy.address.rpartition(':')[2]}"
        ps.set_peers({WORKER: await worker.start(at_worker)})
        worker.set_peers({PS: address})
        try:
            with data_through([proxy] if certificates else []):
                yield Pair(proxy, at_ps, worker, at_worker, client, address)
        finally:
            for transport in (client, worker, ps):
                await transport.close()


def test_names_that_do_not_resolve_for_a_moment_end_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither one that holds, nor one that is cut meanwhile and made again."""

    async def main() -> None:
        resolver = Resolver()
        monkeypatch.setattr(dial, "_resolve", resolver.resolve)
        async with asyncio.timeout(WAIT_S), pair("localhost") as there:
            there.worker.post(PS, step(1))
            await asked(there.client, there.address, "Echo", step(0))
            await there.at_ps.wait_frames(1)
            resolver.is_down, known = True, resolver.asked
            there.worker.post(PS, step(2))
            await there.at_ps.wait_frames(2)
            await asked(there.client, there.address, "Echo", step(0))
            assert resolver.asked == known
            there.proxy.silence()
            asking = asyncio.create_task(
                asked(there.client, there.address, "Echo", step(7))
            )
            there.worker.post(PS, step(3))
            await there.proxy.held.wait()
            there.proxy.cut()
            there.proxy.heal()
            await resolver.was_asked.wait()
            resolver.is_down = False
            assert numbers(await asking) == [7]
            assert numbers(await there.at_ps.wait_frames(3)) == [1, 2, 3]
            assert there.at_worker.lost == []

    run_async(main())


def test_names_that_stay_unknown_lose_what_was_cut_and_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        resolver = Resolver()
        monkeypatch.setattr(dial, "_resolve", resolver.resolve)
        async with asyncio.timeout(WAIT_S), pair("localhost") as there:
            there.worker.post(PS, step(1))
            await there.at_ps.wait_frames(1)
            resolver.is_down = True
            there.proxy.cut()
            error = await there.at_worker.wait_lost(PS)
            assert isinstance(error, TaskLostError)
            with pytest.raises(AddressError, match="cannot resolve"):
                await asked(there.client, there.address, "Echo", step(0))

    run_async(main())


async def until(moment: datetime) -> None:
    left = (moment - datetime.now(UTC)).total_seconds()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), max(left, 0) + 0.1)


@pytest.mark.slow
def test_certificates_that_expire_leave_connections_and_new_ones_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With new files a cluster that is started again goes on."""
    certificates = tmp_path / "certs"
    make_certificates(certificates, [PS, WORKER], days=3 / 86400)
    last = max(
        x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
        for file in certificates.glob("*.crt")
    )

    async def main() -> None:
        async with asyncio.timeout(WAIT_S), pair("localhost", certificates) as there:
            assert "client.crt expires at" in caplog.text
            files = TLS.of(certificates, None)
            late = GrpcTransport(None, same_machine="off", tls=files)
            there.worker.post(PS, step(1))
            await asked(there.client, there.address, "Echo", step(0))
            await there.at_ps.wait_frames(1)
            await until(last)
            there.worker.post(PS, step(2))
            assert numbers(await there.at_ps.wait_frames(2)) == [1, 2]
            assert await asked(there.client, there.address, "Echo", step(0))

            async def told(transport: GrpcTransport) -> JGError:
                with pytest.raises(CertificateError, match="has expired") as caught:
                    await asked(transport, there.address, "Echo", step(0))
                return caught.value

            assert (await told(late)).code == "JG-112"
            await late.close()
            there.proxy.silence()
            asking = asyncio.create_task(told(there.client))
            await there.proxy.held.wait()
            there.proxy.cut()
            there.proxy.heal()
            await asking
            error = await there.at_worker.wait_lost(PS)
            assert isinstance(error, CertificateError)
            with pytest.raises(CertificateError, match="make new ones"):
                GrpcTransport(PS, tls=TLS.of(certificates, PS))
        for file in certificates.iterdir():
            if file.name != "token":
                file.unlink()
        make_certificates(certificates, [PS, WORKER])
        caplog.clear()
        async with asyncio.timeout(WAIT_S), pair("localhost", certificates) as there:
            there.worker.post(PS, step(1))
            await there.at_ps.wait_frames(1)
        assert "expires" not in caplog.text

    run_async(main())
