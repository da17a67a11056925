"""One plan for batches of any size, against one jit for each."""

from typing import Any

import numpy as np

import jgraph as jg
from jgraph.plan.plan import Plan, plan
from tests.support.graph_interpreter import Compiled
from tests.support.plans import (
    DRIVER,
    FAST,
    TASKS,
    assert_same,
    check_program,
    initial_values,
    reference,
    simulated,
)


def batch(size: int) -> Any:
    return np.linspace(-1, 1, size * 3, dtype=np.float32).reshape(size, 3)


def planned_for_all(function: Any, *args: Any) -> tuple[Plan, list[jg.Variable]]:
    graph, variables = function.trace(*args)
    made = plan(graph, tasks=TASKS, driver=DRIVER)
    check_program(made.program)
    return made, list(variables)


def check_sizes(function: Any, variables: list[jg.Variable], *sizes: int) -> Plan:
    """Plans ``function`` once, and runs it for each size against one jit of its own."""
    made, _ = planned_for_all(function, batch(sizes[0]))
    compiled: Compiled = {}
    for size in sizes:
        values = initial_values(variables)
        alone, _ = jg.function(function.__wrapped__).trace(batch(size))
        wanted = reference(alone, values, batch(size), FAST)
        got = simulated(made, values, batch(size), FAST, compiled)
        assert_same(got, wanted, exact=False)
    return made
