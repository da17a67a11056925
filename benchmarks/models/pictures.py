"""What the models of pictures and vectors share: a loss, and data of 10 classes."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

CLASSES = 10


def loss_fn(model: Any, batch: Any) -> jax.Array:
    """Returns the mean cross entropy of (x, label)."""
    x, y = batch
    losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
    return losses.mean()


def make_data(
    shape: tuple[int, ...], examples: int, source: Path | None = None
) -> tuple[Any, Any]:
    """Random examples and labels, or ``x`` and ``y`` of a file of ``numpy.savez``."""
    if source is not None:
        with np.load(source) as file:
            x, y = file["x"][:examples], file["y"][:examples]
        return x.reshape(-1, *shape).astype(np.float32), y.astype(np.int32)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(examples, *shape)).astype(np.float32)
    return x, rng.integers(0, CLASSES, examples).astype(np.int32)
