"""A process whose task was started again elsewhere finds out, and ends."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from jgraph.cluster import event_loop
from jgraph.cluster.spec import ClusterSpec
from jgraph.coordination.liveness.restarts import REPLACED
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.server.main import serve
from jgraph.server.server import Server

pytestmark = pytest.mark.usefixtures("nothing_is_left")

PS, WORKER = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:0")


@pytest.fixture
def signals() -> Iterator[None]:
    """What a serving process does with signals, taken back afterwards."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def transport_of(server: Server) -> GrpcTransport:
    assert server._server is not None
    return server._server._transport


def say_something(server: Server, peer: TaskName) -> None:
    """Sends a frame that asks for nothing."""

    async def post() -> None:
        end = pb.AbortStep(handle="none", step_id=1)
        transport_of(server).post(peer, frame(abort_step=end))

    event_loop.run(post())


def wait_heard(server: Server, peer: TaskName, frames: int) -> None:
    """Waits until so many frames of a task came."""

    async def heard() -> None:
        async with asyncio.timeout(10):
            while True:
                told = transport_of(server).statistics().peers.get(peer)
                if told is not None and told.frames_received >= frames:
                    return
                await asyncio.sleep(0.01)

    event_loop.run(heard())


@pytest.mark.row(8, 17)
def test_a_process_that_was_replaced_ends_with_a_code_of_its_own(
    signals: None, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        ps = stack.enter_context(Server({"ps": ["127.0.0.1:0"]}))
        old, new = (
            stack.enter_context(Server({"worker": ["127.0.0.1:0"]})) for _ in range(2)
        )
        for told, worker in enumerate((old, new), 1):
            spec = {"ps": [ps.address], "worker": [worker.address]}
            worker.set_cluster(ClusterSpec(spec))
            say_something(worker, PS)
            wait_heard(ps, WORKER, told)
        say_something(old, PS)
        assert serve(old) == REPLACED
        assert old.replaced is not None
        assert "was started again since" in old.replaced.message
        assert new.replaced is None
    assert f"{WORKER} ends: JG-139" in caplog.text
