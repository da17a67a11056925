"""Wide and deep: rows of two embedding tables, and an MLP; 3.5 million parameters.

Source: Cheng et al., "Wide & Deep Learning for Recommender Systems", 2016. Data of the
form of the census ("Adult") files: 8 columns of words, 6 of numbers.
"""

import csv
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

BATCH = 128
BUCKETS, WIDTH = 200_000, 16
WORDS, NUMBERS = (1, 3, 5, 6, 7, 8, 9, 13), (0, 2, 4, 10, 11, 12)


class WideDeep(nnx.Module):
    """A weight per word (wide), and an MLP over vectors of words and numbers (deep)."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.wide = nnx.Embed(BUCKETS, 1, rngs=rngs)
        self.deep = nnx.Embed(BUCKETS, WIDTH, rngs=rngs)
        inputs = len(WORDS) * WIDTH + len(NUMBERS)
        self.dense1 = nnx.Linear(inputs, 256, rngs=rngs)
        self.dense2 = nnx.Linear(256, 128, rngs=rngs)
        self.dense3 = nnx.Linear(128, 1, rngs=rngs)

    def __call__(self, words: jax.Array, numbers: jax.Array) -> jax.Array:
        vectors = self.deep(words).reshape(len(words), -1)
        x = jnp.concatenate([vectors, numbers], axis=1)
        x = nnx.relu(self.dense2(nnx.relu(self.dense1(x))))
        return self.dense3(x)[:, 0] + self.wide(words).sum(axis=(1, 2))


def make_model() -> WideDeep:
    return WideDeep(rngs=nnx.Rngs(0))


def loss_fn(model: Any, batch: Any) -> jax.Array:
    """Returns the mean cross entropy of (words, numbers, label)."""
    words, numbers, y = batch
    losses: jax.Array = optax.sigmoid_binary_cross_entropy(model(words, numbers), y)
    return losses.mean()


def make_data(examples: int = 4096, source: Path | None = None) -> tuple[Any, Any, Any]:
    """Words int32[n, 8] as numbers of buckets, numbers float32[n, 6], label float32[n].

    Without a file words are as uneven as words are: the n-th comes 1 / n as often.
    """
    if source is None:
        rng = np.random.default_rng(0)
        words = rng.zipf(1.3, (examples, len(WORDS))) % BUCKETS
        numbers = rng.normal(size=(examples, len(NUMBERS)))
        labels = rng.integers(0, 2, examples)
        return words.astype(np.int32), *_floats(numbers, labels)
    with source.open(newline="") as file:
        rows = [row for row in csv.reader(file, skipinitialspace=True) if len(row) > 14]
    rows = [row for row in rows if row[0].isdecimal()][:examples]
    found = [[_bucket(i, row[i]) for i in WORDS] for row in rows]
    numbers = np.log1p([[float(row[i]) for i in NUMBERS] for row in rows])
    labels = np.array([row[14].startswith(">") for row in rows])
    return np.array(found, np.int32), *_floats(numbers, labels)


def _bucket(column: int, word: str) -> int:
    return zlib.crc32(f"{column}={word}".encode()) % BUCKETS


def _floats(numbers: Any, labels: Any) -> tuple[Any, Any]:
    return numbers.astype(np.float32), labels.astype(np.float32)
