"""A task stays held by a run whose link to it was broken for longer than calls last."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import pytest

from jgraph.client.runs.holds import DrainHolds
from jgraph.cluster import drain, event_loop
from jgraph.cluster.deadlines import bounded_s
from jgraph.cluster.drain import holding
from jgraph.errors import TaskLostError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.resumable import accepting, dialing
from jgraph.rpc.transport import Frame
from jgraph.server.runs.holds import PsHolds
from jgraph.server.runs.ps_setup import PsSetup
from jgraph.testing.tcp_proxy import TcpProxy
from jgraph.testing.transport_harness import PS, WORKER
from tests.support.services import service_of

pytestmark = pytest.mark.usefixtures("nothing_is_left")

EMPTY = frame(empty=pb.Empty())


def test_task_is_held_until_it_is_told_to_end_whatever_the_link_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drain, "HOLD_RETRY_S", 0.0)
    answers = iter([1, 0, 2])

    async def call() -> AsyncIterator[Frame]:
        for _ in range(next(answers)):
            yield EMPTY
        raise TaskLostError("connection lost")

    async def main() -> None:
        said = [what async for what in holding(call)]
        assert said == ["held", "lost", "lost", "held", "told"]

    asyncio.run(main())


class Far:
    """A ps behind a link that breaks, and a cluster or a master that reaches it.

    Attributes:
      master: of the client.
    """

    task = master = WORKER

    async def open(self, stack: AsyncExitStack) -> None:
        """Serves."""
        service, server = await stack.enter_async_context(service_of(PS))
        self.holders = service.holders
        self.server = await server.start(service)
        self.proxy = await stack.enter_async_context(TcpProxy(self.server))
        self.transport = GrpcTransport(None, same_machine="off")
        stack.push_async_callback(self.transport.close)
        self.spec = SimpleNamespace(address=lambda task: self.proxy.address)

    def tasks(self, job: str = "ps") -> list[str]:
        """Returns the ps, unless it only is the master."""
        return [] if self.master == PS else [PS]

    def stream(self, task: str, method: str, request: Frame) -> AsyncIterator[Frame]:
        """Calls the ps."""
        limit_s = bounded_s(0.0)
        return self.transport.call(
            self.proxy.address, method, request, timeout_s=limit_s
        )

    async def is_held(self, wanted: bool = True) -> None:
        """Waits until it is, or is not."""
        await self.until(lambda: self.holders._free.is_set() != wanted)

    async def break_link(self) -> None:
        """Breaks it until nobody holds the ps."""
        self.proxy.lead_to("127.0.0.1:1")
        self.proxy.cut()
        await self.is_held(False)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Waits until something is so."""
        async with asyncio.timeout(20):
            while not is_so():  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def end(self) -> None:
        """Tells the ps to end, and waits until it may."""
        await asyncio.wait_for(self.holders.announce(60.0), 20)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    monkeypatch.setattr(dialing, "RESUME_S", 0.1)
    monkeypatch.setattr(accepting, "RETURN_S", 0.2)
    monkeypatch.setattr(drain, "HOLD_RETRY_S", 0.05)
    far, stack = Far(), AsyncExitStack()
    event_loop.run(far.open(stack))
    yield far
    event_loop.run(stack.aclose())


Hold: TypeAlias = Callable[[Far], tuple[Callable[[], bool], Callable[[], None]]]
"""Holds the ps; returns what says whether that is to end, and what lets it go."""


def by_client(far: Far) -> tuple[Callable[[], bool], Callable[[], None]]:
    """See ``Hold``."""
    drain_holds = DrainHolds(cast("Any", far))
    return lambda: PS in drain_holds.leaving, drain_holds.close


def by_master(far: Far) -> tuple[Callable[[], bool], Callable[[], None]]:
    """See ``Hold``."""
    nobody: Any = SimpleNamespace(is_over=False)
    order, peers = pb.OpenRun(), cast("Any", far)
    holds = PsHolds(peers, PsSetup(order, peers, nobody), nobody, lambda: None)

    async def act(what: Callable[[], None]) -> None:
        what()

    event_loop.run(act(holds.hold))
    return lambda: bool(holds.leaving), lambda: event_loop.run(act(holds.close))


@pytest.mark.row(29)
@pytest.mark.parametrize("hold", [by_client, by_master])
def test_ps_that_is_told_to_end_after_its_link_was_broken_waits_for_the_run(
    far: Far, hold: Hold
) -> None:
    is_told, let_go = hold(far)
    event_loop.run(far.is_held())
    event_loop.run(far.break_link())
    far.proxy.lead_to(far.server)
    event_loop.run(far.is_held())
    ending = event_loop.start(far.end())
    event_loop.run(far.until(is_told))
    assert not ending.done()
    let_go()
    ending.result(20)


def test_master_that_was_replaced_is_not_held_again(far: Far) -> None:
    far.master = PS
    drain_holds = DrainHolds(cast("Any", far))
    event_loop.run(far.is_held())
    event_loop.run(far.break_link())
    far.tasks = lambda job="ps": []  # type: ignore[method-assign]
    far.master = WORKER
    far.proxy.lead_to(far.server)
    drain_holds._calls[PS].result(20)
    event_loop.run(far.is_held(False))
    far.master = PS  # it is the master again
    drain_holds.hold([PS])
    event_loop.run(far.is_held())
    drain_holds.close()
