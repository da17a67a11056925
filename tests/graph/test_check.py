"""Checking: each rule, broken once; the error shows where."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from jgraph import _compat
from jgraph.errors import (
    CallbackError,
    GraphError,
    PlacementError,
    UnknownDeviceError,
)
from jgraph.graph.check import check
from jgraph.graph.device import device
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable

X = jnp.arange(3.0)
PS0, PS1 = "/job:ps/task:0", "/job:ps/task:1"
TASKS = [TaskName(PS0), TaskName(PS1), TaskName("/job:worker/task:0")]


def example() -> Graph:
    w = Variable("w", X, device=PS0)

    def step(x: jax.Array) -> Any:
        with device("/job:worker/task:0"):
            a = x + w[...]
            b = jnp.sin(a)
            c = jnp.cos(b)
        w[...] = c
        return c.sum()

    return trace(step, X)[0]


def with_equations(graph: Graph, equations: list[Any]) -> Graph:
    jaxpr = _compat.build_jaxpr(
        invars=graph.jaxpr.invars, outvars=graph.jaxpr.outvars, equations=equations
    )
    return replace(graph, jaxpr=jaxpr)


def test_good_graph_passes() -> None:
    check(example())
    check(example(), TASKS)


def test_error_shows_the_equation_its_neighbours_and_the_users_line() -> None:
    graph = example()
    e = list(graph.equations)
    with pytest.raises(GraphError) as caught:
        check(with_equations(graph, [e[0], e[2], e[1], *e[3:]]))
    text = str(caught.value)
    assert "is used before it is made, at " in text
    assert "test_check.py:" in text
    shown = [line for line in text.splitlines() if "float32[3]" in line]
    assert len(shown) == 5  # the second of six: one before, three after
    assert [line.startswith("  ->") for line in shown] == [0, 1, 0, 0, 0]
    assert "sin" in shown[1]


def test_value_made_twice_is_refused() -> None:
    graph = example()
    e = list(graph.equations)
    twice = e[2].replace(outvars=e[1].outvars)
    with pytest.raises(GraphError, match="is made twice"):
        check(with_equations(graph, [*e[:2], twice, *e[3:]]))


def test_fetch_that_is_never_made_is_refused() -> None:
    graph = example()
    e = list(graph.equations)
    cut = replace(with_equations(graph, e[:-1]), stamps=graph.stamps[:-1])
    with pytest.raises(GraphError, match="fetch '' of graph 'step' is never made"):
        check(cut)


def test_result_of_another_type_than_the_operation_gives_is_refused() -> None:
    graph = example()
    *e, total = graph.equations
    vector = _compat.fresh_var(e[1].outvars[0])
    jaxpr = _compat.build_jaxpr(
        invars=graph.jaxpr.invars,
        outvars=[vector],
        equations=[*e, total.replace(outvars=[vector])],
    )
    with pytest.raises(GraphError, match=r"(?s)types do not match.*-> .*reduce_sum"):
        check(replace(graph, jaxpr=jaxpr))


@pytest.mark.parametrize(
    "change",
    [
        lambda g: {"feeds": ()},
        lambda g: {"stamps": g.stamps[1:]},
        lambda g: {"consts": (X,)},
        lambda g: {"fetches": ("a", "b")},
    ],
)
def test_lists_of_other_lengths_than_the_jaxpr_are_refused(
    change: Callable[[Graph], dict[str, Any]],
) -> None:
    graph = example()
    with pytest.raises(GraphError, match="and its jaxpr has"):
        check(replace(graph, **change(graph)))


@pytest.mark.parametrize(("shape", "dtype"), [((4,), "float32"), ((3,), "int32")])
def test_variable_of_another_type_than_its_ref_is_refused(
    shape: tuple[int, ...], dtype: str
) -> None:
    graph = example()
    spec = replace(graph.variables[0], shape=shape, dtype=np.dtype(dtype))
    with pytest.raises(GraphError, match="variable 'w' of graph 'step' is"):
        check(replace(graph, variables=(spec,)))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: jax.debug.print("{}", x), "debug"),
        (lambda x: jax.debug.callback(print, x), "debug_callback"),
        (lambda x: jax.pure_callback(np.sin, X, x), "pure_callback"),
        (lambda x: jax.experimental.io_callback(np.sin, X, x), "io_callback"),
    ],
)
def test_callback_into_python_is_refused_with_its_line(
    call: Callable[[Any], Any], name: str, nested: bool
) -> None:
    def step(x: jax.Array) -> Any:
        if nested:
            return jax.lax.fori_loop(0, 2, lambda i, y: (call(y), y)[1], x)
        call(x)
        return x

    with pytest.raises(CallbackError, match=f"(?s){name}.*test_check.py:.*remove it"):
        check(trace(step, X)[0])


def test_check_that_nothing_carries_out_is_refused_with_the_way_out() -> None:
    def positive(x: jax.Array) -> jax.Array:
        checkify.check(x[0] > 0, "x begins with {}", x[0])
        return x

    with pytest.raises(CallbackError, match=r"test_check.py:.*checkify\(fn\)\(x\)"):
        check(trace(positive, X)[0])
    check(trace(checkify.checkify(positive), X)[0])


@pytest.mark.parametrize("where", ["/job:worker/task:1", "/job:chief", "/task:9"])
def test_device_that_the_cluster_does_not_have_is_refused(where: str) -> None:
    def step(x: jax.Array) -> Any:
        with device(where):
            return jnp.sin(x)

    graph, _ = trace(step, X)
    check(graph)
    with pytest.raises(UnknownDeviceError, match=f"'{where}' is not in .*{PS1}"):
        check(graph, TASKS)


def test_what_needs_more_tasks_than_there_are_says_how_many() -> None:
    def step(x: jax.Array) -> Any:
        with device("/job:worker/task:2"):
            return jnp.sin(x)

    message = r"a cluster with 3 tasks of that job, or use the 1 that .* jg\.Pipeline"
    with pytest.raises(UnknownDeviceError, match=message):
        check(trace(step, X)[0], TASKS)


def test_variable_on_a_task_that_the_cluster_does_not_have_is_refused() -> None:
    w = Variable("w", X, device="/job:ps/task:7")
    with pytest.raises(UnknownDeviceError, match="variable 'w': '/job:ps/task:7'"):
        check(trace(lambda: w[...])[0], TASKS)


def test_partial_device_that_some_task_fits_is_accepted() -> None:
    w = Variable("w", X, device="/job:ps/cpu:0")

    def step() -> Any:
        with device("/task:1"):
            return w[...] + 1

    check(trace(step)[0], TASKS)


def loop_that_writes(*variables: Variable) -> Callable[[jax.Array], Any]:
    def step(x: jax.Array) -> Any:
        def body(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            for v in variables:
                v[...] = c
            return c + 1, None

        return jax.lax.scan(body, x, length=2)

    return step


def test_loop_that_writes_variables_of_two_tasks_is_refused() -> None:
    w, v = Variable("w", X, device=PS0), Variable("v", X, device=PS1)
    graph, _ = trace(loop_that_writes(w, v), X)
    with pytest.raises(PlacementError, match=f"w: {PS0}, v: {PS1}|v: .*, w: "):
        check(graph)
    check(trace(loop_that_writes(w, Variable("u", X, device=PS0)), X)[0])


def test_loop_that_writes_away_from_its_variable_is_refused() -> None:
    w = Variable("w", X, device=PS0)

    def step(x: jax.Array) -> Any:
        with device("/job:worker/task:0"):
            return loop_that_writes(w)(x)

    with pytest.raises(PlacementError, match="the scope: /job:worker/task:0"):
        check(trace(step, X)[0])


def test_private_ref_across_operations_is_refused_with_the_way_out() -> None:
    def step(x: jax.Array) -> Any:
        ref = jax.new_ref(x)
        ref[0] = 1.0
        return ref[...]

    with pytest.raises(GraphError, match=r"under jax\.jit"):
        check(trace(step, X)[0])
    check(trace(jax.jit(step), X)[0])
