"""A transformer of characters by four workers that seldom talk, as DiLoCo does.

The same steps by gradients that are averaged each time, and by workers that take many
steps alone between two averages: what that costs in loss, and saves in exchanges. As in
the paper the rate follows a cosine, and the first half of the steps is that of averaged
gradients for all ways: workers that begin at random values move too far apart alone.

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
Models", 2023.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jgraph.client.cluster import Cluster
from jgraph.errors import ConfigError, DataError
from jgraph.examples.options import Figures, Options
from jgraph.runtime.data.batches import Array
from jgraph.train.strategies.local_sgd import LocalSGD
from jgraph.train.strategies.options import SyncPS
from jgraph.train.trainer import Trainer

FILE = "input.txt"
LENGTH, WIDTH, HEADS, LAYERS = 64, 64, 4, 2
BATCH_SIZE = 16
LEARNING_RATE = 2e-3
TOGETHER = 0.5
"""The part of the steps that all ways take together, by averages of gradients."""
EVERY = 50, 500
_STRIDE = 16  # characters between two sequences
_TEST_PART = 0.1


class Block(nnx.Module):
    """Attention to the characters before, and a layer of two."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.hidden = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns float32[b, t, width] of the same."""
        before = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norms[0](x), mask=before)
        return x + self.out(nnx.gelu(self.hidden(self.norms[1](x))))


class Characters(nnx.Module):
    """Predicts the next character from those before it."""

    def __init__(self, count: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(count, WIDTH, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, count, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        """Returns logits float32[b, t, count] of characters int32[b, t]."""
        x = self.embed(text) + self.places(jnp.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: jax.Array = self.out(self.norm(x))
        return logits


def loss_fn(model: Characters, text: Any) -> jax.Array:
    """Returns the mean cross entropy of the next characters."""
    logits = model(text[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
    loss: jax.Array = losses.mean()
    return loss


def read_characters(path: Path) -> tuple[Array, int]:
    """Returns a text as numbers of its characters, int32[n], and how many there are.

    Raises:
      DataError: the file is not there, or too short.
    """
    try:
        text = np.frombuffer(path.read_bytes(), np.uint8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if len(text) < 100 * LENGTH:
        raise DataError(
            f"{path} has {len(text)} characters; give a text of {100 * LENGTH} or more"
        )
    alphabet, numbers = np.unique(text, return_inverse=True)
    return numbers.astype(np.int32), len(alphabet)


def sequences(text: Array, stride: int) -> Array:
    """Returns int32[n, LENGTH + 1]: pieces of a text, ``stride`` characters apart."""
    windows = np.lib.stride_tricks.sliding_window_view(text, LENGTH + 1)
    return np.ascontiguousarray(windows[::stride])


def run(directory: Path, cluster: Cluster | None, options: Options) -> Figures:
    """Trains by each way for so many steps of each worker.

    Args:
      directory: with ``input.txt``.
      cluster: where to train.
      options: how long.

    Returns:
      The loss on the last tenth of the text by averages of gradients, ``sync_loss``,
      and with an average each so many steps of the second half, ``every_50_loss``; and
      by how much more that is, ``every_50_more``.

    Raises:
      ConfigError: there is no cluster.
      DataError: the file is not there, or too short.
    """
    if cluster is None:
        raise ConfigError("workers train alone for a while; give --workers 4")
    text, count = read_characters(directory / FILE)
    cut = int(len(text) * (1 - _TEST_PART))
    train, test = sequences(text[:cut], _STRIDE), sequences(text[cut:], LENGTH)
    options.say(f"{cut} characters to train on, {len(text) - cut} to test\n")
    together = int(TOGETHER * options.steps)
    apart = options.steps - together
    rate = optax.warmup_cosine_decay_schedule(
        0.0, LEARNING_RATE, options.steps // 20, options.steps, LEARNING_RATE / 10
    )
    start = Characters(count, nnx.Rngs(options.seed))
    with _trainer(cluster, start, rate, SyncPS(), options) as trainer:
        if together:
            start = _trained(trainer, train, together, options)
        _trained(trainer, train, apart, options)
        figures: Figures = {"sync_loss": _tested(trainer, test)}
    options.say(f"{options.steps} exchanges: loss {figures['sync_loss']:.4f}\n")
    for every in EVERY:
        if every > apart:
            continue
        outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
        strategy = LocalSGD(sync_every=every, outer=outer)
        rounds = math.ceil(apart / every)

        def rest(step: Any) -> Any:
            return rate(step + together)

        with _trainer(cluster, start, rest, strategy, options) as trainer:
            _trained(trainer, train, rounds, options)
            loss = _tested(trainer, test)
        options.say(
            f"{together} exchanges, and {rounds} of {every} steps: loss {loss:.4f}\n"
        )
        figures[f"every_{every}_loss"] = loss
        figures[f"every_{every}_more"] = round(loss / figures["sync_loss"] - 1, 4)
    return figures


def _trainer(
    cluster: Cluster,
    model: Characters,
    rate: Callable[[Any], Any],
    strategy: SyncPS | LocalSGD,
    options: Options,
) -> Trainer:
    """Returns what trains by one way, from a model on."""
    return Trainer(
        model,
        loss_fn,
        optax.adamw(rate),
        cluster=cluster,
        strategy=strategy,
        seed=options.seed,
        sparse="off",
    )


def _trained(trainer: Trainer, train: Array, updates: int, options: Options) -> Any:
    """Returns the model after some more updates."""
    run = trainer.fit(
        train, steps=updates, batch_size=BATCH_SIZE, progress=options.progress
    )
    return run.model()


def _tested(trainer: Trainer, test: Array) -> float:
    """Returns the loss on the test data."""
    return round(float(trainer.evaluate(test, 64)["loss"]), 4)
