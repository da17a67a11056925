"""What a process that was away does with what arrives, and when it writes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

import pytest

from jgraph.cluster.spec import ClusterSpec
from jgraph.errors import (
    FencedError,
    JGError,
    MalformedMessageError,
    TaskLostError,
)
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame
from jgraph.server.self_fencing import FencedHandler
from jgraph.server.task_context import TaskContext
from jgraph.testing.in_process_transport import InProcessNetwork

pytestmark = pytest.mark.usefixtures("nothing_is_left")

PS, WORKER = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:0")
OTHER_PS = TaskName("/job:ps/task:1")
SELF, OTHER = 7, 8
FRAME, BAD = frame(empty=pb.Empty()), frame(empty=pb.Empty())


@final
class Time:
    """A clock that is set."""

    def __init__(self) -> None:
        self.s = 0.0

    def now(self) -> float:
        return self.s


@final
class Service:
    """Notes what it is given; a call is answered twice, the second time when told."""

    def __init__(self) -> None:
        self.replaced: FencedError | None = None
        self.took: list[str] = []
        self.may_end = asyncio.Event()

    def frame_received(self, src: TaskName, received: Frame) -> None:
        if received is BAD:
            raise MalformedMessageError("this is none")
        self.took.append(f"frame of {src}")

    def peer_lost(self, peer: TaskName, error: JGError) -> None:
        self.took.append(f"loss of {peer}")
        if isinstance(error, FencedError):
            self.replaced = error

    async def handle_call(self, method: str, request: Frame) -> AsyncIterator[Frame]:
        self.took.append(f"call of {method}")
        yield frame(call=pb.Call(method="began"))
        await self.may_end.wait()
        yield frame(call=pb.Call(method="ended"))


@final
class Network:
    """Says who is at the address of the task, when that is known."""

    def __init__(self) -> None:
        self.incarnation = SELF
        self.there: asyncio.Future[int] = asyncio.Future()
        self.asked = 0

    async def who_is_at(self, dst: str, timeout_s: float) -> pb.Hello:
        assert dst == "ps:1"
        self.asked += 1
        return pb.Hello(task=PS, incarnation=await asyncio.shield(self.there))


@final
class World:
    """A watch, and all that is around it."""

    def __init__(self) -> None:
        self.time, self.service, self.network = Time(), Service(), Network()
        context = TaskContext(PS, InProcessNetwork().transport(PS), self.time)
        context.set_cluster(ClusterSpec({"ps": ["ps:1"]}))
        self.watch = FencedHandler(context, self.service, self.time, self.network)

    def told(self) -> "asyncio.Task[list[str]]":
        """Calls, and returns what will have been answered."""

        async def call() -> list[str]:
            replies = self.watch.handle_call("Any", FRAME)
            return [body_of(reply).method async for reply in replies]

        return asyncio.ensure_future(call())


async def turns() -> None:
    """Lets all run that need not wait."""
    for _ in range(10):
        await asyncio.sleep(0)


def in_a_world(
    body: Callable[[World], Coroutine[Any, Any, None]],
) -> Callable[[], None]:
    """Makes a test of what happens in a world."""

    def run() -> None:
        async def in_loop() -> None:
            world = World()
            async with asyncio.timeout(20):
                await body(world)
            world.watch.close()

        asyncio.run(in_loop())

    return run


@in_a_world
async def test_process_that_is_awake_asks_nobody_and_keeps_nobody_waiting(
    world: World,
) -> None:
    for world.time.s in (0.0, 4.0, 8.0):
        world.watch.frame_received(WORKER, FRAME)
        world.watch.begin()
        world.watch.close()
    world.service.may_end.set()
    assert await world.told() == ["began", "ended"]
    world.watch.check()
    assert len(world.service.took) == 4
    assert world.network.asked == 0


@pytest.mark.row(17)
@in_a_world
async def test_what_comes_after_a_pause_waits_until_the_place_is_known(
    world: World,
) -> None:
    world.time.s = 60.0
    world.service.may_end.set()
    world.watch.frame_received(WORKER, FRAME)
    world.watch.peer_lost(WORKER, TaskLostError("gone"))
    told = world.told()
    await turns()
    assert (world.service.took, world.network.asked) == ([], 1)
    world.network.there.set_result(SELF)
    assert await told == ["began", "ended"]
    assert world.service.took == [
        f"frame of {WORKER}",
        f"loss of {WORKER}",
        "call of Any",
    ]


@pytest.mark.row(17)
@in_a_world
async def test_process_that_was_replaced_answers_nothing_else_and_takes_nothing(
    world: World,
) -> None:
    began = world.told()  # before it is stopped
    await turns()
    world.time.s = 60.0
    world.watch.frame_received(WORKER, FRAME)
    world.service.may_end.set()
    told = world.told()
    world.network.there.set_result(OTHER)
    for call in (began, told, world.told()):
        with pytest.raises(FencedError, match=f"{PS} was started again while .* 60 s"):
            await call
    world.watch.frame_received(WORKER, FRAME)
    assert world.service.took == ["call of Any", f"loss of {PS}"]


@in_a_world
async def test_process_that_reaches_nobody_goes_on_after_some_seconds(
    world: World,
) -> None:
    world.time.s = 60.0
    world.watch.frame_received(WORKER, FRAME)
    world.network.there.set_exception(OSError("no route"))
    await turns()
    assert world.service.took == []
    world.time.s = 64.0
    world.watch.frame_received(WORKER, FRAME)
    assert world.service.took == []
    world.time.s = 65.0
    world.service.may_end.set()
    await world.told()
    assert world.service.took == [*[f"frame of {WORKER}"] * 2, "call of Any"]


@in_a_world
async def test_frame_that_is_none_and_had_to_wait_loses_its_sender_alone(
    world: World,
) -> None:
    world.time.s = 60.0
    for src, received in [(WORKER, BAD), (OTHER_PS, FRAME)]:
        world.watch.frame_received(src, received)
    world.network.there.set_result(SELF)
    await turns()
    assert world.service.took == [f"loss of {WORKER}", f"frame of {OTHER_PS}"]


@pytest.mark.row(17)
@in_a_world
async def test_process_that_others_refuse_does_nothing_more(
    world: World,
) -> None:
    world.time.s = 60.0
    told = world.told()
    await turns()
    world.watch.peer_lost(WORKER, FencedError("there is another one"))
    with pytest.raises(FencedError, match="there is another one"):
        await told
    with pytest.raises(FencedError, match="there is another one"):
        world.watch.check()


@pytest.mark.row(17)
@in_a_world
async def test_thread_that_writes_waits_until_the_place_is_known(
    world: World,
) -> None:
    world.time.s = 60.0
    with ThreadPoolExecutor(1) as threads:
        for found in (SELF, OTHER):
            checking = threads.submit(world.watch.check)
            world.watch.frame_received(WORKER, FRAME)
            await turns()
            assert not checking.done()
            world.network.there.set_result(found)
            if found == SELF:
                await asyncio.wrap_future(checking)
            else:
                with pytest.raises(FencedError):
                    await asyncio.wrap_future(checking)
            world.network.there = asyncio.Future()
            world.time.s = 120.0
