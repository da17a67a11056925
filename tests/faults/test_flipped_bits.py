"""A bit that is flipped on the wire: what TLS makes of it, and what plain text."""

import random
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgraph.client.cluster import connect
from jgraph.errors import JGError, MalformedMessageError, MessageTooLargeError
from jgraph.graph.device import TaskName
from jgraph.graph.tracing.function import function
from jgraph.graph.variable import Variable
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.security.certificates import make_certificates
from jgraph.rpc.wire.codec import encode
from jgraph.rpc.wire.decoder import Decoder
from jgraph.testing.tcp_proxy import TcpProxy
from jgraph.testing.transport_harness import PS as TASK, Recorder, asked, numbers, step
from jgraph.train.strategies.async_runner import AsyncPS
from tests.support.counting import BATCH, IDS, Ledger, trainer
from tests.support.fault import Fault
from tests.support.links import CLIENT, through_proxies
from tests.support.run_async import run_async
from tests.support.stopping import once

PS0, PS = "/job:ps/task:0", "/job:ps/task:1"
MASTER, WORKER = "/job:worker/task:0", "/job:worker/task:1"


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    make_certificates(tmp_path / "certs", map(TaskName, (PS0, PS, MASTER, WORKER)))
    return tmp_path / "certs"


@pytest.mark.bad_input_row(12)
def test_training_over_tls_counts_each_example_once_whatever_is_flipped(
    fault: Fault, certificates: Path
) -> None:
    """A record that was changed ends its connection, which is made again."""
    fault.is_noticed = False
    links = [(WORKER, PS0), (PS0, WORKER), (WORKER, PS), (PS, WORKER)]
    links += [(CLIENT, MASTER), (MASTER, WORKER), (WORKER, MASTER)]
    chance, flips = random.Random(0), [0]
    with (
        through_proxies(*links, tls=certificates) as (servers, proxied),
        connect(servers.target(MASTER), tls=certificates, timeout_s=20) as cluster,
    ):
        there, ledger = trainer(cluster, AsyncPS()), Ledger()

        def flip_some(run: Any, report: Any) -> None:
            chance.choice(proxied).flip()
            flips[0] += 1

        def both_trained_on(run: Any) -> bool:
            return flips[0] > 4 and set(run.metrics("loss")["replica"]) == {0, 1}

        run = there.fit(
            IDS,
            steps=10**6,
            batch_size=BATCH,
            callbacks=[flip_some, once(both_trained_on)],
            progress=False,
        )
        assert run.state == "stopped"
        ledger.add(run)
        assert ledger.check(there) == 0
        there.close()


@pytest.mark.nightly
@pytest.mark.bad_input_row(12)
def test_a_session_over_tls_makes_each_step_once_whatever_is_flipped(
    fault: Fault, certificates: Path
) -> None:
    fault.is_noticed = False
    with (
        through_proxies((CLIENT, MASTER), tls=certificates) as (servers, (link,)),
        connect(servers.target(MASTER), tls=certificates, timeout_s=20) as cluster,
    ):
        count = Variable("count", np.zeros((), np.int32), device=PS)

        @function
        def step(x: Any) -> Any:
            count[...] = count[...] + x.sum().astype(np.int32)
            return count[...]

        session, due = cluster.session(), 0
        for done in range(16):
            if done % 4 == 3:
                link.flip()
            x = np.ones((1 << 20) if done % 8 == 3 else done, np.uint8)
            due += x.size
            assert session.run(step, x) == due
            assert link.has_flipped


def headers_with_a_flipped_bit() -> list[bytes]:
    first = b"".join(encode(step(7, np.ones(2))).pieces)
    (length,) = np.frombuffer(first[:4], "<u4")
    second = b"".join(encode(step(8)).pieces)
    flipped = []
    for bit in range(8 * (4 + int(length))):
        wrong = bytearray(first)
        wrong[bit // 8] ^= 1 << bit % 8
        flipped.append(bytes(wrong) + second)
    return flipped


@pytest.mark.bad_input_row(12)
def test_a_header_with_a_flipped_bit_is_refused_or_another_whole_message() -> None:
    """Never an error of another kind, and never a wait for what cannot come.

    Plain text has no checksum of ours: what is still a message is taken for it.
    """
    refused = 0
    for data in headers_with_a_flipped_bit():
        decoder = Decoder()
        try:
            assert len(decoder.feed(data)) <= 2
            decoder.finish()
        except (MalformedMessageError, MessageTooLargeError):
            refused += 1
    assert refused > 100


@pytest.mark.bad_input_row(12)
def test_calls_over_plain_text_with_flipped_bits_end_and_the_server_serves() -> None:
    chance = random.Random(0)

    async def main() -> None:
        server = GrpcTransport(TASK, same_machine="off")
        client = GrpcTransport(None, same_machine="off")
        async with TcpProxy(await server.start(Recorder())) as proxy:
            ask = partial(asked, client, proxy.address, "Echo", timeout_s=2.0)
            right = 0
            for number in range(1, 30):
                proxy.flips = number % 2
                sent = step(number, np.zeros(chance.randrange(2000), np.uint8))
                with suppress(JGError):
                    right += numbers(await ask(request=sent)) == [number]
            assert right > 14
            # A line may wait for what a flipped length announced; another one does not.
            proxy.flips, other = 0, GrpcTransport(None, same_machine="off")
            reply = await asked(other, proxy.address, "Echo", step(99), timeout_s=20.0)
            assert numbers(reply) == [99]
            await other.close()
        await client.close()
        await server.close()

    run_async(main())
