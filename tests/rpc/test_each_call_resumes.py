"""Each method of a task and of a master, over a connection that breaks: made once."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import pytest

from jgraph.cluster.methods import METHODS
from jgraph.cluster.spec import ClusterSpec
from jgraph.errors import JGError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame, kind_of
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.transport import Address, Frame, Transport
from jgraph.server.master import Master
from jgraph.server.task_service import TaskService
from jgraph.testing.tcp_proxy import TcpProxy
from jgraph.testing.transport_harness import PS, WAIT_S, WORKER, Way, asked, call
from tests.support.run_async import run_async
from tests.support.services import service_of

pytestmark = pytest.mark.usefixtures("nothing_is_left")

Outcomes: TypeAlias = dict[str, list[str]]
FILLED: Final = {
    "Master.Connect": frame(connect=pb.ConnectRequest(timeout_s=WAIT_S)),
    "EndRecords": frame(end_records=pb.EndRecords(stream="ended")),
    # Others than the one that "Master.OpenRun" opens at the same time.
    "Master.Attach": frame(run_query=pb.RunQuery(run="attached")),
    "Master.KeepProgram": frame(register_program=pb.RegisterProgram(run="kept")),
    "Master.StopRun": frame(run_query=pb.RunQuery(run="stopped")),
    "Master.RunSaved": frame(run_query=pb.RunQuery(run="saved")),
    "RunJournal": frame(run_query=pb.RunQuery(run="known")),
    "InheritRun": frame(open_run=pb.OpenRun(run="inherited")),
    "Master.RunLoop": frame(run_loop=pb.RunLoop(run="run")),
}
"""Others are sent with nothing in them."""
FOLLOWED: Final = ("RunLoop", "Master.RunLoop", "Master.Attach", "RunJournal")
"""Their callers take many replies."""
HELD: Final = "DrainHold"
"""Its callers hang up."""


class Counted:
    """The service of a task, with a count of what it was asked, and a gate."""

    def __init__(self, service: TaskService) -> None:
        self.service = service
        self.made: Counter[str] = Counter()
        self.wanted: set[str] = set()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.all_asked = asyncio.Event()

    def frame_received(self, src: TaskName, frame: Frame) -> None: ...

    def peer_lost(self, peer: TaskName, error: JGError) -> None: ...

    async def handle_call(self, method: str, request: Frame) -> AsyncIterator[Frame]:
        self.made[method] += 1
        self.wanted.discard(method)
        if not self.wanted:
            self.all_asked.set()
        await self.may_answer.wait()
        async for reply in self.service.handle_call(method, request):
            yield reply


@dataclass
class Served:
    """A client of a master, through a proxy; the cluster has one other task."""

    proxy: TcpProxy
    at_master: Counted
    client: GrpcTransport

    async def outcomes(self, methods: Iterable[str], way: Way) -> Outcomes:
        """Calls methods at once; returns kinds of replies, or codes of errors."""
        self.at_master.wanted = set(methods)
        told = [self._outcome(method, way) for method in methods]
        return dict(zip(methods, await asyncio.gather(*told), strict=True))

    async def _outcome(self, method: str, way: Way) -> list[str]:
        kind = METHODS[method].request
        empty = pb.Frame()
        getattr(empty, kind).SetInParent()
        request = FILLED.get(method, Frame(empty))
        try:
            replies = await way(
                self.client, self.proxy.address, method, request, WAIT_S
            )
        except JGError as error:
            return [error.code]
        return [kind_of(reply) for reply in replies]


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        worker, transport = await stack.enter_async_context(service_of(WORKER))
        stack.callback(Master(worker).runs.close)
        where: Address = await transport.start(worker)
        service, transport = await stack.enter_async_context(service_of(PS))
        master = Master(service)
        service.context.set_cluster(ClusterSpec({"worker": [where]}))
        await service.holders.announce(0.0)
        stack.callback(master.runs.close)
        at_master = Counted(service)
        proxy = TcpProxy(await transport.start(at_master))
        await stack.enter_async_context(proxy)
        client = GrpcTransport(None, same_machine="off")
        stack.push_async_callback(client.close)
        yield Served(proxy, at_master, client)


async def first_reply(
    transport: Transport,
    address: Address,
    method: str,
    request: Frame,
    timeout_s: float = WAIT_S,
) -> list[Frame]:
    replies = transport.call(address, method, request, timeout_s=timeout_s)
    assert isinstance(replies, AsyncGenerator)
    async with aclosing(replies):
        return [await anext(replies)]


Asking: TypeAlias = "asyncio.Task[Outcomes]"
Moment: TypeAlias = Callable[[Served, Callable[[], Any]], Awaitable[Asking]]


async def requests_lost(there: Served, ask: Callable[[], Any]) -> Asking:
    there.proxy.silence()
    asking: Asking = asyncio.create_task(ask())
    await there.proxy.held.wait()
    return asking


async def in_flight(there: Served, ask: Callable[[], Any]) -> Asking:
    there.at_master.may_answer.clear()
    there.at_master.all_asked.clear()
    asking: Asking = asyncio.create_task(ask())
    await there.at_master.all_asked.wait()
    return asking


async def responses_lost(there: Served, ask: Callable[[], Any]) -> Asking:
    asking = await in_flight(there, ask)
    there.proxy.silence()
    there.at_master.may_answer.set()
    await there.proxy.held.wait()
    return asking


async def check(there: Served, moment: Moment, methods: list[str], way: Way) -> None:
    """Calls methods over a line that holds, and again over one that breaks."""
    due = await there.outcomes(methods, way)
    await there.outcomes(["TaskStatus"], call)  # leaves a line that the next call takes
    made = there.at_master.made.copy()
    asking = await moment(there, lambda: there.outcomes(methods, way))
    there.proxy.cut()
    there.proxy.heal()
    there.at_master.may_answer.set()
    assert await asking == due
    assert there.at_master.made - made == Counter(methods)


@pytest.mark.row(4, 5, 6, 7)
@pytest.mark.parametrize("moment", [requests_lost, in_flight, responses_lost])
def test_every_method_runs_once_whatever_of_its_call_was_lost(
    moment: Moment,
) -> None:
    """And gives the answer, or the error, that it gives over a line which holds."""

    async def main() -> None:
        async with asyncio.timeout(WAIT_S), served() as there:
            await check(there, moment, [m for m in METHODS if m != HELD], asked)
            for method in FOLLOWED:  # each such call has a line to itself
                await check(there, moment, [method], call)
            await check(there, moment, [HELD], first_reply)

    run_async(main())
