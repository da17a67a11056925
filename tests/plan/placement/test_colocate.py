"""``colocate_with``: operations and variables that go where a variable goes."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import jgraph as jg
from jgraph.errors import PlacementError
from jgraph.graph.device import DeviceSpec
from jgraph.plan.plan import plan
from tests.support.plans import DRIVER, PS, TASKS, WORKERS, check_plan, graph_of

X = np.ones((64, 64), np.float32)


def variable(name: str, n: int, device: str = "") -> jg.Variable:
    return jg.Variable(name, jnp.ones((n, 64)) / 64, device=device)


def test_operations_go_to_a_variable_that_the_plan_places() -> None:
    large, small = variable("layer/large", 128), variable("layer/small", 64)

    def step(x: Any) -> Any:
        with jg.device(WORKERS[1]), jg.colocate_with(small):
            y = jnp.tanh(x @ small[...])
        return y.sum() + large[...].sum()

    made = check_plan(step, X, variables=[large, small], exact=False)
    home = made.task_of("layer/small")
    assert home != made.task_of("layer/large")
    placed = zip(made.graph.equations, made.placement, strict=True)
    tasks = {e.primitive.name: task for e, task in placed}
    assert tasks["dot_general"] == tasks["tanh"] == home


def test_a_variable_made_beside_another_is_put_there() -> None:
    first, second = variable("first", 64), variable("second", 64)
    with jg.colocate_with(second):
        third = variable("third", 1)
    with jg.device(WORKERS[2]), jg.colocate_with(third):
        fourth = variable("fourth", 1)

    def step() -> Any:
        return [v[...].sum() for v in (fourth, third, first, second)]

    made = plan(graph_of(step), tasks=TASKS, driver=DRIVER)
    assert {made.task_of(v) for v in ("first", "second")} == set(PS)
    assert made.task_of("second") == made.task_of("third") == made.task_of("fourth")


def test_what_an_earlier_function_placed_counts_in_a_later_one() -> None:
    w = variable("w", 2)
    with jg.colocate_with(w):
        v = variable("v", 2)

    def step() -> Any:
        with jg.colocate_with(w):
            return jnp.tanh(v[...])

    made = plan(
        graph_of(step),
        tasks=TASKS,
        driver=DRIVER,
        variable_tasks={("run1", "w"): WORKERS[3]},
    )
    assert made.task_of("v") == WORKERS[3]
    with pytest.raises(
        PlacementError, match="'v' is colocated with the variable 'w', which is neither"
    ):
        plan(graph_of(step), tasks=TASKS, driver=DRIVER)


def test_an_operation_beside_a_variable_nobody_placed_is_refused_with_its_line() -> (
    None
):
    w = variable("w", 2)

    def step(x: Any) -> Any:
        with jg.colocate_with(w):
            return jnp.tanh(x)

    with pytest.raises(PlacementError, match=r"'tanh' at .*test_colocate.py:\d+.* 'w'"):
        plan(graph_of(step, X), tasks=TASKS, driver=DRIVER)


specs = st.builds(
    DeviceSpec,
    job=st.none() | st.sampled_from(["ps", "worker"]),
    task=st.none() | st.integers(0, 1),
    beside=st.none() | st.sampled_from(["a%2Fb", "w"]),
)


@given(specs, specs, specs)
def test_scopes_beside_variables_merge_in_any_order(
    a: DeviceSpec, b: DeviceSpec, c: DeviceSpec
) -> None:
    assert a.merge(b).merge(c) == a.merge(b.merge(c))
    assert DeviceSpec.from_string(str(a)) == a
    assert replace(a, beside="w") == DeviceSpec(beside="w").merge(
        replace(a, beside=None)
    )
