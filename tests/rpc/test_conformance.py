"""Every transport passes the one conformance suite."""

from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from jgraph.graph.ir import TaskName
from jgraph.rpc.grpc.transport import DataEncryption, GrpcTransport
from jgraph.rpc.security.certificates import make_certificates
from jgraph.rpc.security.tls import TLS
from jgraph.rpc.transport import Address, Transport
from jgraph.testing.in_process_transport import InProcessNetwork
from jgraph.testing.transport_conformance import CHECKS
from jgraph.testing.transport_harness import PS, WORKER
from tests.support.run_async import run_async

SLOW = {"peer_that_never_listens_is_lost_in_seconds"}
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
    for name in CHECKS
]


def make(
    task: TaskName | None,
    *,
    bind: Address = "127.0.0.1:0",
    max_queued_bytes: int | None = None,
    same_machine: Literal["auto", "off"] = "off",
    data_port: int | None = 0,
    data_encryption: DataEncryption = "records",
    certificates: Path | None = None,
) -> Transport:
    return GrpcTransport(
        task,
        bind=bind,
        max_queued_bytes=max_queued_bytes,
        same_machine=same_machine,
        data_port=data_port,
        data_encryption=data_encryption,
        tls=None if certificates is None else TLS.of(certificates, task),
    )


@pytest.mark.parametrize("name", NAMES)
def test_inprocess_transport_conforms(name: str) -> None:
    async def main() -> None:
        await CHECKS[name](InProcessNetwork().transport)

    run_async(main())


@pytest.mark.parametrize("name", NAMES)
def test_grpc_transport_conforms_with_streams_alone(name: str) -> None:
    async def main() -> None:
        await CHECKS[name](partial(make, data_port=None))

    run_async(main())


@pytest.mark.parametrize("name", NAMES)
def test_grpc_transport_conforms_with_data_sockets(name: str) -> None:
    async def main() -> None:
        await CHECKS[name](make)

    run_async(main())


@pytest.mark.parametrize("name", NAMES)
def test_grpc_transport_conforms_with_shared_memory(name: str) -> None:
    async def main() -> None:
        await CHECKS[name](partial(make, same_machine="auto"))

    run_async(main())


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs")
    make_certificates(directory, [PS, WORKER])
    return directory


@pytest.mark.combined
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["records", "tls", "streams"])
def test_grpc_transport_conforms_encrypted(
    name: str, how: str, certificates: Path
) -> None:
    async def main() -> None:
        secret = partial(
            make,
            data_port=None if how == "streams" else 0,
            data_encryption="tls" if how == "tls" else "records",
            certificates=certificates,
        )
        await CHECKS[name](secret)

    run_async(main())


OTHERS = {
    "another_task_at_the_address_gets_nothing",
    "asking_reaches_a_server_that_was_started_again",
    "call_streams_its_replies",
    "call_to_nothing_is_unreachable",
    "close_is_idempotent_and_frees_the_address",
    "frames_posted_before_the_peer_listens_arrive",
    "frames_that_fit_are_not_too_much",
    "peer_that_never_listens_is_lost_in_seconds",
    "peer_that_takes_nothing_is_lost",
    "posts_reach_a_task_that_was_started_again",
}
"""Have a ps that others find at the port of before, or that knows nobody to dial."""


def dialling(
    only: TaskName,
    certificates: Path | None,
    task: TaskName | None,
    *,
    bind: Address = "127.0.0.1:0",
    max_queued_bytes: int | None = None,
) -> Transport:
    """Returns a transport; that of one task listens nowhere."""
    return GrpcTransport(
        task,
        bind=None if task == only else bind,
        max_queued_bytes=max_queued_bytes,
        tls=None if certificates is None else TLS.of(certificates, task),
    )


@pytest.mark.parametrize("name", NAMES)
def test_grpc_transport_conforms_with_a_worker_that_only_dials(
    name: str, certificates: Path
) -> None:
    async def main() -> None:
        await CHECKS[name](partial(dialling, WORKER, certificates))

    run_async(main())


@pytest.mark.parametrize("name", sorted(CHECKS.keys() - OTHERS))
def test_grpc_transport_conforms_with_a_ps_that_only_dials(name: str) -> None:
    async def main() -> None:
        await CHECKS[name](partial(dialling, PS, None))

    run_async(main())
