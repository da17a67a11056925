"""Wide & Deep on the census income data: hashed crosses in row tables.

Source: Cheng et al., "Wide & Deep Learning for Recommender Systems", 2016.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jgraph.client.cluster import Cluster
from jgraph.examples.census import (
    BOUNDARIES,
    CATEGORIES,
    DEEP_ROWS,
    NUMBERS,
    WIDE_ROWS,
    load,
)
from jgraph.examples.options import Figures, Options
from jgraph.train.tables.bags import embedding_bag

WIDTH = 8
BATCH_SIZE = 128
LEARNING_RATE = 0.05


class WideDeep(nnx.Module):
    """A linear model of many sparse features, and a small network, added up."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        zeros = nnx.initializers.zeros
        self.wide = nnx.Embed(WIDE_ROWS, 1, embedding_init=zeros, rngs=rngs)
        self.deep = nnx.Embed(DEEP_ROWS, WIDTH, rngs=rngs)
        width = WIDTH * (len(CATEGORIES) + len(BOUNDARIES)) + len(NUMBERS)
        self.hidden1 = nnx.Linear(width, 100, rngs=rngs)
        self.hidden2 = nnx.Linear(100, 50, rngs=rngs)
        self.out = nnx.Linear(50, 1, rngs=rngs)

    def __call__(self, batch: Any) -> jax.Array:
        """Returns logits float32[b] of a batch as ``census.features`` makes them."""
        rows = self.deep(batch["deep"])
        x = jnp.concatenate([rows.reshape(rows.shape[0], -1), batch["numbers"]], axis=1)
        x = nnx.relu(self.hidden2(nnx.relu(self.hidden1(x))))
        wide = embedding_bag(self.wide.embedding[...], batch["wide"], combiner="sum")
        logits: jax.Array = (self.out(x) + wide)[:, 0]
        return logits


def loss_fn(model: WideDeep, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the mean cross entropy, and the accuracy, of a batch."""
    logits, label = model(batch), batch["label"]
    accuracy = jnp.mean((logits > 0) == (label > 0.5))
    loss = optax.sigmoid_binary_cross_entropy(logits, label).mean()
    return loss, {"accuracy": accuracy}


def run(directory: Path, cluster: Cluster | None, options: Options) -> Figures:
    """Trains on a directory with ``adult.data`` and ``adult.test``.

    Args:
      directory: with the data.
      cluster: where to train; this process if unset.
      options: how long.

    Returns:
      ``accuracy`` and ``loss`` on the test data, and ``majority``: the accuracy of
      always saying what is more frequent.

    Raises:
      DataError: a file is not there, or has a line that is no record.
    """
    train, test = load(directory)
    options.say(
        f"{len(train['label'])} examples to train on, {len(test['label'])} to test"
    )
    model = WideDeep(rngs=nnx.Rngs(options.seed))
    tx = optax.adagrad(LEARNING_RATE)
    trainer, _ = options.fit(cluster, model, loss_fn, tx, train, BATCH_SIZE)
    rich = float(test["label"].mean())
    return {
        **{name: round(value, 4) for name, value in trainer.evaluate(test).items()},
        "majority": round(max(rich, 1 - rich), 4),
    }
