"""Growth of planning with the number of variables, counted in calls and not timed."""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jgraph as jg
from jgraph.graph.graph import Graph
from jgraph.graph.tracing.trace import trace
from jgraph.plan.plan import plan
from tests.support.plans import DRIVER, TASKS


def training(parameters: int) -> Graph:
    """Returns a step of Adam on a sharded parameter and on so many small ones."""
    shapes = {"cut": (64, 4), **{f"w{n}": (4,) for n in range(parameters)}}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    tx = optax.adam(0.1)
    leaves, tree = jax.tree.flatten((params, tx.init(params)))
    variables = [
        jg.Variable(
            f"v{n}",
            leaf,
            partitioner=(lambda *_: [2, 1]) if leaf.ndim == 2 else None,
        )
        for n, leaf in enumerate(leaves)
    ]

    def step(x: Any) -> Any:
        params, state = jax.tree.unflatten(tree, [v[...] for v in variables])

        def loss(params: Any) -> Any:
            with jg.device(DRIVER):
                y = x @ params["cut"]
                for n in range(parameters):
                    y = jnp.tanh(y * params[f"w{n}"])
                return y.sum()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        new = jax.tree.leaves((optax.apply_updates(params, updates), state))
        for variable, leaf in zip(variables, new, strict=True):
            variable[...] = leaf
        return value

    return trace(step, jnp.ones((3, 64)), variables=variables)[0]


def writing(variables: int) -> Graph:
    """Returns a step that writes so many variables, and reads none."""
    written = [
        jg.Variable(f"v{n}", jnp.ones(4), device=DRIVER) for n in range(variables)
    ]

    def step(x: Any) -> None:
        for n, variable in enumerate(written):
            variable[...] = jnp.tanh(x * n)

    return trace(step, jnp.ones(4), variables=written)[0]


def alternating(operations: int) -> Graph:
    """Returns a step whose operations are on two tasks by turns."""

    def step(x: Any) -> Any:
        for n in range(operations):
            with jg.device(TASKS[n % 2]):
                x = jnp.tanh(x)
        return x

    return trace(step, jnp.ones(4))[0]


def calls_of_planning(graph: Graph) -> int:
    """Returns how many functions planning calls, those of C among them."""
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        plan(graph, tasks=TASKS, driver=DRIVER)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(("make", "few"), [(training, 8), (writing, 80)])
def test_planning_takes_as_many_calls_for_each_of_many_variables_as_of_few(
    make: Callable[[int], Graph], few: int
) -> None:
    plan(make(few), tasks=TASKS, driver=DRIVER)  # JAX fills its caches
    calls = [calls_of_planning(make(n)) for n in (few, 4 * few)]
    assert calls[1] < 1.05 * 4 * calls[0]


def test_planning_of_many_segments_looks_at_each_two_of_them_at_most() -> None:
    calls = [calls_of_planning(alternating(n)) for n in (100, 200)]
    assert calls[1] < 4 * calls[0]


def test_planning_traces_nothing_for_each_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_jaxpr, traces = jax.make_jaxpr, []

    def noted(*args: Any, **options: Any) -> Any:
        traces.append(args)
        return make_jaxpr(*args, **options)

    counts = []
    for parameters in (5, 20):
        graph = training(parameters)
        monkeypatch.setattr(jax, "make_jaxpr", noted)
        traces.clear()
        plan(graph, tasks=TASKS, driver=DRIVER)
        monkeypatch.undo()
        counts.append(len(traces))
    assert counts[0] == counts[1]
