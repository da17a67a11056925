"""DLRM on clicks, made up or real: ids without a bound, in a hash table on the ps.

Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and
Recommendation Systems", 2019.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jgraph.client.cluster import Cluster
from jgraph.examples.clicks import (
    BAG,
    BAGS,
    FEATURES,
    NUMBERS,
    ONE_HOT,
    load_criteo,
    make_clicks,
)
from jgraph.examples.options import Figures, Options
from jgraph.graph.rows.hash_keys import NO_KEY, split_keys
from jgraph.graph.rows.hash_spec import Admission, Initial
from jgraph.train.hash_tables.hash_table import HashTable

WIDTH = 16
EXAMPLES = 40_000
CAPACITY_BYTES = 2 << 20
BATCH_SIZE = 128
LEARNING_RATE = 0.1
_PAIRS = np.triu_indices(FEATURES + 1, 1)
_NONE = split_keys(NO_KEY)


class Dlrm(nnx.Module):
    """Numbers and ids as vectors of one width, and the dot products of all pairs."""

    def __init__(self, width: int, capacity_bytes: int, *, rngs: nnx.Rngs) -> None:
        self.table = HashTable(
            width,
            capacity_bytes,
            initializer=Initial("uniform", 0.25),
            admission=Admission(sightings=2),
            eviction="lfu",
        )
        self.bottom1 = nnx.Linear(NUMBERS, 64, rngs=rngs)
        self.bottom2 = nnx.Linear(64, width, rngs=rngs)
        self.top1 = nnx.Linear(width + len(_PAIRS[0]), 64, rngs=rngs)
        self.top2 = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, batch: Any) -> jax.Array:
        """Returns logits float32[b] of a batch as ``clicks.make_clicks`` makes them."""
        ids = batch["ids"]
        there = (ids != _NONE).any(axis=-1, keepdims=True)
        rows = jnp.where(there, self.table(ids), 0)
        bags = rows[:, ONE_HOT:].reshape(len(rows), BAGS, BAG, -1).sum(axis=2)
        numbers = nnx.relu(self.bottom1(batch["numbers"]))
        numbers = self.bottom2(numbers)
        features = [numbers[:, None], rows[:, :ONE_HOT], bags]
        vectors = jnp.concatenate(features, axis=1)
        dots = jnp.einsum("biw,bjw->bij", vectors, vectors)[:, *_PAIRS]
        x = nnx.relu(self.top1(jnp.concatenate([numbers, dots], axis=1)))
        logits: jax.Array = self.top2(x)[:, 0]
        return logits


def loss_fn(model: Dlrm, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the mean cross entropy, and the accuracy, of a batch."""
    logits, label = model(batch), batch["label"]
    accuracy = jnp.mean((logits > 0) == (label > 0.5))
    loss = optax.sigmoid_binary_cross_entropy(logits, label).mean()
    return loss, {"accuracy": accuracy}


def auc(scores: Any, label: Any) -> float:
    """Returns how likely a click scores above what is none: 0.5 is a guess.

    Args:
      scores: float[n]; equal ones count half.
      label: float[n], 0 or 1, both of them there.

    Example:
      >>> auc([0.1, 0.4, 0.4, 0.9], [0, 0, 1, 1])
      0.875
    """
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    clicks = np.asarray(label) > 0.5
    ones = int(clicks.sum())
    above = ranks[clicks].sum() - ones * (ones + 1) / 2
    return float(above / (ones * (len(clicks) - ones)))


def run(
    cluster: Cluster | None,
    options: Options,
    data: Path | None = None,
    *,
    examples: int = EXAMPLES,
    width: int = WIDTH,
    capacity_bytes: int = CAPACITY_BYTES,
) -> Figures:
    """Trains and tests on clicks of Criteo's format, or else of a made-up law.

    Args:
      cluster: where to train; hash tables need one.
      options: how long.
      data: a directory with ``train.txt``, see ``load_criteo``; made up if unset.
      examples: to make up and train on; a quarter as many are tested on.
      width: of all vectors.
      capacity_bytes: of the table, over all ps.

    Returns:
      ``accuracy``, ``loss`` and ``auc`` on the test data; ``majority``: the accuracy
      of always saying what is more frequent; of the table, over all ps: ``rows`` that
      it has, and how many were ``admitted`` and ``evicted``.

    Raises:
      ConfigError: there is no cluster.
      DataError: a file that is not there, or not of the format.
    """
    if data is not None:
        train, test = load_criteo(data)
    else:
        train = make_clicks(examples, seed=2 * options.seed)
        test = make_clicks(examples // 4, seed=2 * options.seed + 1)
    model = Dlrm(width, capacity_bytes, rngs=nnx.Rngs(options.seed))
    tx = optax.adagrad(LEARNING_RATE)
    trainer, trained = options.fit(cluster, model, loss_fn, tx, train, BATCH_SIZE)
    events = trained.events()
    for event in events:
        options.say(
            f"{event.task}: {event.rows} rows in {event.nbytes >> 10} KiB; "
            f"{event.admitted} admitted, {event.declined} declined, "
            f"{event.evicted} evicted"
        )
    logits = nnx.jit(lambda model, batch: model(batch))(trained.model(), test)
    often = float(test["label"].mean())
    return {
        **{name: round(value, 4) for name, value in trainer.evaluate(test).items()},
        "auc": round(auc(logits, test["label"]), 4),
        "majority": round(max(often, 1 - often), 4),
        "rows": sum(event.rows for event in events),
        "admitted": sum(event.admitted for event in events),
        "evicted": sum(event.evicted for event in events),
    }
