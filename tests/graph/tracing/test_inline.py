"""Inlining: stamps through each of JAX's mechanisms, on one flat jaxpr."""

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import pytest

from jgraph import _compat
from jgraph.errors import PlacementError
from jgraph.graph.device import device
from jgraph.graph.graph import Graph
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable

Same: TypeAlias = Callable[..., Graph]
Layer: TypeAlias = Callable[[jax.Array, jax.Array], Any]

W0, W1 = "/job:worker/task:0", "/job:worker/task:1"
A = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
B = jnp.linspace(-0.5, 0.5, 20).reshape(4, 5)
X = jnp.ones((2, 3))


def stamps_of(graph: Graph, primitive: str) -> list[str]:
    return [
        str(stamp)
        for equation, stamp in zip(graph.equations, graph.stamps, strict=True)
        if equation.primitive.name == primitive
    ]


def primitives(graph: Graph) -> Counter[str]:
    return Counter(equation.primitive.name for equation in graph.equations)


@jax.custom_vjp
def _tanh_by_vjp(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


_tanh_by_vjp.defvjp(
    lambda x: (jnp.tanh(x), x), lambda x, g: (g * (1 - jnp.tanh(x) ** 2),)
)


@jax.custom_jvp
def _tanh_by_jvp(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


@_tanh_by_jvp.defjvp
def _tanh_jvp(p: Any, t: Any) -> Any:
    return jnp.tanh(p[0]), t[0] * (1 - jnp.tanh(p[0]) ** 2)


def _in_scan(x: jax.Array, w: jax.Array) -> Any:
    h: Any = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w @ w.T), None), x, length=2)
    return h[0] @ w


def _in_cond(x: jax.Array, w: jax.Array) -> Any:
    return jax.lax.cond(x.sum() > 0, lambda: jnp.tanh(x @ w), lambda: x @ w)


def _policy_checkpoint() -> Layer:
    policy = jax.checkpoint_policies.dots_saveable
    return jax.checkpoint(lambda x, w: jnp.tanh(x @ w), policy=policy)


LAYERS: dict[str, Layer] = {
    "plain": lambda x, w: jnp.tanh(x @ w),
    "jit": jax.jit(lambda x, w: jnp.tanh(x @ w)),
    "jit of jit": jax.jit(jax.jit(lambda x, w: jnp.tanh(x @ w))),
    "jit inline": jax.jit(lambda x, w: jnp.tanh(x @ w), inline=True),
    "vmap": jax.vmap(lambda x, w: jnp.tanh(x @ w), in_axes=(0, None)),
    "checkpoint": jax.checkpoint(lambda x, w: jnp.tanh(x @ w)),
    "checkpoint policy": _policy_checkpoint(),
    "custom_vjp": lambda x, w: _tanh_by_vjp(x @ w),
    "custom_jvp": lambda x, w: _tanh_by_jvp(x @ w),
    "scan": _in_scan,
    "cond": _in_cond,
    "map": lambda x, w: jax.lax.map(lambda row: jnp.tanh(row @ w), x),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_heavy_operations_keep_the_device_of_their_layer(
    name: str, grad: bool, same: Same
) -> None:
    """Two layers on two tasks: products of 4 belong to task 0, of 5 to task 1."""

    def loss(a: jax.Array, b: jax.Array) -> Any:
        with device(W0):
            h = LAYERS[name](X, a)
        with device(W1):
            return (LAYERS[name](h, b) ** 2).sum()

    graph = same(jax.value_and_grad(loss, (0, 1)) if grad else loss, {}, A, B)
    seen = set()
    for equation, stamp in zip(graph.equations, graph.stamps, strict=True):
        is_heavy = equation.primitive.name in {"dot_general", "scan", "cond", "remat2"}
        if is_heavy:
            shapes = {_compat.array_type(v).shape for v in equation.invars}
            second = any(5 in shape for shape in shapes)
            assert str(stamp) == (W1 if second else W0), equation
            seen.add(str(stamp))
    assert seen == {W0, W1}
    calls = {"jit", "pjit", "custom_jvp_call", "custom_vjp_call"}
    assert not primitives(graph).keys() & calls


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.jit(jax.grad(f)),
        lambda f: jax.vmap(jax.grad(f), in_axes=0),
        lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum()),
        jax.jacfwd,
        jax.hessian,
        lambda f: lambda x: jax.jvp(f, (x,), (x,)),
        lambda f: lambda x: jax.linearize(f, x)[1](x),
        lambda f: lambda x: jax.vjp(f, x)[1](f(x)),
    ],
)
def test_every_transformation_of_jax_keeps_the_stamp(
    transform: Callable[..., Any], same: Same
) -> None:
    def f(x: jax.Array) -> Any:
        with device(W0):
            y = jnp.sin(x)
        with device(W1):
            return jnp.exp(y).sum()

    graph = same(transform(f), {}, X)
    assert set(stamps_of(graph, "sin") + stamps_of(graph, "cos")) == {W0}
    assert set(stamps_of(graph, "exp")) == {W1}


def test_one_cached_trace_serves_under_several_devices(same: Same) -> None:
    traces = []

    @jax.jit
    def layer(x: jax.Array) -> jax.Array:
        traces.append(x)
        with device("/task:3"):
            return jnp.sin(x)

    def step(x: jax.Array) -> Any:
        with device("/job:ps"):
            x = layer(x)
        with device("/job:worker"):
            return layer(x)

    graph, _ = trace(step, X)
    assert len(traces) == 1
    assert stamps_of(graph, "sin") == ["/job:ps/task:3", "/job:worker/task:3"]
    same(step, {}, X)


def test_jitted_function_called_twice_gives_values_of_its_own(same: Same) -> None:
    @jax.jit
    def f(x: jax.Array) -> tuple[jax.Array, jax.Array, float]:
        return x, jnp.sin(x), 2.0

    graph = same(lambda x: (f(x), f(f(x)[1])), {}, X)
    made = [v for e in graph.equations for v in e.outvars]
    assert len(set(made)) == len(made)


def test_variable_is_read_and_written_through_calls(same: Same) -> None:
    w = Variable("w", X)

    @jax.jit
    def update(g: jax.Array) -> None:
        w[...] = w[...] - g

    def step(x: jax.Array) -> Any:
        update(jax.grad(lambda y: (w[...] * y).sum())(x))
        jax.jit(lambda: update(x))()
        return w[...]

    graph = same(step, {w: X}, X)
    assert primitives(graph)["swap"] == 2
    ref = graph.jaxpr.invars[0]
    state = [e for e in graph.equations if e.primitive.name in {"get", "swap"}]
    assert all(e.invars[0] is ref for e in state)
    assert all(getattr(f, "input", ref) is ref for e in state for f in e.effects)


def test_while_loop_is_placed_by_its_body(same: Same) -> None:
    def step(x: jax.Array) -> Any:
        def body(y: jax.Array) -> jax.Array:
            with device(W1):
                return y * 2

        return jax.lax.while_loop(lambda y: y.sum() < 100, body, x)

    assert stamps_of(same(step, {}, X), "while") == [W1]


def test_loop_inside_a_loop_is_placed_by_the_innermost_body(same: Same) -> None:
    def step(x: jax.Array) -> Any:
        def body(y: jax.Array, _: None) -> tuple[jax.Array, None]:
            with device("/task:1"):
                return jax.lax.fori_loop(0, 2, lambda i, z: jnp.sin(z), y), None

        with device("/job:worker"):
            return jax.lax.scan(body, x, length=2)[0]

    assert stamps_of(same(step, {}, X), "scan") == [W1]


def test_devices_of_one_task_in_a_loop_leave_its_device_open() -> None:
    def step(x: jax.Array) -> Any:
        def body(y: jax.Array, _: None) -> tuple[jax.Array, None]:
            with device("/cpu:0"):
                y = jnp.sin(y)
            with device("/cpu:1"):
                return jnp.cos(y), None

        with device(W1):
            return jax.lax.scan(body, x, length=2)[0]

    assert stamps_of(trace(step, X)[0], "scan") == [W1]


@pytest.mark.parametrize(
    ("loop", "advice"),
    [
        (
            lambda f, x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2000),
            "make it shorter",
        ),
        (lambda f, x: jax.lax.while_loop(lambda c: c.sum() < 9, f, x), "fori_loop"),
        (lambda f, x: jax.lax.cond(x.sum() > 0, f, jnp.cos, x), "jnp.where"),
    ],
)
def test_loop_over_two_tasks_is_refused_with_line_and_way_out(
    loop: Callable[..., Any], advice: str
) -> None:
    def body(y: jax.Array) -> jax.Array:
        with device(W0):
            y = jnp.sin(y)
        with device(W1):
            return jnp.cos(y)

    with pytest.raises(PlacementError) as caught:
        trace(lambda x: loop(body, x), X)
    for part in (W0, W1, advice, "test_inline.py:"):
        assert part in str(caught.value)


def test_checkpoint_on_one_task_stays_whole(same: Same) -> None:
    f = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))

    def loss(x: jax.Array) -> Any:
        with device(W0):
            return f(x).sum()

    graph = same(jax.grad(loss), {}, X)
    assert stamps_of(graph, "remat2") == [W0]
    assert "optimization_barrier" not in primitives(graph)


def test_checkpoint_over_two_tasks_is_inlined_with_a_barrier_on_each(
    same: Same,
) -> None:
    @jax.checkpoint
    def f(x: jax.Array) -> jax.Array:
        with device(W0):
            x = jnp.sin(x * x)
        with device(W1):
            return jnp.exp(x).sum()

    graph = same(jax.grad(f), {}, X)
    assert "remat2" not in primitives(graph)
    barriers = stamps_of(graph, "optimization_barrier")
    assert barriers[0] == W0
    assert len(barriers) == len(set(barriers))
    recomputed = stamps_of(graph, "sin")
    assert recomputed == [W0, W0]


def test_checkpoint_that_reads_a_variable_lets_the_read_live_elsewhere(
    same: Same,
) -> None:
    w = Variable("w", X, device="/job:ps/task:0")

    def loss(x: jax.Array) -> Any:
        with device(W0):
            return jax.checkpoint(lambda y: jnp.sin(y * w[...]))(x).sum()

    graph = same(jax.grad(loss), {w: X}, X)
    assert "remat2" not in primitives(graph)
    assert stamps_of(graph, "optimization_barrier") == [W0]


def test_barrier_leaves_keys_and_literals_alone(same: Same) -> None:
    @jax.checkpoint
    def f(x: jax.Array, key: jax.Array) -> jax.Array:
        with device(W0):
            x = x * jax.random.bernoulli(key, 0.5, x.shape)
        with device(W1):
            return jnp.exp(x).sum()

    same(jax.grad(f), {}, X, jax.random.key(1))


def test_function_with_private_refs_stays_whole(same: Same) -> None:
    @jax.jit
    def total(x: jax.Array) -> Any:
        acc = jax.new_ref(jnp.zeros(()))

        def body(i: Any, _: None) -> None:
            acc[...] += x[0, i]

        jax.lax.fori_loop(0, 3, body, None)
        return acc[...]

    def step(x: jax.Array) -> Any:
        with device(W1):
            return total(x) + 1

    assert stamps_of(same(step, {}, X), "jit") == [W1]


def test_layer_without_a_scope_has_no_stamp() -> None:
    graph, _ = trace(jax.grad(lambda x: jnp.sin(x).sum()), X)
    assert not any(graph.stamps)
