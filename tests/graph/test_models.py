"""Whole training steps of Flax models and optax, traced over variables."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx

from jgraph.graph.device import device
from jgraph.graph.graph import Graph
from jgraph.graph.variable import Variable

Same: TypeAlias = Callable[..., Graph]
WORKER = "/job:worker/task:0"
X = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)
Y = jnp.arange(4) % 3
# A bias before BatchNorm has gradient zero but for rounding, which Adam would turn
# into full steps.
EPS = 1e-2


class Mlp(linen.Module):
    """Two stages on two tasks, with state and randomness."""

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = True) -> Any:
        with device("/job:worker/task:0"):
            x = linen.Dense(16)(x)
            x = linen.BatchNorm(use_running_average=not train)(x)
            x = linen.Dropout(0.5, deterministic=not train)(linen.relu(x))
        with device("/job:worker/task:1"):
            return linen.Dense(3)(x)


class Attention(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> Any:
        ids = (x * 10).astype(jnp.int32) % 7
        h = linen.Embed(7, 8)(ids)
        h = h + linen.MultiHeadDotProductAttention(2)(linen.LayerNorm()(h))
        return linen.Dense(3)(h.mean(axis=1))


class Lstm(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> Any:
        hidden = linen.RNN(linen.OptimizedLSTMCell(5))(x[..., None])
        return linen.Dense(3)(jnp.asarray(hidden)[:, -1])


class Layer(linen.Module):
    @linen.compact
    def __call__(self, h: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(linen.Dense(8)(h)), None


class RematScan(linen.Module):
    """Layers under nn.remat and nn.scan, on one task; the head on another."""

    @linen.compact
    def __call__(self, x: jax.Array) -> Any:
        stack = linen.scan(
            linen.remat(Layer),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        with device("/job:worker/task:0"):
            x, _ = stack()(x, None)
        with device("/job:worker/task:1"):
            return linen.Dense(3)(x)


def variables_of(tree: Any, prefix: str) -> tuple[Any, dict[Variable, Any]]:
    """Returns the tree with a Variable per leaf, and their values."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    made = {
        Variable(prefix + jax.tree_util.keystr(path), x, device="/job:ps/task:0"): x
        for path, x in leaves
    }
    return jax.tree.unflatten(treedef, list(made)), made


def read(tree: Any) -> Any:
    return jax.tree.map(lambda v: v[...], tree)


def write(tree: Any, values: Any) -> None:
    for variable, x in zip(jax.tree.leaves(tree), jax.tree.leaves(values), strict=True):
        variable[...] = x


def cross_entropy(logits: Any, labels: jax.Array) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [pytest.param(Attention(), marks=pytest.mark.nightly), Lstm(), RematScan()],
    ids=repr,
)
def test_linen_model_and_its_gradient(model: linen.Module, same: Same) -> None:
    params = model.init(jax.random.key(0), X)
    cells, values = variables_of(params, "p")

    def step(x: jax.Array, y: jax.Array) -> Any:
        loss = lambda p: cross_entropy(model.apply(p, x), y)
        value, grads = jax.value_and_grad(loss)(read(cells))
        write(cells, jax.tree.map(lambda p, g: p - 0.1 * g, read(cells), grads))
        return value

    graph = same(step, values, X, Y)
    assert len(graph.variables) == len(values)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, eps=EPS)),
        optax.adafactor(1e-2),
        optax.MultiSteps(optax.sgd(0.1), 2),
    ],
    ids=["clip adamw", "adafactor", "multisteps"],
)
def test_linen_step_with_batch_norm_dropout_and_optimizer(tx: Any, same: Same) -> None:
    model = Mlp()
    state = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
    params, values = variables_of(state["params"], "params")
    stats, stats_values = variables_of(state["batch_stats"], "stats")
    moments, moments_values = variables_of(tx.init(state["params"]), "moments")
    rng = Variable("rng", jax.random.key(2))

    def step(x: jax.Array, y: jax.Array) -> Any:
        key, rng[...] = jax.random.split(rng[...])

        def loss(p: Any) -> Any:
            logits, updated = model.apply(
                {"params": p, "batch_stats": read(stats)},
                x,
                rngs={"dropout": key},
                mutable=["batch_stats"],
            )
            return cross_entropy(logits, y), updated

        old = read(params)
        (value, updated), grads = jax.value_and_grad(loss, has_aux=True)(old)
        updates, new_moments = tx.update(grads, read(moments), old)
        write(params, optax.apply_updates(old, updates))
        write(moments, new_moments)
        write(stats, updated["batch_stats"])
        return {"loss": value}

    key = {rng: jax.random.key(2)}
    graph = same(step, values | stats_values | moments_values | key, X, Y)
    placed = {str(s) for s in graph.stamps}
    assert {"/job:worker/task:0", "/job:worker/task:1"} <= placed


@pytest.mark.slow
def test_nnx_step_with_batch_norm_dropout_and_optimizer(same: Same) -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(8, 16, rngs=rngs)
            self.norm = nnx.BatchNorm(16, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.last = nnx.Linear(16, 3, rngs=rngs)

        def __call__(self, x: jax.Array) -> Any:
            with device(WORKER):
                x = self.drop(nnx.relu(self.norm(self.first(x))))
                return self.last(x)

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3, eps=EPS), wrt=nnx.Param)
    graphdef, state = nnx.split((model, optimizer))
    cells, values = variables_of(nnx.to_pure_dict(state), "s")

    def step(x: jax.Array, y: jax.Array) -> Any:
        now = jax.tree.map(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(now, read(cells))
        net, opt = nnx.merge(graphdef, now)
        loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(x), y))(net)
        opt.update(net, grads)
        write(cells, nnx.to_pure_dict(nnx.state((net, opt))))
        return loss

    graph = same(step, values, X, Y)
    dots = [
        str(stamp)
        for equation, stamp in zip(graph.equations, graph.stamps, strict=True)
        if equation.primitive.name == "dot_general"
    ]
    # Two forward, three backward: the input needs no gradient.
    assert dots == [WORKER] * 5


def test_embedding_and_its_gradient_carry_the_scope_of_the_lookup(same: Same) -> None:
    table = Variable("table", jnp.ones((10, 4)), device="/job:ps/task:0")

    def step(ids: jax.Array) -> Any:
        def loss(t: jax.Array) -> Any:
            with device(WORKER):
                return (jnp.take(t, ids, axis=0) ** 2).sum()

        return jax.grad(loss)(table[...])

    graph = same(step, {table: jnp.ones((10, 4))}, jnp.array([1, 1, 3]))
    stamps = {
        e.primitive.name: str(s)
        for e, s in zip(graph.equations, graph.stamps, strict=True)
    }
    assert stamps["gather"] == stamps["scatter-add"] == WORKER


@pytest.mark.parametrize(
    "x",
    [
        jnp.arange(4, dtype=jnp.int8),
        jnp.array([True, False]),
        jnp.ones(3, jnp.bfloat16),
        jnp.ones((2, 0, 3)),
        jnp.arange(3, dtype=jnp.uint32),
        jnp.ones(2, jnp.complex64),
        jnp.ones(2, jnp.float8_e4m3fn),
        jax.random.key(3),
        jax.random.key(3, impl="rbg"),
        jax.random.split(jax.random.key(3), 4),
    ],
    ids=lambda x: str(jax.typeof(x)),
)
def test_variable_and_feed_of_every_kind_of_value(x: jax.Array, same: Same) -> None:
    w = Variable("w", x)

    def step(y: jax.Array) -> Any:
        before = w[...]
        w[...] = y
        return before, w[...], y

    same(step, {w: x}, x)
