"""A task of a pipeline computes on while what it made travels, and comes back."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import optax
import pytest

import jgraph as jg
from jgraph.client.cluster import connect
from jgraph.coordination.step.run_metadata import RunMetadata
from jgraph.coordination.timeline.node_times import NodeTime
from tests.support.layers import batches, layer, params_of, squares
from tests.support.servers import Servers

FIRST, LAST = "/job:worker/task:0", "/job:worker/task:1"
SOON_S = 30


class Turns:
    """The lock of a parameter: says which pass takes it, and may keep it waiting."""

    def __init__(self, taken: Callable[[int], None]) -> None:
        self._lock = threading.Lock()
        self._taken = taken
        self._turn = 0

    def acquire(self) -> None:
        self._lock.acquire()
        self._turn += 1
        self._taken(self._turn)

    def release(self) -> None:
        self._lock.release()


@pytest.fixture
def workers() -> Iterator[Servers]:
    servers = Servers(worker=2)
    yield servers
    servers.stop()


def runtime_of(workers: Servers, task: str) -> Any:
    server: Any = workers.server(task)._server
    return server.service.runtime


def passes(told: RunMetadata, task: str) -> list[NodeTime]:
    return [n for n in told.of(task) if n.kind == "segment" and "pass" in n.label]


def test_a_pass_runs_while_the_one_before_is_sent_used_and_answered(
    workers: Servers,
) -> None:
    """The second forward pass ends when the gradient of the first one is back."""
    pipe = jg.Pipeline([layer] * 2, squares, microbatches=4, tasks=2)
    step = pipe.step(params_of(2), optax.sgd(0.1))
    second_runs, answered = threading.Event(), threading.Event()

    def in_the_first_stage(turn: int) -> None:
        if turn == 2:
            second_runs.set()
            assert answered.wait(SOON_S), "nothing came while the pass ran"

    def in_the_last_stage(turn: int) -> None:
        if turn == 1:
            assert second_runs.wait(SOON_S), "the second pass waits for the last stage"

    runtime = runtime_of(workers, FIRST)
    deliver = runtime.deliver

    def delivered(*message: Any) -> None:
        deliver(*message)
        answered.set()

    with connect(workers.servers[0].target, timeout_s=20) as cluster:
        session = cluster.session()
        session.initialize(step.variables)
        for task, stage, taken in (
            (FIRST, 0, in_the_first_stage),
            (LAST, 1, in_the_last_stage),
        ):
            store = runtime_of(workers, task).store
            store._entries["", f"params/{stage}/w"].lock = Turns(taken)
        runtime.deliver = delivered
        session.run(step.train, *batches(1)[0], trace=True)
        told = session.run_metadata
    second = passes(told, FIRST)[1]
    sent = next(n for n in told.of(LAST) if n.kind == "send")
    came = next(n for n in told.of(FIRST) if n.key == sent.key)
    answer = passes(told, LAST)[0]
    off = told.clock_error_s[answer.task]
    assert second.start_s <= came.start_s <= second.end_s
    for inside in (answer, sent):
        assert second.start_s - off <= inside.end_s <= second.end_s + off
