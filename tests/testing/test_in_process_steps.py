"""Whole training steps through services, executors and the in-process transport."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from jgraph.graph.device import device
from jgraph.graph.ir import TaskName
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.plan.plan import Plan, plan
from jgraph.plan.program.types import to_plain
from jgraph.rpc.frames import kind_of
from jgraph.rpc.transport import Frame
from jgraph.server.task_service import TaskService
from tests.support.in_process import steps
from tests.support.plans import Values, reference
from tests.support.programs import EXAMPLES
from tests.support.run_async import run_async
from tests.support.scattered import scattered, traced

BY_DAY = {"embedding_adam", "cnn_adam"}
"""Of the models; tests/plan/test_plan.py has each of them, without transports."""


async def one_step(
    planned: Plan, tasks: Sequence[TaskName], values: Values, args: Any
) -> tuple[list[Any], Values]:
    """Returns (fetches, new values of the variables) of one step of a new cluster."""
    return (await steps(planned, tasks, values, args, 1))[0]


@functools.cache
def wanted(name: str) -> tuple[list[Any], Values]:
    example, graph, values = traced(name)
    return reference(graph, values, example.args, {})


def assert_close(got: Any, wanted: Any) -> None:
    """Within 1e-6 of each array's largest; what is zero but for rounding counts as 0.1.

    Servers compile each segment in their own way, with all of XLA's fusions.
    """
    structures: list[Any] = [jax.tree.structure(got), jax.tree.structure(wanted)]
    assert structures[0] == structures[1]
    paths = jax.tree_util.tree_flatten_with_path(wanted)[0]
    for (path, want), have in zip(paths, jax.tree.leaves(got), strict=True):
        a, b = np.asarray(to_plain(have)), np.asarray(to_plain(want))
        limit = 1e-6 * float(np.max(np.abs(b), initial=0.1))
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=0, atol=limit, err_msg=name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly)
        for name in EXAMPLES
    ],
)
# A seed has nothing to shrink to, and each try compiles anew.
@settings(
    max_examples=1,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(seed=st.integers(0, 2**16))
def test_a_step_over_the_transport_computes_what_one_jit_computes(
    name: str, seed: int
) -> None:
    example, graph, values = traced(name)
    stamped, tasks, homes = scattered(graph, seed)
    planned = plan(stamped, tasks=tasks, driver=tasks[0], variable_tasks=homes)
    got = run_async(one_step(planned, tasks, values, example.args), timeout_s=100)
    assert_close(got, wanted(name))


@pytest.mark.parametrize(
    ("size", "kinds"), [(4, ["values"]), (1 << 18, ["start_step", "values"])]
)
def test_order_to_begin_a_step_travels_with_small_values(
    size: int, kinds: list[str]
) -> None:
    driver, ps = TaskName("/job:worker/task:0"), TaskName("/job:ps/task:0")
    total = Variable("total", jnp.zeros(()), device=ps)

    def add(x: Any) -> None:
        with device(ps):
            total[...] = total[...] + x.sum()

    x = np.ones(size, np.float32)
    graph, _ = trace(add, x, variables=[total])
    planned = plan(graph, tasks=[driver, ps], driver=driver)
    got: list[str] = []

    def watch(service: TaskService) -> None:
        take = service.frame_received

        def received(src: TaskName, received: Frame) -> None:
            got.append(kind_of(received))
            take(src, received)

        service.frame_received = received  # type: ignore[method-assign]

    run_async(steps(planned, [driver, ps], {"total": 0.0}, x, 2, watch=watch))
    assert got == kinds * 2
