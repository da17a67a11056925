"""Whatever layer Flax has trains on a cluster as it does alone.

Layers are found in the installed packages ``flax.nnx`` and ``flax.linen``. One that is
not known here makes a test fail.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.local import Local
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.models import batches_of
from tests.support.servers import connected

pytestmark = pytest.mark.nightly

STEPS, BATCH, WIDTH = 4, 8, 6
# Not Adam: it makes a step of what is left of gradients that cancel (biases of keys).
TX = optax.sgd(0.1, momentum=0.9)
random = np.random.default_rng(0)
DATA = {
    "x": random.normal(size=(32, 4, WIDTH)).astype(np.float32),
    "picture": random.normal(size=(32, 4, 4, WIDTH)).astype(np.float32),
    "frames": random.normal(size=(32, 3, 4, 4, WIDTH)).astype(np.float32),
    "ids": random.integers(0, 9, (32, 4)).astype(np.int32),
    "y": random.normal(size=32).astype(np.float32),
}
Rngs = nnx.Rngs
Makers = Mapping[str, Callable[[Any], Any]]


class Called(nnx.Module):
    """A layer that is called otherwise than with one array."""

    def __init__(self, layer: Any, how: Callable[[Any, Any], Any]) -> None:
        self.layer = layer
        self.how = how

    def __call__(self, x: Any) -> Any:
        return self.how(self.layer, x)


def of_pair(layer: Any, x: Any) -> Any:
    return layer(x, x)


def own_attention(layer: Any, x: Any) -> Any:
    return layer(x, decode=False)


NNX: Makers = {
    "BatchNorm": lambda r: nnx.BatchNorm(WIDTH, rngs=r),
    "Bidirectional": lambda r: nnx.Bidirectional(
        nnx.RNN(nnx.GRUCell(WIDTH, 5, rngs=r)),
        nnx.RNN(nnx.SimpleCell(WIDTH, 5, rngs=r)),
    ),
    "Conv": lambda r: nnx.Conv(WIDTH, 3, (2,), rngs=r),
    "ConvTranspose": lambda r: nnx.ConvTranspose(WIDTH, 3, (2,), rngs=r),
    "Dropout": lambda r: nnx.Sequential(
        nnx.Linear(WIDTH, 3, rngs=r), nnx.Dropout(0.0, rngs=r)
    ),
    "Einsum": lambda r: nnx.Einsum("btf,fo->bto", (WIDTH, 3), (3,), rngs=r),
    "Embed": lambda r: nnx.Embed(9, 3, rngs=r),
    "GRUCell": lambda r: nnx.RNN(nnx.GRUCell(WIDTH, 5, rngs=r)),
    "GroupNorm": lambda r: nnx.GroupNorm(WIDTH, 2, rngs=r),
    "InstanceNorm": lambda r: nnx.InstanceNorm(WIDTH, rngs=r),
    "LSTMCell": lambda r: nnx.RNN(nnx.LSTMCell(WIDTH, 5, rngs=r)),
    "LayerNorm": lambda r: nnx.LayerNorm(WIDTH, rngs=r),
    "Linear": lambda r: nnx.Linear(WIDTH, 3, rngs=r),
    "LinearGeneral": lambda r: nnx.LinearGeneral((4, WIDTH), 3, axis=(-2, -1), rngs=r),
    "LoRA": lambda r: nnx.LoRA(
        WIDTH, 2, 3, base_module=nnx.Linear(WIDTH, 3, rngs=r), rngs=r
    ),
    "LoRALinear": lambda r: nnx.LoRALinear(WIDTH, 3, lora_rank=2, rngs=r),
    "MultiHeadAttention": lambda r: Called(
        nnx.MultiHeadAttention(2, WIDTH, rngs=r), own_attention
    ),
    "OptimizedLSTMCell": lambda r: nnx.RNN(nnx.OptimizedLSTMCell(WIDTH, 5, rngs=r)),
    "PReLU": lambda r: nnx.PReLU(),
    "RMSNorm": lambda r: nnx.RMSNorm(WIDTH, rngs=r),
    "RNN": lambda r: nnx.RNN(nnx.SimpleCell(WIDTH, 5, rngs=r), reverse=True),
    "Sequential": lambda r: nnx.Sequential(
        nnx.Linear(WIDTH, 3, rngs=r), nnx.relu, nnx.Linear(3, 2, rngs=r)
    ),
    "SimpleCell": lambda r: nnx.RNN(nnx.SimpleCell(WIDTH, 5, rngs=r)),
    "SpectralNorm": lambda r: Called(
        nnx.SpectralNorm(nnx.Linear(WIDTH, 3, rngs=r), rngs=r),
        lambda layer, x: layer(x, update_stats=True),
    ),
    "WeightNorm": lambda r: nnx.WeightNorm(
        nnx.Linear(WIDTH, 3, rngs=r), use_scale=True, rngs=r
    ),
    "List": lambda r: Called(
        nnx.List([nnx.Linear(WIDTH, 3, rngs=r), nnx.Linear(3, 2, rngs=r)]),
        lambda layers, x: layers[1](layers[0](x)),
    ),
    "Dict": lambda r: Called(
        nnx.Dict(
            {"a": nnx.Linear(WIDTH, 3, rngs=r), "b": nnx.Linear(WIDTH, 3, rngs=r)}
        ),
        lambda layers, x: layers["a"](x) * layers["b"](x),
    ),
}
LINEN: Makers = {
    "BatchNorm": lambda _: nn.BatchNorm(use_running_average=False),
    "Bidirectional": lambda _: nn.Bidirectional(
        nn.RNN(nn.GRUCell(5)), nn.RNN(nn.SimpleCell(5))
    ),
    "Conv": lambda _: nn.Conv(3, (2,)),
    "ConvLSTMCell": lambda _: nn.RNN(nn.ConvLSTMCell(3, (2, 2))),
    "ConvLocal": lambda _: nn.ConvLocal(3, (2,)),
    "ConvTranspose": lambda _: nn.ConvTranspose(3, (2,)),
    "Dense": lambda _: nn.Dense(3),
    "DenseGeneral": lambda _: nn.DenseGeneral(3, axis=(-2, -1)),
    "Dropout": lambda _: nn.Sequential(
        [nn.Dense(3), nn.Dropout(0.0, deterministic=True)]
    ),
    "Einsum": lambda _: nn.Einsum((WIDTH, 3), "btf,fo->bto"),
    "Embed": lambda _: nn.Embed(9, 3),
    "GRUCell": lambda _: nn.RNN(nn.GRUCell(5)),
    "GroupNorm": lambda _: nn.GroupNorm(2),
    "InstanceNorm": lambda _: nn.InstanceNorm(),
    "LSTMCell": lambda _: nn.RNN(nn.LSTMCell(5)),
    "LayerNorm": lambda _: nn.LayerNorm(),
    "MGUCell": lambda _: nn.RNN(nn.MGUCell(5)),
    "MultiHeadAttention": lambda _: nn.MultiHeadAttention(2),
    "MultiHeadDotProductAttention": lambda _: nn.MultiHeadDotProductAttention(2),
    "OptimizedLSTMCell": lambda _: nn.RNN(nn.OptimizedLSTMCell(5)),
    "PReLU": lambda _: nn.PReLU(),
    "RMSNorm": lambda _: nn.RMSNorm(),
    "RNN": lambda _: nn.RNN(nn.SimpleCell(5), reverse=True),
    "SelfAttention": lambda _: nn.SelfAttention(2),
    "Sequential": lambda _: nn.Sequential([nn.Dense(3), nn.relu, nn.Dense(2)]),
    "SimpleCell": lambda _: nn.RNN(nn.SimpleCell(5)),
    "SpectralNorm": lambda _: nn.SpectralNorm(nn.Dense(3)),
    "WeightNorm": lambda _: nn.WeightNorm(nn.Dense(3)),
}
NOT_DRAWN = nnx.Not(nnx.RngState)
NO_LAYERS = {"RNNCellBase"}
"""What only others are made from."""
FIELDS = {"Embed": "ids", "ConvLSTMCell": "frames"}
FLAGS = {"SpectralNorm": {"update_stats": True}}
STRATEGIES: Mapping[str, Callable[[], Strategy]] = {
    "alone": Local,
    "asynchronous": AsyncPS,
    "synchronous, cut": lambda: SyncPS(
        variable_partitioner=jg.fixed_size_partitioner(2)
    ),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with connected(ps=2, worker=1) as cluster:
        yield cluster


def layers_of(package: Any, base: type) -> set[str]:
    classes = inspect.getmembers(package, inspect.isclass)
    return {name for name, c in classes if issubclass(c, base) and c is not base}


def test_every_layer_that_flax_has_is_among_them() -> None:
    assert layers_of(nnx, nnx.Module) - NO_LAYERS == set(NNX)
    by_eight_bits = {name for name in dir(nn) if "Fp8" in name}
    assert layers_of(nn, nn.Module) - NO_LAYERS - by_eight_bits == set(LINEN)


def error_of(outputs: Any, y: Any) -> jax.Array:
    means: Any = jnp.tanh(outputs).reshape(len(y), -1)
    weights = jnp.linspace(-1.0, 2.0, means.shape[1])
    return jnp.mean((means @ weights - y) ** 2)


def nnx_case(name: str) -> tuple[Any, Any, Any, Any]:
    """Returns (model, loss, first parameters and state, loss of these and a batch)."""
    field, model = FIELDS.get(name, "x"), NNX[name](Rngs(0))
    parts: Any = nnx.split(model, nnx.Param, ...)
    graph, params, state = parts

    def loss(model: Any, batch: Any) -> Any:
        return error_of(model(batch[field]), batch["y"])

    def plain(params: Any, state: Any, batch: Any) -> Any:
        merged = nnx.merge(graph, params, state, copy=True)
        value = loss(merged, batch)
        return value, nnx.state(merged, nnx.Not(nnx.Param))

    return model, loss, (params, state), plain


def linen_case(name: str) -> tuple[Any, Any, Any, Any]:
    """As ``nnx_case``."""
    field, model = FIELDS.get(name, "x"), LINEN[name](None)
    flags = FLAGS.get(name, {})
    variables = dict(model.init(jax.random.key(0), DATA[field][:1], **flags))
    params = variables.pop("params", {})
    kept = list(variables)

    def loss(first: Any, batch: Any) -> Any:
        given = first if kept else {"params": first}
        outputs, new = model.apply(given, batch[field], mutable=kept, **flags)
        return error_of(outputs, batch["y"]), dict(new)

    def plain(params: Any, state: Any, batch: Any) -> Any:
        return loss({"params": params, **state} if kept else params, batch)

    return model, loss, (params, variables), plain


def plain_numbers(first: Any, loss: Any, data: Any) -> tuple[Any, Any, list[float]]:
    """Returns parameters, state and losses of the loop that a JAX user would write."""
    (params, state), tx = first, TX

    @jax.jit
    def step(params: Any, state: Any, opt: Any, batch: Any) -> Any:
        compute = jax.value_and_grad(loss, has_aux=True)
        (value, state), grads = compute(params, state, batch)
        updates, opt = tx.update(grads, opt, params)
        return value, optax.apply_updates(params, updates), state, opt

    opt, losses, stream = tx.init(params), [], batches_of(data, BATCH)
    for _ in range(STEPS):
        value, params, state, opt = step(params, state, opt, next(stream))
        losses.append(float(value))
    return params, state, losses


@pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("package", "name"),
    [*(("nnx", name) for name in NNX), *(("linen", name) for name in LINEN)],
)
def test_a_layer_is_on_a_cluster_what_a_plain_loop_is(
    package: str, name: str, strategy: str, cluster: Cluster
) -> None:
    cluster.reset()
    case = nnx_case if package == "nnx" else linen_case
    model, loss, first, plain = case(name)
    data = {field: DATA[field] for field in (FIELDS.get(name, "x"), "y")}
    params, state, losses = plain_numbers(first, plain, data)
    options: dict[str, Any] = {}
    if package == "linen":
        options = {"variables": {"params": first[0], **first[1]}}
    trainer = Trainer(
        *(model, loss, TX),
        **options,
        cluster=None if strategy == "alone" else cluster,
        strategy=STRATEGIES[strategy](),
        sparse="exact",
    )
    run = trainer.fit(data, steps=STEPS, batch_size=BATCH, progress=False)
    np.testing.assert_allclose(run.metrics("loss")["value"], losses, 1e-4, 1e-5)
    trained: Any = run.model()
    found: Any
    expected: Any
    if package == "nnx":
        # A run counts its draws of random numbers by the step.
        split: Any = nnx.split(trained, nnx.Param, nnx.RngState, ...)
        ours, plains = (
            (split[1], split[3]),
            (params, nnx.filter_state(state, NOT_DRAWN)),
        )
        found, expected = (
            [nnx.to_pure_dict(tree) for tree in trees] for trees in (ours, plains)
        )
    else:
        found = dict(trained) if state else {"params": trained}
        expected = {"params": params, **state}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 2e-4, 2e-5), found, expected
    )
    trainer.close()
