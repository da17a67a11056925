"""Large values travel while the segments that take or make them compute."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jgraph as jg
from jgraph.plan.partition import buckets
from jgraph.plan.plan import Plan, plan
from jgraph.plan.program.nodes import RecvNode, SegmentNode, SendNode
from jgraph.plan.traffic import StepTraffic
from tests.support.plans import (
    DRIVER,
    PS,
    TASKS,
    WORKERS,
    check_plan,
    graph_of,
    nodes_of,
    segments_per_task,
)

WORKER = WORKERS[0]
SIZE = 1100  # float32[1100, 1100] is 4.8 MB, a product of two 2.7 billion operations
X = jnp.full((SIZE, SIZE), 1e-3)


def layers(count: int, size: int = SIZE) -> list[Any]:
    return [
        jg.Variable(f"w{n}", jnp.full((size, size), 1e-3 * (n + 1)), device=PS[0])
        for n in range(count)
    ]


def gradients(x: Any, weights: list[Any]) -> Any:
    def loss(values: list[Any]) -> Any:
        h = x
        for value in values:
            h = jnp.tanh(h @ value)
        return h.sum()

    return jax.grad(loss)([w[...] for w in weights])


def step_of(weights: list[Any], *, norm: bool = False) -> Any:
    """A step of a worker with the weights on a ps."""

    def step(x: Any) -> None:
        with jg.device(WORKER):
            found = gradients(x, weights)
            if norm:
                length = sum((g * g).sum() for g in found)
                found = [g / (1.0 + length) for g in found]
        for w, gradient in zip(weights, found, strict=True):
            w[...] = w[...] - gradient

    return step


def plan_of(weights: list[Any], x: Any = X, *, norm: bool = False) -> Plan:
    step = step_of(weights, norm=norm)
    return check_plan(step, x, variables=weights, exact=False)


@cache
def three_layers() -> Plan:
    """A plan of values that are worth to travel apart."""
    return plan_of(layers(3))


def values_of(planned: Plan, kind: Any) -> list[int]:
    """How many values each message of the worker has, in program order."""
    nodes = nodes_of(planned, WORKER, kind)
    return [len(node.outs if kind is RecvNode else node.values) for node in nodes]


def test_gradients_of_the_last_layers_leave_while_those_of_the_first_are_computed() -> (
    None
):
    planned = three_layers()
    assert values_of(planned, SendNode) == [1, 1, 1]
    assert segments_per_task(planned)[PS[0]] == 1


def test_the_first_layers_compute_before_the_parameters_of_the_last_are_there() -> None:
    planned = three_layers()
    received = nodes_of(planned, WORKER, RecvNode)
    first = nodes_of(planned, WORKER, SegmentNode)[0]
    from_ps = [node for node in received if node.src == PS[0]]
    assert [len(node.outs) for node in from_ps] == [1, 1, 1]
    assert set(from_ps[0].outs) <= set(first.inputs)
    assert not {v for node in from_ps[1:] for v in node.outs} & set(first.inputs)


def test_gradients_that_wait_for_their_norm_leave_together() -> None:
    assert values_of(plan_of(layers(3), norm=True), SendNode) == [3]


def test_few_bytes_travel_together() -> None:
    planned = plan_of(layers(3, 300), X[:300, :300])
    assert values_of(planned, SendNode) == [3]
    assert segments_per_task(planned)[WORKER] == 1


def test_little_work_is_not_cut() -> None:
    planned = plan_of(layers(3), X[:1])
    assert values_of(planned, SendNode) == [3]
    assert segments_per_task(planned)[WORKER] == 1


def test_a_segment_has_so_many_messages_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buckets, "LEAST_BYTES", 1000)
    monkeypatch.setattr(buckets, "LEAST_OF_ONE", 1000)
    monkeypatch.setattr(buckets, "MOST", 4)
    planned = plan_of(layers(12, 400), X[:400, :400])
    sent = values_of(planned, SendNode)
    assert sum(sent) == 12
    assert len(sent) in {3, 4}


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("norm", [False, True])
def test_wherever_segments_are_cut_the_step_means_the_same(
    count: int, norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "LEAST_BYTES", 1)
    monkeypatch.setattr(buckets, "LEAST_OF_ONE", 1)
    monkeypatch.setattr(buckets, "MOST", 1000)
    monkeypatch.setattr(buckets, "WORTH", 0.0)
    planned = plan_of(layers(count, 8), X[:8, :8], norm=norm)
    assert (segments_per_task(planned)[WORKER] > 1) == (count > 1)


def test_the_traffic_of_a_plan_says_what_each_piece_takes_and_gives() -> None:
    planned = three_layers()
    pieces = planned.traffic().pieces
    nbytes = SIZE * SIZE * 4
    assert [p.read for p in pieces if p.read] == [nbytes] * 3
    assert [p.written for p in pieces if p.written] == [nbytes] * 3
    assert pieces[0].written == pieces[-1].read == 0
    assert sum(p.work.flops for p in pieces) == pytest.approx(
        planned.traffic().work[WORKER].flops
    )
    assert StepTraffic.from_dict(planned.traffic().to_dict()) == planned.traffic()


def test_a_step_of_one_piece_has_none() -> None:
    assert plan_of(layers(1, 30), X[:30, :30]).traffic().pieces == ()


def test_tasks_of_one_host_compute_in_one_piece() -> None:
    weights = layers(3)
    graph = graph_of(step_of(weights), X, variables=weights)
    planned = plan(graph, tasks=TASKS, driver=DRIVER, one_host=True)
    assert segments_per_task(planned)[WORKER] == 1
