import asyncio
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.errors import JGError
from jgraph.graph.device import device
from jgraph.graph.ir import TaskName
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.plan.plan import plan
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, kind_of
from jgraph.rpc.status import from_status
from jgraph.rpc.transport import Frame
from jgraph.server.steps import task_host
from jgraph.server.steps.messages import (
    ALONE_BYTES,
    TOGETHER_BYTES,
    StepMessages,
    apart,
    together,
)
from jgraph.server.task_service import TaskService
from jgraph.testing.in_process_transport import InProcessNetwork
from tests.support.in_process import cluster_of
from tests.support.run_async import run_async

WORKER, PS = TaskName("/job:worker/task:0"), TaskName("/job:ps/task:0")


def values(step: int, key: str = "g") -> pb.Values:
    return pb.Values(handle="h", step_id=step, key=key)


def start(step: int) -> pb.StartStep:
    return pb.StartStep(handle="h", step_id=step)


def done(step: int, *, error: str = "") -> pb.StepDone:
    status = pb.Status(code=error) if error else None
    return pb.StepDone(handle="h", step_id=step, status=status)


def told(message: Any) -> tuple[Any, ...]:
    """Returns (kind, step), and the steps of what rides with values."""
    if not isinstance(message, pb.Values):
        return type(message).__name__, message.step_id
    riding = [
        (name, getattr(message, name).step_id)
        for name in ("start", "done")
        if message.HasField(name)
    ]
    return "Values", message.step_id, *riding


def joined(*said: Any) -> list[list[tuple[Any, ...]]]:
    """Returns what is in each frame."""
    pairs = [one if isinstance(one, tuple) else (one, ()) for one in said]
    return [
        [told(message), *map(told, getattr(message, "more", ()))]
        for message, _ in together(pairs)
    ]


def test_the_next_step_is_ordered_with_the_gradients_of_this_one() -> None:
    assert joined(values(1), start(2)) == [[("Values", 1, ("start", 2))]]


def test_a_part_is_reported_with_the_values_of_the_next_step() -> None:
    wanted = [[("Values", 2, ("done", 1))]]
    assert joined(values(2), done(1)) == wanted
    assert joined(done(1, error="JG-101"), values(2)) == wanted


def test_orders_stay_in_their_order_and_one_rides_with_each_values() -> None:
    assert joined(values(1), start(2), start(3), values(2)) == [
        [("Values", 1, ("start", 2)), ("Values", 2, ("start", 3))]
    ]
    assert joined(start(2), values(1), start(3), done(1)) == [
        [("Values", 1, ("start", 2), ("done", 1))],
        [("StartStep", 3)],
    ]


def test_without_values_all_is_said_as_it_came_up() -> None:
    said = done(1), start(2), done(2)
    assert joined(*said) == [[("StepDone", 1)], [("StartStep", 2)], [("StepDone", 2)]]


def test_a_report_with_the_times_of_nodes_leaves_alone() -> None:
    times = np.zeros((2, 3))
    assert joined(values(2), (done(1), (times,))) == [
        [("Values", 2)],
        [("StepDone", 1)],
    ]


def test_values_of_one_turn_share_a_frame_and_each_gets_its_own_tensors_back() -> None:
    said = [
        (values(1, "rows"), (np.arange(2), np.arange(3))),
        (values(1, "dense"), ()),
        (values(2, "ids"), (np.arange(4),)),
    ]
    [(message, tensors)] = together(said)
    assert isinstance(message, pb.Values)
    parts = [
        (part.step_id, part.key, [len(own) for own in owned])
        for part, owned in apart(message, tensors)
    ]
    assert parts == [(1, "rows", [2, 3]), (1, "dense", []), (2, "ids", [4])]


def test_a_frame_of_values_has_an_end() -> None:
    part = np.zeros(TOGETHER_BYTES // 2, np.uint8)
    said = [(values(step), (part,)) for step in range(5)]
    assert joined(*said) == [
        [("Values", 0), ("Values", 1)],
        [("Values", 2), ("Values", 3)],
        [("Values", 4)],
    ]


class Peer:
    """Notes what arrives at a task."""

    def __init__(self) -> None:
        self.got: list[Frame] = []
        self.came = asyncio.Event()

    def frame_received(self, src: TaskName, received: Frame) -> None:
        self.got.append(received)
        self.came.set()

    def peer_lost(self, peer: TaskName, error: JGError) -> None:
        raise AssertionError(error)

    def handle_call(self, method: str, request: Frame) -> Any:
        raise AssertionError(method)


async def arrived(
    say: Callable[[StepMessages], None], count: int, *, crowded: bool = True
) -> list[Frame]:
    """Returns the frames that reach a ps when a worker says something in one turn."""
    network, peer = InProcessNetwork(), Peer()
    worker, ps = network.transport(WORKER), network.transport(PS)
    address = await ps.start(peer)
    await worker.start(Peer())
    worker.set_peers({PS: address})
    say(StepMessages(worker, lambda: crowded))
    async with asyncio.timeout(10):
        while len(peer.got) < count:
            await peer.came.wait()
            peer.came.clear()
    await worker.close()
    await ps.close()
    return peer.got


def test_what_is_said_in_one_turn_leaves_in_one_frame_with_its_tensors() -> None:
    def say(messages: StepMessages) -> None:
        messages.values(PS, values(1), (np.arange(3),))
        messages.order(PS, start(2))

    [received] = run_async(arrived(say, 1))
    assert told(body_of(received)) == ("Values", 1, ("start", 2))
    np.testing.assert_array_equal(received.tensors[0], np.arange(3))


def test_values_wait_for_no_order_where_every_task_has_a_core() -> None:
    def say(messages: StepMessages) -> None:
        messages.report(PS, pb.StepDone(step_id=0), ())
        messages.values(PS, values(1), (np.arange(3),))
        messages.order(PS, start(2))

    received = run_async(arrived(say, 2, crowded=False))
    assert [told(body_of(one)) for one in received] == [
        ("Values", 1, ("done", 0)),
        ("StartStep", 2),
    ]


def test_large_values_wait_for_nobody_and_overtake_nothing() -> None:
    def say(messages: StepMessages) -> None:
        messages.order(PS, start(1))
        messages.values(PS, values(1), (np.zeros(ALONE_BYTES, np.uint8),))
        messages.order(PS, start(2))

    got = [told(body_of(received)) for received in run_async(arrived(say, 3))]
    assert got == [("StartStep", 1), ("Values", 1), ("StartStep", 2)]


def test_values_of_a_withdrawn_step_do_not_leave_and_its_order_to_end_comes_last() -> (
    None
):
    def say(messages: StepMessages) -> None:
        messages.values(PS, values(1), ())
        messages.values(PS, values(2), ())
        messages.order(PS, start(3))
        messages.withdraw(("h", 1))
        messages.abort(PS, pb.AbortStep(handle="h", step_id=3))

    got = run_async(arrived(say, 2))
    assert told(body_of(got[0])) == ("Values", 2, ("start", 3))
    assert kind_of(got[1]) == "abort_step"


def test_values_that_cannot_be_sent_end_their_step_where_it_waits_for_them() -> None:
    def say(messages: StepMessages) -> None:
        messages.values(PS, values(1), (np.array(["text"]),))
        messages.values(PS, values(2), (np.arange(2),))

    got = run_async(arrived(say, 2))
    assert kind_of(got[0]) == "abort_step"
    assert "dtype" in from_status(body_of(got[0]).reason).message
    assert told(body_of(got[1])) == ("Values", 2)
    np.testing.assert_array_equal(got[1].tensors[0], np.arange(2))


@pytest.mark.parametrize(("cores", "frames_a_step"), [(1, 1), (2, 2)])
def test_an_order_leaves_with_gradients_where_tasks_share_a_core(
    monkeypatch: pytest.MonkeyPatch, cores: int, frames_a_step: int
) -> None:
    monkeypatch.setattr(task_host, "available_cores", lambda: cores)
    """Parameters with the report of the step before; gradients with the next order."""
    weights = Variable("w", jnp.zeros(4), device=PS)

    def step(x: Any) -> None:
        value = weights[...]
        with device(WORKER):
            gradient = jnp.tanh(value) + x
        weights[...] = value - gradient

    x = np.ones(4, np.float32)
    graph, _ = trace(step, x, variables=[weights])
    program = plan(graph, tasks=[WORKER, PS], driver=WORKER).program
    count = 20

    async def frames() -> tuple[list[str], list[str]]:
        at_ps: list[str] = []
        at_worker: list[str] = []

        def watch(service: TaskService, got: list[str]) -> None:
            take = service.frame_received

            def noted(src: TaskName, received: Frame) -> None:
                got.append(kind_of(received))
                take(src, received)

            service.frame_received = noted  # type: ignore[method-assign]

        async with cluster_of([WORKER, PS]) as (_, services):
            watch(services[PS], at_ps)
            watch(services[WORKER], at_worker)
            for task, service in services.items():
                runtime = service.runtime
                runtime.register("h", program, runtime.load(program), [WORKER, PS])
                if task == PS:
                    stored = program.partition(PS).variables
                    runtime.store.write(stored, [np.zeros(4, np.float32)])
            over = asyncio.Event()
            driver, left = services[WORKER].driver, [count]

            def begin() -> None:
                left[0] -= 1
                last = not left[0]
                driver.start(
                    "h",
                    {program.feeds[0][0]: x},
                    lambda fetches, times: None if last else begin(),
                    lambda error: over.set() if last or error else None,
                    timeout_s=30,
                    ordered=True,
                )

            begin()
            async with asyncio.timeout(30):
                await over.wait()
            assert not driver.steps
            [value] = services[PS].runtime.store.read(program.partition(PS).variables)
            expected = np.zeros(4, np.float32)
            for _ in range(count):
                expected = expected - (np.tanh(expected) + 1)
            np.testing.assert_allclose(value, expected, rtol=1e-5)
        return at_ps, at_worker

    def are_few(at_ps: list[str], at_worker: list[str]) -> bool:
        assert count * frames_a_step <= len(at_ps)
        # The first step is begun, and the last one reported, by itself.
        begun = len(at_ps) <= count * frames_a_step + 3
        return begun and len(at_worker) <= count * frames_a_step + count // 2

    # On a busy machine an update may take so long that its report leaves later.
    tries = (run_async(frames(), timeout_s=60) for _ in range(5))
    assert any(are_few(*seen) for seen in tries)
