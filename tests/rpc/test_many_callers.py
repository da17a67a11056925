"""Who comes and goes leaves nothing in the tables of a server."""

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from jgraph.rpc.exchange.inbound import Inbound
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.security.token import Token
from jgraph.testing.transport_harness import PS, WAIT_S, WORKER, Recorder, asked, step
from tests.support.run_async import run_async

pytestmark = pytest.mark.usefixtures("nothing_is_left")

KEPT_INCARNATIONS = 64
"""A task remembers so many former processes of another, to refuse them."""


def parts(found: object, seen: set[int]) -> Iterator[object]:
    """Yields an object of ours and all that it holds, once each."""
    if id(found) in seen or isinstance(found, Recorder):
        return
    seen.add(id(found))
    yield found
    if isinstance(found, dict):
        inner = [*found.values()]
    elif isinstance(found, list | set | frozenset | tuple | deque):
        inner = [*found]
    elif type(found).__module__.startswith("jgraph."):
        slots = [n for c in type(found).__mro__ for n in getattr(c, "__slots__", ())]
        inner = [*getattr(found, "__dict__", {}).values()]
        inner += [getattr(found, n) for n in slots if hasattr(found, n)]
    else:
        return
    for one in inner:
        yield from parts(one, seen)


def sizes(server: GrpcTransport) -> Counter[str]:
    """Returns how much is in the tables of a server, by their type."""
    found: Counter[str] = Counter()
    for part in parts(server, set()):
        if isinstance(part, dict | list | set | deque):
            found[type(part).__name__] += len(part)
    return found


@pytest.mark.parametrize(
    "clients",
    [12, pytest.param(5000, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])],
)
@pytest.mark.parametrize(
    "near", ["auto", pytest.param("off", marks=pytest.mark.nightly)]
)
def test_clients_and_workers_that_come_again_and_again_leave_the_tables_as_they_were(
    tmp_path: Path, near: Literal["auto", "off"], clients: int
) -> None:
    """Each with a new incarnation, as after a start of its process."""
    token, at_ps = Token.make(tmp_path / "token"), Recorder()

    async def visit(address: str, task: Any) -> None:
        transport = GrpcTransport(task, same_machine=near, token=token)
        await transport.start(Recorder())
        transport.set_peers({PS: address})
        await asked(transport, address, "Echo", step(1))
        if task is not None:
            transport.post(PS, step(2))
            known = len(at_ps.frames)
            await at_ps.wait_frames(known + 1)
            at_ps.frames.clear()
        await transport.close()

    async def main() -> None:
        server = GrpcTransport(PS, same_machine=near, token=token)
        address = await server.start(at_ps)
        told = []
        for count in (KEPT_INCARNATIONS + 2, clients):
            for _ in range(count):
                await visit(address, None)
                await visit(address, WORKER)
            assert server._service is not None
            if ending := set(server._service._running):
                await asyncio.wait(ending, timeout=WAIT_S)
            told.append(sizes(server))
        assert told[0] == told[1]
        await server.close()

    run_async(main(), timeout_s=60 if clients < 1000 else 900)


def test_a_task_that_is_started_ten_thousand_times_is_one_row() -> None:
    inbound = Inbound()
    for incarnation in range(1, 10_001):
        stream, _ = inbound.connect(WORKER, incarnation)
        assert inbound.accept(stream, 1)
    (sender,) = inbound._senders.values()
    assert len(sender.retired) == KEPT_INCARNATIONS
