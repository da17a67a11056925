"""What is to run alone is a segment of its own, in program order, and lowered once."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jgraph as jg
from jgraph.errors import CallbackError, PlacementError
from jgraph.graph.tracing.alone import alone
from jgraph.plan.plan import Plan
from jgraph.plan.program.nodes import SegmentNode
from tests.support.plans import PS, WORKERS, check_plan, graph_of, nodes_of

X = jnp.arange(6.0)


def doubled(x: Any) -> list[Any]:
    return [x * 2 + 1]


def labels(planned: Plan, task: str) -> list[str]:
    return [s.label for s in planned.segments if s.task == task]


def test_calls_on_one_task_are_segments_that_follow_one_another() -> None:
    def step(x: Any) -> Any:
        run = alone("doubled", doubled, x)
        with jg.device(WORKERS[1]):
            (b,) = run([x], "second")
            (a,) = run([x + 1], "first")
            return a + b

    planned = check_plan(step, X)
    assert [n for n in labels(planned, WORKERS[1]) if n in {"first", "second"}] == [
        "second",
        "first",
    ]
    segments = nodes_of(planned, WORKERS[1], SegmentNode)
    partition = planned.program.partition(WORKERS[1]).nodes
    (then,) = [n for n in segments if n.after]
    assert isinstance(partition[then.after[0]], SegmentNode)


def test_calls_on_two_tasks_do_not_wait_for_each_other() -> None:
    def step(x: Any) -> Any:
        run = alone("doubled", doubled, x)
        results = []
        for worker in WORKERS[1:3]:
            with jg.device(worker):
                results.append(run([x])[0])
        return results

    planned = check_plan(step, X)
    for worker in WORKERS[1:3]:
        assert [n.after for n in nodes_of(planned, worker, SegmentNode)] == [()]


def test_calls_of_one_function_and_towers_of_one_model_share_code() -> None:
    w = jg.Variable("w", X, device=PS[0])

    def step(x: Any) -> Any:
        run = alone("doubled", doubled, x)
        total = jnp.zeros(())
        for worker in WORKERS[:3]:
            with jg.device(worker):
                (y,) = run([jnp.sin(w[...]) * x])
                total += jnp.cos(y).sum()
        return total

    planned = check_plan(step, X, variables=[w])
    digests = {s.digest for s in planned.segments if s.task in WORKERS[:3]}
    assert len(planned.segments) >= 9
    assert len(digests) <= 5


def test_segments_of_other_constants_do_not_share_code() -> None:
    def step(x: Any) -> Any:
        total = []
        for number, worker in enumerate(WORKERS[:2]):
            with jg.device(worker):
                total.append(jnp.sin(x) * np.float32(number + 2))
                total.append(jnp.cos(x) + np.arange(6, dtype=np.float32) * number)
        return total

    check_plan(step, X)


def test_operands_that_do_not_matter_are_not_sent() -> None:
    def step(x: Any, y: Any) -> Any:
        with jg.device(WORKERS[1]):
            return alone("", lambda x, y: [x * 2], x, y)([x, y])[0]

    planned = check_plan(step, X, jnp.ones(1000))
    assert planned.nbytes_per_step == 2 * X.nbytes


def test_arrays_that_the_function_closed_over_are_constants_of_the_graph() -> None:
    large = jnp.arange(6000.0).reshape(6, 1000)

    def step(x: Any) -> Any:
        run = alone("", lambda x: [x @ large], x)
        with jg.device(WORKERS[1]):
            return run([x])[0] + run([x + 1])[0]

    check_plan(step, X, exact=False)


def test_a_variable_is_read_by_the_calls_on_its_task_and_written_after_them() -> None:
    w = jg.Variable("w", X, device=WORKERS[1])

    def step(x: Any) -> Any:
        value = w[...]
        run = alone("", lambda w, x: [w * x], value, x)
        with jg.device(WORKERS[1]):
            a, b = run([value, x])[0], run([value, x + 1])[0]
            w[...] = value - a - b
            return a

    planned = check_plan(step, X, variables=[w])
    reads = [n.reads for n in nodes_of(planned, WORKERS[1], SegmentNode)]
    assert reads.count((0,)) == 2


def test_two_tasks_inside_one_call_are_refused() -> None:
    def body(x: Any) -> Sequence[Any]:
        with jg.device(WORKERS[0]):
            y = x + 1
        with jg.device(WORKERS[1]):
            return [y * 2]

    with pytest.raises(PlacementError, match="has operations on several tasks"):
        graph_of(lambda x: alone("body", body, x)([x])[0], X)


def test_a_callback_inside_is_refused() -> None:
    import jax

    def body(x: Any) -> Sequence[Any]:
        return [jax.pure_callback(lambda x: x, x, x)]

    with pytest.raises(CallbackError):
        check_plan(lambda x: alone("body", body, x)([x])[0], X)
