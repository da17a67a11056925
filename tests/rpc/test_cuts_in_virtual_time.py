"""Calls in a network that is cut at any moment: each is made once and answered once.

Nothing of gRPC and of the kernel takes part, so that a seed decides which end learns
what, and when.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, TypeAlias

import grpc
import numpy as np
import pytest

from jgraph.graph.ir import TaskName
from jgraph.rpc.grpc import channels, server_port
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.resumable.accepting import RETURN_S
from jgraph.rpc.transport import Frame
from jgraph.testing.transport_conformance import CHECKS
from jgraph.testing.transport_harness import PS, WORKER, Recorder, asked, numbers, step
from tests.support.paired import Counting, Remote
from tests.support.virtual.loop import run_virtual
from tests.support.virtual.network import Network

WAIT_S: Final = 60.0
CUTS_S: Final = 2.0
SIZES: Final = [0, 0, 3000, 70_000, 300_000, 1_300_000]
SEEDS: Final = [
    pytest.param(seed, marks=[] if seed < 6 else pytest.mark.nightly)
    for seed in range(300)
]
Made: TypeAlias = Callable[[int], Network]


@pytest.fixture
def network_of(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Makes the network of a seed, which transports of this process then use."""

    def make(seed: int) -> Network:
        network = Network(seed)
        monkeypatch.setattr(grpc.aio, "server", network.server)
        monkeypatch.setattr(server_port, "new_data_socket", network.listen)
        monkeypatch.setattr(channels, "open_channel", network.open_channel)
        return network

    return make


def unsteady(network: Network) -> Network:
    """Draws how late bytes arrive, and cuts are noticed."""
    network.notice_s = network.chance.choice([0.004, 0.03, 0.5])
    network.delay_s = network.chance.choice([0.001, 0.004, 0.02])
    return network


async def cuts(network: Network) -> None:
    """Cuts all or some connections at any time, some right after one another."""
    chance, now = network.chance, asyncio.get_running_loop().time
    often, stalls = chance.choice([0.03, 0.1, 0.3]), chance.choice([0.0, 0.5])
    while now() < CUTS_S:
        soon = chance.random() < 0.2
        await asyncio.sleep(chance.expovariate(1 / (0.004 if soon else often)))
        network.refuses_data = chance.random() < 0.1
        network.slow_data = chance.choice([0.0, 0.0, 0.1])
        if chance.random() < stalls:  # as a busy process, which learns all at once
            network.stalled_until = now() + chance.random() * 0.3
        network.cut(chance.choice([1.0, 1.0, 0.5]))
    network.refuses_data, network.slow_data = False, 0.0


@asynccontextmanager
async def pair(
    data_port: int | None = 0,
) -> AsyncIterator[tuple[GrpcTransport, str, Counting]]:
    """A client, the address of a ps, and what that was asked."""
    ps, client = (Remote(task, data_port=data_port) for task in (PS, None))
    at_ps = Counting()
    yield client, await ps.start(at_ps), at_ps
    await client.close()
    await ps.close()


async def ask(client: GrpcTransport, address: str, number: int, size: int) -> None:
    request = step(number, np.full(size, number % 251, np.uint8))
    (reply,) = await asked(client, address, "Echo", request, WAIT_S)
    assert numbers([reply]) == [number]
    assert reply.tensors[0].nbytes == size
    assert (reply.tensors[0] == number % 251).all()


async def count(client: GrpcTransport, address: str, number: int) -> None:
    replies = client.call(address, "Count", step(number), timeout_s=WAIT_S)
    got = []
    async for reply in replies:
        got += numbers([reply])
        assert (reply.tensors[0] == got[-1]).all()
    assert got == list(range(number))


@pytest.mark.parametrize("data_port", [0, None], ids=["data socket", "stream"])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_call_is_made_and_answered_once_whenever_the_network_is_cut(
    seed: int, data_port: int | None, network_of: Made
) -> None:
    network = unsteady(network_of(seed))
    chance = network.chance

    async def main() -> None:
        async with pair(data_port) as (client, address, at_ps):

            async def later(number: int) -> None:
                await asyncio.sleep(chance.random() * 2)
                if number % 10:
                    await ask(client, address, number, chance.choice(SIZES))
                else:
                    await count(client, address, number)

            async with asyncio.TaskGroup() as group:
                group.create_task(cuts(network))
                for number in range(1, 31):
                    group.create_task(later(number))
            assert sorted(at_ps.asked) == list(range(1, 31))
            assert not at_ps.stopped

    run_virtual(network, main(), timeout_s=300)


class Posted(Recorder):
    """Keeps the numbers of what arrives whole."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []

    def frame_received(self, src: TaskName, frame: Frame) -> None:
        (number,) = numbers([frame])
        assert (frame.tensors[0] == number % 251).all()
        self.numbers.append(number)
        super().frame_received(src, frame)

    def has_all(self, count: int) -> bool:
        return len(self.numbers) >= count or bool(self.lost)


@pytest.mark.parametrize("data_port", [0, None], ids=["data socket", "stream"])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_posted_frame_arrives_once_and_in_order_whenever_the_network_is_cut(
    seed: int, data_port: int | None, network_of: Made
) -> None:
    network = unsteady(network_of(seed))
    chance = network.chance
    count = 60

    async def main() -> None:
        ends = [Remote(task, data_port=data_port) for task in (PS, WORKER)]
        at = [Posted(), Posted()]
        addresses = [await end.start(n) for end, n in zip(ends, at, strict=True)]
        for end in ends:
            end.set_peers(dict(zip((PS, WORKER), addresses, strict=True)))

        async def post(src: GrpcTransport, dst: TaskName) -> None:
            for number in range(count):
                await asyncio.sleep(chance.random() ** 2 * 0.1)
                size = chance.choice(SIZES)
                src.post(dst, step(number, np.full(size, number % 251, np.uint8)))

        async with asyncio.TaskGroup() as group:
            group.create_task(cuts(network))
            group.create_task(post(ends[0], WORKER))
            group.create_task(post(ends[1], PS))
        for one in at:
            await one.wait(partial(one.has_all, count), "all")
            assert not one.lost
            assert one.numbers == list(range(count))
        for end in ends:
            await end.close()

    run_virtual(network, main(), timeout_s=300)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[] if seed < 20 else pytest.mark.nightly)
        for seed in range(60)
    ],
)
def test_a_call_goes_on_for_longer_than_a_cut_line_is_waited_for(
    seed: int, network_of: Made
) -> None:
    """The end of one of its streams is no end of those that came after."""
    network = network_of(seed)
    chance = network.chance
    network.notice_s = 0.5  # so the server learns of some by the next stream only

    async def main() -> None:
        now = asyncio.get_running_loop().time
        async with pair() as (client, address, at_ps):
            at_ps.may_answer.clear()
            asking = asyncio.create_task(ask(client, address, 1, 0))
            await at_ps.wait(lambda: at_ps.asked == [1])
            for _ in range(chance.randrange(1, 4)):
                network.stalled_until = now() + chance.random() * 0.3
                network.cut()
                await asyncio.sleep(chance.random() * 0.2)
            await asyncio.sleep(2 * RETURN_S)
            at_ps.may_answer.set()
            await asking
            assert not at_ps.stopped

    run_virtual(network, main(), timeout_s=300)


@pytest.mark.parametrize("name", CHECKS)
def test_transport_conforms_in_the_virtual_network(name: str, network_of: Made) -> None:
    """So that network is as the real one, for what the checks look at."""
    network = network_of(0)
    run_virtual(network, CHECKS[name](Remote), timeout_s=300)
