"""What the models of text share: a loss, and text as numbers of its characters."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

VOCABULARY, LENGTH = 128, 64


def loss_fn(model: Any, batch: Any) -> jax.Array:
    """Returns the mean cross entropy of each next character of int32[b, LENGTH + 1]."""
    (text,) = batch
    losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(
        model(text[:, :-1]), text[:, 1:]
    )
    return losses.mean()


def make_data(examples: int = 4096, source: Path | None = None) -> tuple[Any]:
    """Pieces int32[n, LENGTH + 1] of a text file, or of random characters."""
    size = examples * (LENGTH + 1)
    if source is None:
        text = np.random.default_rng(0).integers(0, VOCABULARY, size, np.uint8)
    else:
        with source.open("rb") as file:
            text = np.frombuffer(file.read(size), np.uint8) % VOCABULARY
    pieces = len(text) // (LENGTH + 1)
    return (text[: pieces * (LENGTH + 1)].reshape(pieces, -1).astype(np.int32),)
