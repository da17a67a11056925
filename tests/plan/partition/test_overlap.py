"""What need not wait for other tasks does not."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jgraph as jg
from jgraph.plan.partition import overlap
from jgraph.plan.program.nodes import RecvNode, SegmentNode
from tests.support.plans import (
    WORKERS,
    check_plan,
    descended,
    nodes_of,
    segments_per_task,
)

A, B = WORKERS[:2]
X = jnp.full((300, 300), 0.01)  # a product of two is 54 million operations


def tower(x: Any) -> Any:
    for _ in range(3):
        x = jnp.tanh(x @ x)
    return x


def two(x: Any) -> Any:
    """The sum of two towers, one on each task."""
    with jg.device(A):
        mine = tower(x)
    with jg.device(B):
        others = tower(x + 1)
    with jg.device(A):
        return (mine + others).sum()


def test_half_of_a_sum_does_not_wait_for_the_other_half() -> None:
    planned = check_plan(two, X, exact=False)
    assert segments_per_task(planned)[A] == 2
    first = nodes_of(planned, A, SegmentNode)[0]
    received = {v for node in nodes_of(planned, A, RecvNode) for v in node.outs}
    assert not received & set(first.inputs)


def test_what_another_task_waits_for_does_not_wait_for_the_rest() -> None:
    def fork(x: Any) -> Any:
        with jg.device(A):
            y = tower(x)
            mine = tower(y + 1).sum()
        with jg.device(B):
            return mine, tower(y + 2).sum()

    assert segments_per_task(check_plan(fork, X, exact=False))[A] == 2


def test_little_work_is_no_segment_of_its_own() -> None:
    planned = check_plan(two, X[:30, :30], exact=False)
    assert segments_per_task(planned)[A] == 1


def test_the_update_of_a_variable_stays_in_one_piece() -> None:
    m = jg.Variable("m", jnp.full((300, 300), 0.5), device=A)

    def step(x: Any) -> Any:
        with jg.device(B):
            gradient = tower(x)
        with jg.device(A):
            mine = tower(x + 1).sum()
        old = m[...]
        m[...] = old * 0.9 + gradient
        return mine

    planned = check_plan(step, X, variables=[m], exact=False)
    first, update = nodes_of(planned, A, SegmentNode)
    assert (first.reads, first.updates) == ((), ())
    assert update.updates == (0,)


def test_gradients_of_a_half_overlap_with_those_of_the_other() -> None:
    weights = [
        jg.Variable(f"w{n}", jnp.full((300, 300), 0.01), device=task)
        for n, task in enumerate((A, A, B, B))
    ]

    def step(x: Any) -> Any:
        def loss(values: list[Any]) -> Any:
            h = x
            for value, task in zip(values, (A, A, B, B), strict=True):
                with jg.device(task):
                    h = jnp.tanh(h @ value)
            with jg.device(B):
                return h.sum()

        return descended(loss, weights)

    planned = check_plan(step, X, variables=weights, exact=False)
    # B sends the gradient that A waits for, and then computes those of its weights.
    assert segments_per_task(planned)[B] == 2


@pytest.mark.parametrize(
    "tasks",
    [
        (A, B),
        pytest.param((B, A, B), marks=pytest.mark.nightly),
        pytest.param((A, A, B, B), marks=pytest.mark.nightly),
        (A, B, A, B),
    ],
)
def test_wherever_clusters_are_cut_the_step_means_the_same(
    tasks: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "WORTH", 0.0)
    variables = [
        jg.Variable(f"{name}{n}", jnp.full((4, 4), 0.1 + n), device=task)
        for n, task in enumerate(tasks)
        for name in ("w", "m")
    ]
    weights, moments = variables[::2], variables[1::2]

    def step(x: Any) -> Any:
        def loss(values: list[Any]) -> Any:
            h, side = x, jnp.float32(0.0)
            for value, task in zip(values, tasks, strict=True):
                with jg.device(task):
                    h = jnp.tanh(h @ value)
                    side = side + (h * h).sum()
            return h.sum() + side

        found, gradients = jax.value_and_grad(loss)([w[...] for w in weights])
        norm = sum((g * g).sum() for g in gradients)
        for w, m, gradient in zip(weights, moments, gradients, strict=True):
            m[...] = 0.9 * m[...] + gradient / (1.0 + norm)
            w[...] = w[...] - 0.1 * m[...]
        return found, norm

    planned = check_plan(step, X[:4, :4], variables=variables, exact=False)
    assert len(planned.segments) > len(set(tasks))
