"""What crosses between tasks, what is repeated instead, and what is refused."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgraph as jg
from jgraph.errors import (
    CallbackError,
    NotExportableError,
    UnknownDeviceError,
)
from jgraph.plan.plan import plan
from jgraph.plan.program.nodes import ConstNode, SegmentNode, SendNode
from tests.support.plans import (
    DRIVER,
    PS,
    TASKS,
    WORKERS,
    check_plan,
    graph_of,
    nodes_of,
    variable,
    vector,
)

# ---------------------------------------------------------------- what crosses


def test_a_value_used_by_many_crosses_once() -> None:
    w = variable("w", vector())

    def step(x: Any) -> Any:
        with jg.device(WORKERS[1]):
            a = jnp.sin(w[...] + x)
            b = jnp.cos(w[...] * x)
        return a.sum(), b, w[...]

    planned = check_plan(step, vector(), variables=[w])
    assert len([e for e in planned.edges if e.src == PS[0]]) == 2
    assert {e.dst for e in planned.edges if e.src == PS[0]} == {DRIVER, WORKERS[1]}


def test_what_literals_give_is_made_where_it_is_used() -> None:
    def step(x: Any) -> Any:
        with jg.device(WORKERS[1]):
            mask = jnp.tril(jnp.ones((6, 6)))
            y = mask @ x
        with jg.device(WORKERS[2]):
            return mask.T @ y, mask

    planned = check_plan(step, np.ones((6, 6), np.float32))
    assert [e.nbytes for e in planned.edges] == [144, 144, 144]


def test_large_constants_are_shipped_once_to_each_user() -> None:
    table = jnp.arange(1000, dtype=jnp.float32)

    def step(x: Any) -> Any:
        with jg.device(WORKERS[1]):
            y = (table * x).sum()
        with jg.device(WORKERS[2]):
            return (table + y).sum()

    planned = check_plan(step, np.float32(2))
    for task in WORKERS[1:3]:
        (const,) = nodes_of(planned, task, ConstNode)
        assert const.value.nbytes == 4000
    assert planned.nbytes_per_step == 12
    assert sum(len(s.exported) for s in planned.program.segments) < 8000


def test_small_constants_are_part_of_the_code() -> None:
    scale = np.array([1.0, 2.0, 3.0], np.float32)
    planned = check_plan(lambda x: jnp.sin(x) * jnp.asarray(scale), vector(3))
    assert not nodes_of(planned, DRIVER, ConstNode)


def test_dead_code_is_not_shipped() -> None:
    w = variable("w", vector())

    def step(x: Any) -> Any:
        with jg.device(WORKERS[1]):
            jnp.sin(w[...]).sum()
        return x * 2

    planned = check_plan(step, vector(), variables=[w])
    assert [p.task for p in planned.program.partitions] == [DRIVER]
    assert planned.placement.count(None) >= 3


def test_a_step_counter_is_read_where_it_is_written() -> None:
    count = variable("count", np.int32(3))
    w = variable("w", vector(), PS[1])

    def step(x: Any) -> Any:
        rate = 1.0 / (count[...] + 1)
        count[...] = count[...] + 1
        w[...] = w[...] - rate * x
        return rate

    planned = check_plan(step, vector(), variables=[count, w])
    (segment,) = nodes_of(planned, PS[0], SegmentNode)
    assert segment.updates
    assert not segment.inputs


def test_keys_cross_as_plain_words() -> None:
    rng = jg.Variable("rng", jax.random.key(3), device=PS[0])

    def step(key: Any) -> Any:
        mine, new = jax.random.split(rng[...])
        rng[...] = new
        with jg.device(WORKERS[1]):
            fed = jax.random.split(key, 40)
            noise = jax.random.normal(mine, (5,)) + jax.random.uniform(fed[3], (5,))
        with jg.device(WORKERS[2]):
            return noise * jax.random.bits(fed[4], (5,)), fed, new

    planned = check_plan(step, jax.random.key(0), variables=[rng])
    assert {v.dtype for e in planned.edges for v in e.values} == {"uint32", "float32"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int4", "bool", "int8"])
def test_every_dtype_crosses(dtype: str) -> None:
    w = jg.Variable("w", jnp.ones((3,), dtype), device=PS[0])

    def step(x: Any) -> Any:
        with jg.device(WORKERS[1]):
            y = jnp.where(x, w[...], w[...]).astype(dtype)
            y = jnp.stack([y, y])
        with jg.device(WORKERS[2]):
            return y[0], y.astype(jnp.float32).sum()

    check_plan(step, np.array([True, False, True]), variables=[w])


def test_gradients_of_integers_hold_nothing_and_never_cross() -> None:
    def step(n: Any, x: Any) -> Any:
        with jg.device(WORKERS[1]):
            return jax.grad(lambda n, x: (x * n).sum(), argnums=(0, 1), allow_int=True)(
                n, x
            )

    graph = graph_of(step, np.int32(3), vector())
    planned = plan(graph, tasks=TASKS, driver=DRIVER)
    assert str(planned.program.fetches[0][1]) == "bool[]"
    assert len(planned.edges) <= 2


def test_segments_are_made_for_the_platforms_of_their_task() -> None:
    def step(x: Any) -> Any:
        with jg.device(WORKERS[1]):
            y = jnp.sin(x)
        with jg.device(WORKERS[2]):
            return jnp.cos(y)

    planned = check_plan(
        step, vector(), platforms={WORKERS[1]: ("cpu", "cuda"), WORKERS[2]: ("cpu",)}
    )
    assert [s.platforms for s in planned.program.segments] == [
        ("cpu", "cuda"),
        ("cpu",),
    ]


# ---------------------------------------------------------------- refusals


def test_an_unknown_task_is_named_with_the_nearest_known() -> None:
    def step(x: Any) -> Any:
        with jg.device("/job:wroker/task:1"):
            return jnp.sin(x)

    with pytest.raises(UnknownDeviceError, match="mean '/job:worker/task:1'") as caught:
        plan(graph_of(step, vector()), tasks=TASKS, driver=DRIVER)
    assert "test_crossing.py" in str(caught.value)


def test_a_variable_on_an_unknown_task_is_named() -> None:
    w = variable("w", vector(), "/job:ps/task:7")
    with pytest.raises(
        UnknownDeviceError, match="variable 'w': '/job:ps/task:7' is not"
    ):
        plan(graph_of(lambda: w[...]), tasks=TASKS, driver=DRIVER)


def test_a_callback_is_named_with_its_line() -> None:
    def step(x: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.sin, shape, x + 1)

    with pytest.raises(CallbackError, match=r"'pure_callback' calls back into Python"):
        plan(graph_of(step, vector()), tasks=TASKS, driver=DRIVER)


def nowhere(x: Any) -> Any:
    return jax.ffi.ffi_call("nowhere", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


NOT_EXPORTABLE: dict[str, Callable[[Any], Any]] = {
    "ffi_call": lambda x: jnp.cos(nowhere(x)),
    "ffi_call of a product": lambda x: nowhere(x * 2.0) + 1.0,
    "ffi_call of all kinds": lambda x: nowhere(
        jnp.where(x > 0.5, jnp.maximum(x, 0.0), jnp.clip(x, -1.0, 3)) ** 2
    ),
    "cond of it": lambda x: jax.lax.cond(x.sum() > 1.0, nowhere, jnp.sin, x * 3.0),
    "scan of it": lambda x: jax.lax.scan(lambda c, y: (nowhere(c) + y, y), x, x[:2])[0],
    "while of it": lambda x: jax.lax.while_loop(
        lambda v: v.max() < 9.0,
        lambda v: nowhere(v * 2.0),
        jax.random.normal(jax.random.key(0), x.shape),
    ),
}


@pytest.mark.parametrize("form", NOT_EXPORTABLE)
def test_an_operation_without_portable_code_is_named_with_its_line(form: str) -> None:
    name, line = form.split(maxsplit=1)[0], NOT_EXPORTABLE[form].__code__.co_firstlineno
    with pytest.raises(NotExportableError) as raised:
        plan(graph_of(NOT_EXPORTABLE[form], vector()), tasks=TASKS, driver=DRIVER)
    assert raised.value.details["primitive"] == name
    assert str(raised.value).startswith(f"JG-206 '{name}' at {__file__}:")
    at = str(raised.value.details["line"]).split(":")[1]
    here = nowhere.__code__.co_firstlineno + 1
    assert int(at) == here or line <= int(at) <= line + 4


def test_a_value_only_one_later_segment_uses_is_donated() -> None:
    def step(x: Any) -> Any:
        with jg.device(WORKERS[1]):
            kept = jnp.sin(x)
            sent = jnp.cos(kept)
        with jg.device(WORKERS[2]):
            back = jnp.tanh(sent)
        with jg.device(WORKERS[1]):
            return kept + back

    planned = check_plan(step, np.ones((40,), np.float32))
    first, second = nodes_of(planned, WORKERS[1], SegmentNode)
    assert first.donate == ()
    (position,) = second.donate
    sent = {v for n in nodes_of(planned, WORKERS[1], SendNode) for v in n.values}
    assert second.inputs[position] not in sent
