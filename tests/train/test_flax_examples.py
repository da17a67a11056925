"""Models with the structure of Flax's examples train on a cluster as in a plain loop.

Each is written here in few lines, its loss as the example has it. The plain loop is JAX
and optax alone: with one asynchronous worker on the same batches, with two synchronous
ones on both of their batches, whose gradients are averaged.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

from jgraph.client.cluster import Cluster
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.models import batches_of
from tests.support.servers import connected

pytestmark = [pytest.mark.nightly, pytest.mark.slow]

BATCH, STEPS, EXAMPLES = 8, 5, 96
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(EXAMPLES, 8, 8, 1)).astype(np.float32)
LABELS = (np.arange(EXAMPLES) % 4).astype(np.int32)
WORDS = RNG.integers(1, 16, (EXAMPLES, 9)).astype(np.int32)
NODES = RNG.normal(size=(EXAMPLES, 5, 4)).astype(np.float32)
EDGES = (RNG.random((EXAMPLES, 5, 5)) < 0.4).astype(np.float32)
NOISE = RNG.normal(size=(EXAMPLES, 3)).astype(np.float32)
REAL = RNG.normal(2.0, 0.3, (EXAMPLES, 2)).astype(np.float32)


def cross_entropy(logits: Any, labels: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


class MnistNnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.last = nnx.Linear(128, 4, rngs=rngs)

    def __call__(self, x: Any, rngs: nnx.Rngs) -> Any:
        # Without relu the gradient of the first bias is rounding alone.
        x = self.norm(nnx.relu(self.conv(x)))
        x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
        return self.last(x.reshape(x.shape[0], -1))


def mnist_nnx_loss(model: MnistNnx, batch: Any, rngs: nnx.Rngs) -> Any:
    logits = model(batch["image"], rngs)
    return cross_entropy(logits, batch["label"]), logits


class MnistLinen(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.avg_pool(nn.relu(nn.Conv(8, (3, 3))(x)), (2, 2), strides=(2, 2))
        return nn.Dense(4)(nn.relu(nn.Dense(16)(x.reshape((x.shape[0], -1)))))


class ResNet(nn.Module):
    """A block with a short cut; normalization over the batches of all devices."""

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        def norm() -> Any:
            return nn.BatchNorm(not train, momentum=0.9, axis_name="batch")

        # Where relu gets what is zero but for rounding, its gradient is rounding alone.
        x = nn.Conv(8, (3, 3), use_bias=False)(x)
        y = norm()(nn.Conv(8, (3, 3), use_bias=False)(nn.silu(norm()(x))))
        return nn.Dense(4)(jnp.mean(nn.silu(x + y), axis=(1, 2)))


def resnet_loss(variables: Any, batch: Any) -> Any:
    logits, updates = ResNet().apply(
        variables, batch["image"], train=True, mutable=["batch_stats"]
    )
    decay = sum(jnp.sum(w**2) for w in jax.tree.leaves(variables["params"]))
    return cross_entropy(logits, batch["label"]) + 1e-4 * decay, {**updates}


class LanguageModel(nn.Module):
    """A decoder whose inputs are shifted, with the embedding as its last layer."""

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        embed = nn.Embed(16, 16)
        x = embed(jnp.pad(ids, ((0, 0), (1, 0)))[:, :-1])
        x += self.param("position", nn.initializers.normal(0.1), (ids.shape[1], 16))
        mask = nn.combine_masks(nn.make_causal_mask(ids))
        for _ in range(2):
            y = nn.LayerNorm()(x)
            # The gradient of a bias of keys is rounding alone.
            x += nn.MultiHeadDotProductAttention(2, use_bias=False)(y, mask=mask)
            x += nn.Dense(16)(nn.relu(nn.Dense(32)(nn.LayerNorm()(x))))
        return embed.attend(nn.LayerNorm()(x)) / 4.0


class Autoencoder(nn.Module):
    @nn.compact
    def __call__(self, x: Any, noise: Any) -> Any:
        h = nn.relu(nn.Dense(16)(x.reshape((x.shape[0], -1))))
        mean, logvar = nn.Dense(3)(h), nn.Dense(3)(h)
        h = nn.relu(nn.Dense(16)(mean + jnp.exp(logvar / 2) * noise))
        return nn.Dense(64)(h), mean, logvar


def autoencoder_loss(params: Any, batch: Any) -> Any:
    made: Any = Autoencoder().apply({"params": params}, batch["image"], batch["noise"])
    logits, mean, logvar = made
    target = jax.nn.sigmoid(batch["image"]).reshape(logits.shape)
    found = optax.sigmoid_binary_cross_entropy(logits, target).sum(-1).mean()
    spread = -0.5 * jnp.sum(1 + logvar - mean**2 - jnp.exp(logvar), axis=-1).mean()
    return found + spread, {"spread": spread}


class Seq2seq(nn.Module):
    """One cell reads the words, the other says them again."""

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        words = jax.nn.one_hot(ids, 16)
        reader = nn.RNN(nn.LSTMCell(12), return_carry=True)
        carry, _ = reader(words)
        said = nn.RNN(nn.LSTMCell(12))(words[:, ::-1], initial_carry=carry)
        return nn.Dense(16)(said)


class GraphNetwork(nn.Module):
    """Messages along edges, summed by node; then a mean over the nodes."""

    @nn.compact
    def __call__(self, nodes: Any, edges: Any) -> Any:
        x = nn.Dense(8)(nodes)
        for _ in range(2):
            x = nn.LayerNorm()(x + nn.relu(nn.Dense(8)(edges @ nn.Dense(8)(x))))
        return nn.Dense(4)(x.mean(axis=1))


class VisionTransformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.patches = nnx.Conv(1, 16, (4, 4), strides=(4, 4), rngs=rngs)
        self.first = nnx.Param(jnp.zeros((1, 1, 16)))
        self.position = nnx.Param(0.02 * rngs.params.normal((1, 5, 16)))
        self.norms = nnx.List([nnx.LayerNorm(16, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(
            2, 16, use_bias=False, decode=False, rngs=rngs
        )
        self.mlp = nnx.Sequential(
            nnx.Linear(16, 32, rngs=rngs), nnx.gelu, nnx.Linear(32, 16, rngs=rngs)
        )
        self.last = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.patches(x).reshape(x.shape[0], 4, 16)
        first = jnp.broadcast_to(self.first[...], (x.shape[0], 1, 16))
        x = jnp.concatenate([first, x], axis=1) + self.position[...]
        x += self.attention(self.norms[0](x))
        return self.last((x + self.mlp(self.norms[1](x)))[:, 0])


class Adapted(nnx.Module):
    """A layer that is frozen, and what is trained beside it."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.base = nnx.Linear(64, 16, rngs=rngs)
        self.lora = nnx.LoRA(64, 2, 16, base_module=self.base, rngs=rngs)
        self.last = nnx.LoRALinear(16, 4, lora_rank=2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(nnx.relu(self.lora(x.reshape(x.shape[0], -1))))


class Gan(nn.Module):
    def setup(self) -> None:
        self.generator = nn.Dense(2)
        self.discriminator = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(1)])

    def __call__(self, noise: Any) -> Any:
        return self.discriminator(self.generator(noise))


def gan_loss(params: Any, batch: Any) -> Any:
    fixed = jax.lax.stop_gradient(params)

    def judge(module: Gan, x: Any) -> Any:
        return module.discriminator(x)

    def make(module: Gan, noise: Any) -> Any:
        return module.generator(noise)

    def judged(x: Any, part: Any, real: float) -> Any:
        logits: Any = Gan().apply({"params": part}, x, method=judge)
        return optax.sigmoid_binary_cross_entropy(logits, real).mean()

    made: Any = Gan().apply({"params": params}, batch["noise"], method=make)
    fooled = judged(made, fixed, 1.0)
    told = judged(batch["real"], params, 1.0)
    told += judged(jax.lax.stop_gradient(made), params, 0.0)
    return fooled + told, {"fooled": fooled, "told": told}


def pictures(model: Any, batch: Any) -> Any:
    return cross_entropy(model(batch["image"]), batch["label"])


def with_params(loss: Callable[[Any, Any], Any], module: nn.Module) -> Any:
    """Returns the linen form of a loss of something that can be called."""

    def of_params(params: Any, batch: Any) -> Any:
        return loss(lambda *x: module.apply({"params": params}, *x), batch)

    return of_params


@dataclass(frozen=True)
class Case:
    """A model as a Trainer and a plain loop take it."""

    model: Any
    loss: Any
    data: Mapping[str, Any]
    tx: Any
    inputs: tuple[Any, ...] = ()
    wrt: Any = nnx.Param


PICTURES = {"image": IMAGES, "label": LABELS}
ADAM = optax.adam(1e-2)
CASES: dict[str, Callable[[], Case]] = {
    "mnist, nnx": lambda: Case(
        MnistNnx(nnx.Rngs(0)), mnist_nnx_loss, PICTURES, optax.adamw(1e-2, 0.9)
    ),
    "mnist, linen": lambda: Case(
        MnistLinen(),
        with_params(pictures, MnistLinen()),
        PICTURES,
        optax.sgd(0.1, 0.9),
        (IMAGES[:1],),
    ),
    "resnet": lambda: Case(
        ResNet(),
        resnet_loss,
        PICTURES,
        optax.sgd(0.1, 0.9, nesterov=True),
        (IMAGES[:1], False),
    ),
    "language model": lambda: Case(
        LanguageModel(),
        with_params(lambda m, b: cross_entropy(m(b["ids"]), b["ids"]), LanguageModel()),
        {"ids": WORDS},
        optax.adamw(optax.linear_schedule(0.0, 1e-2, 3), b2=0.98, weight_decay=0.1),
        (WORDS[:1],),
    ),
    "autoencoder": lambda: Case(
        Autoencoder(),
        autoencoder_loss,
        {"image": IMAGES, "noise": NOISE},
        ADAM,
        (IMAGES[:1], NOISE[:1]),
    ),
    "seq2seq": lambda: Case(
        Seq2seq(),
        with_params(lambda m, b: cross_entropy(m(b["ids"]), b["ids"]), Seq2seq()),
        {"ids": WORDS},
        ADAM,
        (WORDS[:1],),
    ),
    "graph network": lambda: Case(
        GraphNetwork(),
        with_params(
            lambda m, b: cross_entropy(m(b["nodes"], b["edges"]), b["label"]),
            GraphNetwork(),
        ),
        {"nodes": NODES, "edges": EDGES, "label": LABELS},
        ADAM,
        (NODES[:1], EDGES[:1]),
    ),
    "vision transformer": lambda: Case(
        VisionTransformer(nnx.Rngs(0)), pictures, PICTURES, ADAM
    ),
    "lora": lambda: Case(
        Adapted(nnx.Rngs(0)), pictures, PICTURES, optax.sgd(0.1), wrt=nnx.LoRAParam
    ),
    "gan": lambda: Case(
        Gan(),
        gan_loss,
        {"noise": NOISE, "real": REAL},
        {"generator": optax.adam(1e-2, b1=0.5), "discriminator": optax.sgd(0.1, 0.9)},
        (NOISE[:1],),
    ),
}


def functional(case: Case) -> tuple[Any, Any, Any]:
    """Returns (parameters, other state, loss of both and a batch)."""
    if isinstance(case.model, nnx.Module):
        split: Any = nnx.split(case.model, case.wrt, ...)
        graph, params, state = split

        def nnx_loss(params: Any, state: Any, batch: Any) -> Any:
            model = nnx.merge(graph, params, state, copy=True)
            rngs = (nnx.Rngs(0),) if case.loss is mnist_nnx_loss else ()
            result = case.loss(model, batch, *rngs)
            value = result[0] if isinstance(result, tuple) else result
            return value, nnx.state(model, nnx.Not(case.wrt))

        return params, state, nnx_loss
    variables = dict(case.model.init(jax.random.key(0), *case.inputs))
    params = variables.pop("params")

    def loss(params: Any, state: Any, batch: Any) -> Any:
        first = {"params": params, **state} if state else params

        def of_batch() -> Any:
            result = case.loss(first, batch)
            return result if isinstance(result, tuple) else (result, {})

        # Plain JAX needs the axis of the normalization, too.
        mapped = jax.vmap(of_batch, in_axes=(), axis_size=1, axis_name="batch")()
        value, aux = jax.tree.map(lambda x: x[0], mapped)
        return value, {collection: aux[collection] for collection in state}

    return params, variables, loss


def plain(case: Case, workers: int) -> tuple[Any, list[float]]:
    params, state, loss = functional(case)
    tx = case.tx
    if isinstance(tx, dict):
        tx = optax.multi_transform(tx, {name: name for name in tx})

    @jax.jit
    def step(params: Any, state: Any, opt: Any, batches: Any) -> Any:
        compute = jax.value_and_grad(loss, has_aux=True)
        found = [compute(params, state, batch) for batch in batches]
        mean = lambda *leaves: sum(leaves) / len(leaves)
        (value, state), grads = jax.tree.map(mean, *found)
        updates, opt = tx.update(grads, opt, params)
        return value, optax.apply_updates(params, updates), state, opt

    opt, losses = tx.init(params), []
    stream = batches_of(case.data, BATCH)
    for _ in range(STEPS):
        batches = [next(stream) for _ in range(workers)]
        value, params, state, opt = step(params, state, opt, batches)
        losses.append(float(value))
    return params, losses


@pytest.fixture(scope="module")
def alone() -> Iterator[Cluster]:
    with connected(ps=2, worker=1) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "strategy", [AsyncPS(), SyncPS()], ids=lambda s: type(s).__name__
)
@pytest.mark.parametrize("name", CASES)
def test_an_example_is_on_a_cluster_what_a_plain_loop_is(
    name: str, strategy: Strategy, request: pytest.FixtureRequest
) -> None:
    is_sync = isinstance(strategy, SyncPS)
    cluster = request.getfixturevalue("cluster" if is_sync else "alone")
    cluster.reset()
    case = CASES[name]()
    expected, losses = plain(case, workers=2 if is_sync else 1)
    options: dict[str, Any] = {"wrt": case.wrt}
    if case.inputs:
        options = {"variables": case.model.init(jax.random.key(0), *case.inputs)}
    trainer = Trainer(
        *(case.model, case.loss, case.tx),
        **options,
        cluster=cluster,
        strategy=strategy,
        sparse="exact",
    )
    run = trainer.fit(case.data, steps=STEPS, batch_size=BATCH, progress=False)
    np.testing.assert_allclose(run.metrics("loss")["value"], losses, 1e-4, 1e-5)
    found: Any = run.model()
    if case.inputs:
        found = found.get("params", found)
    else:
        found, expected = (
            nnx.to_pure_dict(tree) for tree in (nnx.state(found, case.wrt), expected)
        )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 2e-4, 2e-5), dict(found), expected
    )
    trainer.close()
