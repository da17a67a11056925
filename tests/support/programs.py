"""Training steps of real models, tiny, for tests of every layer.

A builder returns (function, arguments, variables): the function makes one optax step
on variables that hold parameters, model state and optimizer state, and returns the
loss. Values come from numpy and shapes from ``eval_shape``, so that building one
compiles nothing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jgraph as jg

BATCH = 4


class Example(NamedTuple):
    """A training step ready to be traced."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    variables: tuple[jg.Variable, ...]


Loss = Callable[[Any, Any, dict[str, Any]], tuple[Any, Any]]
"""(parameters, model state, batch) -> (loss, new model state)."""


def training_step(
    params: Any,
    state: Any,
    loss: Loss,
    tx: Any,
    batch: dict[str, Any],
    *,
    device: str = "/job:ps",
    compute: str | None = "/job:worker/task:0",
) -> Example:
    """Returns the step of one model under one optimizer.

    Args:
      params: parameters, a pytree of arrays.
      state: what the model carries from step to step beside them.
      loss: the model's loss.
      tx: an optax transformation.
      batch: the feed.
      device: where the variables live.
      compute: where the loss and its gradient are computed; None leaves it open.
    """
    opt_state = _zeros(jax.eval_shape(tx.init, params))
    values = {"params": params, "state": state, "opt": opt_state}
    paths, tree = jax.tree_util.tree_flatten_with_path(values)
    names = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in paths]
    held = [
        jg.Variable(name, value, device=device)
        for name, (_, value) in zip(names, paths, strict=True)
    ]

    def step(batch: dict[str, Any]) -> Any:
        now = jax.tree.unflatten(tree, [v[...] for v in held])
        with jg.device(compute):
            (value, state), grads = jax.value_and_grad(loss, has_aux=True)(
                now["params"], now["state"], batch
            )
        updates, opt_state = tx.update(grads, now["opt"], now["params"])
        new = {
            "params": optax.apply_updates(now["params"], updates),
            "state": state,
            "opt": opt_state,
        }
        for variable, leaf in zip(held, jax.tree.leaves(new), strict=True):
            variable[...] = leaf
        return value

    return Example(step, (batch,), tuple(held))


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)


def _random(shapes: Any, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)

    def value(shape: jax.ShapeDtypeStruct) -> Any:
        scale = 1 / np.sqrt(max(1, int(np.prod(shape.shape[:-1]))))
        return (rng.normal(size=shape.shape) * scale).astype(shape.dtype)

    return jax.tree.map(value, shapes)


def batch_of(*shape: int, classes: int = 3) -> dict[str, Any]:
    """Returns a batch of float inputs of ``shape`` and integer labels."""
    rng = np.random.default_rng(1)
    return {
        "x": rng.normal(size=(BATCH, *shape)).astype(np.float32),
        "y": rng.integers(0, classes, BATCH).astype(np.int32),
    }


def tokens(length: int = 5, vocabulary: int = 11) -> dict[str, Any]:
    """Returns a batch of token ids and labels."""
    rng = np.random.default_rng(2)
    return {
        "x": rng.integers(0, vocabulary, (BATCH, length)).astype(np.int32),
        "y": rng.integers(0, 3, BATCH).astype(np.int32),
    }


def _cross_entropy(logits: Any, labels: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


def linen_step(
    model: nn.Module, batch: dict[str, Any], tx: Any, **kwargs: Any
) -> Example:
    """Returns the training step of a linen model that gives logits."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), batch["x"])
    params = _random(shapes.pop("params"))
    state = jax.tree.map(lambda s: np.ones(s.shape, s.dtype), shapes)

    def loss(params: Any, state: Any, batch: dict[str, Any]) -> tuple[Any, Any]:
        logits, new = model.apply(
            {"params": params, **state}, batch["x"], mutable=list(state)
        )
        return _cross_entropy(logits, batch["y"]), new

    return training_step(params, state, loss, tx, batch, **kwargs)


def nnx_step(
    make: Callable[[nnx.Rngs], nnx.Module],
    batch: dict[str, Any],
    tx: Any,
    **kwargs: Any,
) -> Example:
    """Returns the training step of an nnx model that gives logits."""
    abstract = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    # nnx types the result of split as tuple[GraphDef, *tuple[State, ...]].
    split: Any = nnx.split
    graphdef, shapes, rest = split(abstract, nnx.Param, ...)
    params = _random(nnx.to_pure_dict(shapes))
    state = jax.tree.map(lambda s: np.ones(s.shape, s.dtype), nnx.to_pure_dict(rest))

    def loss(params: Any, state: Any, batch: dict[str, Any]) -> tuple[Any, Any]:
        model = nnx.merge(graphdef, params, state)
        value = _cross_entropy(model(batch["x"]), batch["y"])
        _, _, new = split(model, nnx.Param, ...)
        return value, nnx.to_pure_dict(new)

    return training_step(params, state, loss, tx, batch, **kwargs)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.tanh(nn.Dense(6)(x))
        return nn.Dense(3)(x)


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Conv(3, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(3)(x.reshape(x.shape[0], -1))


class LSTM(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(2):
            x = nn.RNN(nn.OptimizedLSTMCell(4))(x)
        return nn.Dense(3)(x[:, -1])


class Transformer(nn.Module):
    """Token ids to logits; each layer may be put on a task of its own."""

    devices: tuple[str | None, ...] = (None, None)

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        with jg.device(self.devices[0] or ""):
            x = nn.Embed(11, 8)(ids)
            x = x + self.param("position", nn.initializers.normal(), (5, 8))
        for device in self.devices:
            with jg.device(device or ""):
                x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
                x = x + nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))
        with jg.device(self.devices[-1] or ""):
            return nn.Dense(3)(x.mean(1))


class ResNetBlock(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = nn.Conv(4, (3, 3), use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=False)(y))
        y = nn.BatchNorm(use_running_average=False)(
            nn.Conv(4, (3, 3), use_bias=False)(y)
        )
        y = nn.relu(y + nn.Conv(4, (1, 1))(x))
        return nn.Dense(3)(y.mean((1, 2)))


class Embedding(nn.Module):
    @nn.compact
    def __call__(self, ids: Any) -> Any:
        return nn.Dense(3)(nn.Embed(11, 6)(ids).mean(1))


class NnxMLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(5, 6, rngs=rngs)
        self.second = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.second(nnx.tanh(self.first(x)))


class NnxResNetBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        # No bias before a norm: its gradient is noise around 0, which Adam enlarges.
        self.conv = nnx.Conv(2, 2, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.head = nnx.Linear(2, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(x + self.norm(self.conv(x)))
        return self.head(x.mean((1, 2)))


class NnxEmbedding(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(11, 6, rngs=rngs)
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        return self.head(self.table(ids).mean(1))


def staged_mlp(stages: int, tx: Any, width: int = 6) -> Example:
    """Returns a pipeline: layer ``i`` and its variables on worker ``i``."""
    workers = [f"/job:worker/task:{i}" for i in range(stages)]
    rng = np.random.default_rng(3)
    params = [
        {
            "w": (rng.normal(size=(width, width)) / 2).astype(np.float32),
            "b": np.zeros(width, np.float32),
        }
        for _ in workers
    ]
    opt_state = _zeros(jax.eval_shape(tx.init, params))
    paths, tree = jax.tree_util.tree_flatten_with_path((params, opt_state))
    held = []
    for path, value in paths:
        name = jax.tree_util.keystr(path)
        layer = [p.idx for p in path if hasattr(p, "idx")]
        # A parameter's path is (0, layer); a slot of it also ends in the layer.
        owner = workers[layer[-1]] if value.ndim else workers[0]
        held.append(jg.Variable(name, value, device=owner))

    def loss(params: Any, x: Any, y: Any) -> Any:
        for layer, worker in zip(params, workers, strict=True):
            with jg.device(worker):
                x = jnp.tanh(x @ layer["w"] + layer["b"])
        with jg.device(workers[-1]):
            return jnp.mean((x - y) ** 2)

    def step(x: Any, y: Any) -> Any:
        params, opt_state = jax.tree.unflatten(tree, [v[...] for v in held])
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), opt_state
        for variable, leaf in zip(held, jax.tree.leaves(new), strict=True):
            variable[...] = leaf
        return value

    x, y = rng.normal(size=(2, BATCH, width)).astype(np.float32)
    return Example(step, (x, y), tuple(held))


def _schedule() -> Any:
    return optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 10)


def _clipped() -> Any:
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))


IMAGE = (6, 6, 2)

EXAMPLES: dict[str, Callable[[], Example]] = {
    "mlp_sgd": lambda: linen_step(MLP(), batch_of(5), optax.sgd(0.1)),
    "mlp_momentum_nnx": lambda: nnx_step(
        NnxMLP, batch_of(5), optax.sgd(0.1, momentum=0.9, nesterov=True)
    ),
    "mlp_adam": lambda: linen_step(MLP(), batch_of(5), optax.adam(1e-2)),
    "mlp_adamw_schedule": lambda: linen_step(
        MLP(), batch_of(5), optax.adamw(_schedule())
    ),
    "mlp_clip_adam": lambda: linen_step(MLP(), batch_of(5), _clipped()),
    "mlp_lamb": lambda: linen_step(MLP(), batch_of(5), optax.lamb(1e-2)),
    "mlp_adafactor": lambda: linen_step(
        MLP(), batch_of(5), optax.adafactor(1e-2, min_dim_size_to_factor=3)
    ),
    "cnn_adam": lambda: linen_step(CNN(), batch_of(*IMAGE), optax.adam(1e-2)),
    "lstm_momentum": lambda: linen_step(
        LSTM(), batch_of(4, 3), optax.sgd(0.1, momentum=0.9)
    ),
    "transformer_momentum": lambda: linen_step(
        Transformer(), tokens(), optax.sgd(0.1, momentum=0.9)
    ),
    "resnet_block_sgd": lambda: linen_step(
        ResNetBlock(), batch_of(*IMAGE), optax.sgd(0.1)
    ),
    "resnet_block_clip_nnx": lambda: nnx_step(
        NnxResNetBlock, batch_of(*IMAGE), _clipped()
    ),
    "embedding_adam": lambda: linen_step(Embedding(), tokens(), optax.adam(1e-2)),
    "embedding_sgd_nnx": lambda: nnx_step(NnxEmbedding, tokens(), optax.sgd(0.1)),
    "staged_mlp_adam": lambda: staged_mlp(2, optax.adam(1e-2)),
}
