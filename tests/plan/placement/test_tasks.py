"""Which task a device names, and where variables go."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import jgraph as jg
from jgraph.errors import ConfigError, PlacementError, UnknownDeviceError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.ir import TaskName, VariableSpec
from jgraph.plan.placement.tasks import Tasks, assign_variables
from jgraph.plan.plan import Plan, plan
from tests.support.plans import DRIVER, PS, TASKS, WORKERS, graph_of


def tasks(default: str = "", names: list[TaskName] = TASKS) -> Tasks:
    return Tasks(tuple(names), DRIVER, DeviceSpec.from_string(default))


def spec(name: str, size: int, device: str = "") -> VariableSpec:
    return VariableSpec(name, (size,), jnp.float32, DeviceSpec.from_string(device))


@pytest.mark.parametrize(
    ("device", "default", "expected"),
    [
        ("/job:ps/task:1", "", [PS[1]]),
        ("/job:ps", "", PS),
        ("/job:worker", WORKERS[2], [WORKERS[2]]),
        ("/job:ps", WORKERS[1], PS),
        ("/task:1", "/job:ps", [PS[1]]),
        ("/task:1", "", [PS[1], WORKERS[1]]),
    ],
)
def test_a_device_means_the_tasks_it_leaves_open(
    device: str, default: str, expected: list[TaskName]
) -> None:
    found = tasks(default).matching(DeviceSpec.from_string(device), "it")
    assert list(found) == expected


def test_a_device_that_no_task_has_is_named_with_the_nearest() -> None:
    with pytest.raises(UnknownDeviceError, match="it asks for '/job:pss/task:1'") as e:
        tasks().matching(DeviceSpec.from_string("/job:pss/task:1"), "it")
    assert f"did you mean '{PS[1]}'" in str(e.value)


def test_variables_go_to_their_device_and_open_ones_fill_the_rest() -> None:
    variables = [
        spec("fixed", 100, PS[0]),
        spec("large", 60, "/job:ps"),
        spec("small", 10),
        spec("chosen", 5, "/job:ps"),
    ]
    found = assign_variables(variables, tasks(), {("", "chosen"): PS[0]})
    assert found == [PS[0], PS[1], PS[1], PS[0]]


def test_open_variables_follow_the_default_where_there_is_no_ps() -> None:
    variables = [spec("a", 8), spec("b", 8)]
    alone = tasks("", WORKERS)
    assert assign_variables(variables, alone, {}) == [DRIVER, DRIVER]
    spread = assign_variables(variables, tasks("/job:worker", WORKERS), {})
    assert spread == [WORKERS[0], WORKERS[1]]


def test_variables_near_each_other_stay_together_and_still_balance() -> None:
    variables = [spec(n, s) for n, s in [("a", 40), ("a2", 40), ("b", 50), ("b2", 50)]]
    found = assign_variables(variables, tasks(), {}, near=[{0, 1}, {2, 3}])
    assert found == [PS[1], PS[1], PS[0], PS[0]]


def test_an_open_variable_joins_a_settled_one_it_is_near() -> None:
    variables = [spec("w", 40, PS[1]), spec("m", 40), spec("far", 1, WORKERS[0])]
    found = assign_variables(variables, tasks(), {}, near=[{0, 1, 2}])
    assert found == [PS[1], PS[1], WORKERS[0]]


def test_variables_that_must_be_together_but_cannot_are_refused() -> None:
    variables = [spec("a", 1, PS[0]), spec("b", 1, PS[1])]
    with pytest.raises(PlacementError, match="'a' on /job:ps/task:0, 'b' on"):
        assign_variables(variables, tasks(), {}, together=[{0, 1}])


def test_the_answer_does_not_depend_on_the_order_of_the_variables() -> None:
    variables = [spec(n, s) for n, s in [("a", 9), ("b", 7), ("c", 5), ("d", 3)]]
    named: dict[str, Any] = {}
    for order in (variables, variables[::-1]):
        found = assign_variables(order, tasks(), {})
        placed = {v.name: t for v, t in zip(order, found, strict=True)}
        assert named in ({}, placed)
        named = placed


def test_a_plan_says_on_which_task_a_variable_is() -> None:
    mine = jg.Variable("w", jnp.ones(2), device=PS[1])
    other = jg.Variable("w", jnp.ones(2), device=PS[0], container="snapshot")

    def planned(step: Callable[[], Any]) -> Plan:
        return plan(graph_of(step), tasks=TASKS, driver=DRIVER)

    alone = planned(lambda: mine[...] * 2)
    assert alone.task_of("w") == PS[1]
    with pytest.raises(ConfigError, match="no variable 'v'; its variables are w"):
        alone.task_of("v")
    with pytest.raises(ConfigError, match="in the containers '', 'snapshot'; ask"):
        planned(lambda: mine[...] + other[...]).task_of("w")
