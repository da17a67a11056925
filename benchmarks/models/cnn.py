"""Two convolutions and two dense layers for 28 x 28 pictures, 0.83 million parameters.

Source: the size of TensorFlow's MNIST tutorial and Flax's example ``mnist``.
"""

from pathlib import Path
from typing import Any

import jax
from flax import nnx

from benchmarks.models import pictures
from benchmarks.models.pictures import loss_fn

__all__ = ["BATCH", "CNN", "loss_fn", "make_data", "make_model"]

BATCH = 64


class CNN(nnx.Module):
    """Convolutions of 32 and 64 channels, dense layers of 256 and 10."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 32, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (3, 3), rngs=rngs)
        self.dense1 = nnx.Linear(7 * 7 * 64, 256, rngs=rngs)
        self.dense2 = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.avg_pool(nnx.relu(self.conv1(x)), (2, 2), (2, 2))
        x = nnx.avg_pool(nnx.relu(self.conv2(x)), (2, 2), (2, 2))
        return self.dense2(nnx.relu(self.dense1(x.reshape(len(x), -1))))


def make_model() -> CNN:
    return CNN(rngs=nnx.Rngs(0))


def make_data(examples: int = 4096, source: Path | None = None) -> tuple[Any, Any]:
    """Pictures float32[n, 28, 28, 1] and labels."""
    return pictures.make_data((28, 28, 1), examples, source)
