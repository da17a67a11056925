"""Loops whose bodies touch several tasks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgraph as jg
from jgraph.errors import PlacementError
from jgraph.graph.graph import eval_graph
from jgraph.graph.tracing.function import function
from jgraph.plan.program.nodes import SegmentNode, SendNode
from tests.support.plans import WORKERS, check_plan, nodes_of

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)


def _over_two_tasks(carry: Any, x: Any) -> tuple[Any, Any]:
    with jg.device(WORKERS[1]):
        carry = jnp.sin(carry + x)
    with jg.device(WORKERS[2]):
        return carry * 2, jnp.cos(carry)


@pytest.mark.parametrize("turns", [3, 0])
@pytest.mark.parametrize("reverse", [False, True])
def test_scan_over_two_tasks_becomes_its_turns(reverse: bool, turns: int) -> None:
    rows = X[:turns]

    def step(start: Any, xs: Any) -> Any:
        return jax.lax.scan(_over_two_tasks, start, xs, reverse=reverse)

    planned = check_plan(step, X[0], rows)
    graph = planned.graph
    assert "scan" not in {e.primitive.name for e in graph.equations}
    want = jax.lax.scan(_over_two_tasks, X[0], rows, reverse=reverse)
    got, _ = eval_graph(graph, (), (X[0], rows))
    for one, other in zip(jax.tree.leaves(want), got, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_equal_turns_are_compiled_once() -> None:
    def step(x: Any) -> Any:
        return jax.lax.fori_loop(0, 5, lambda _, y: _over_two_tasks(y, 1.0)[0], x)

    planned = check_plan(step, X)
    there = nodes_of(planned, WORKERS[1], SegmentNode)
    assert len(there) == 5
    assert len({node.digest for node in there}) == 1


def test_gradient_of_a_scan_over_two_tasks_runs_where_its_forward_pass_does() -> None:
    def loss(x: Any) -> Any:
        out, ys = jax.lax.scan(_over_two_tasks, x, X)
        return out.sum() + ys.sum()

    planned = check_plan(jax.value_and_grad(loss), X[0])
    for task in WORKERS[1:3]:
        assert nodes_of(planned, task, SendNode)


def test_scan_of_one_task_stays_one_operation() -> None:
    def step(x: Any) -> Any:
        with jg.device(WORKERS[1]):
            return jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, length=3)[0]

    graph = function(step).graph(X)
    assert [e.primitive.name for e in graph.equations] == ["scan"]


def test_keys_and_weak_types_pass_through_the_turns() -> None:
    def body(key: Any, _: None) -> tuple[Any, Any]:
        with jg.device(WORKERS[1]):
            key, own = jax.random.split(key)
        with jg.device(WORKERS[2]):
            return key, jax.random.normal(own, (2,))

    check_plan(lambda key: jax.lax.scan(body, key, length=3), jax.random.key(3))
    own_keys = lambda key, _: (body(key, None)[0], key)
    check_plan(lambda key: jax.lax.scan(own_keys, key, length=0), jax.random.key(3))


def test_loop_that_uses_a_variable_of_another_task_says_to_read_it_before() -> None:
    w = jg.Variable("w", jnp.ones(2), device="/job:ps/task:0")

    def step(x: Any) -> Any:
        def body(y: Any, _: None) -> tuple[Any, None]:
            return _over_two_tasks(y, w[...])[0], None

        return jax.lax.scan(body, x, length=2)[0]

    with pytest.raises(PlacementError, match=r"w\[\.\.\.\] before the loop"):
        function(step).graph(X[0])


def test_branches_of_two_tasks_are_refused_with_what_to_write() -> None:
    def branch(task: str) -> Any:
        def run(x: Any) -> Any:
            with jg.device(task):
                return jnp.sin(x)

        return run

    def step(x: Any) -> Any:
        return jax.lax.cond(x.sum() > 0, branch(WORKERS[1]), branch(WORKERS[2]), x)

    with pytest.raises(PlacementError, match=r"'cond' at .*choose with jnp\.where"):
        function(step).graph(X[0])


def test_branch_that_is_not_taken_runs_nothing_on_its_one_task() -> None:
    """A conditional of one task is one operation: what it needs is sent once."""

    def step(x: Any) -> Any:
        with jg.device(WORKERS[1]):
            return jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)

    planned = check_plan(step, X[0])
    assert len(nodes_of(planned, WORKERS[1], SegmentNode)) == 1
    assert len(nodes_of(planned, WORKERS[1], SendNode)) == 1
