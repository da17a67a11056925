"""A multilayer perceptron 784-512-512-10: 0.67 million parameters, 2.7 MB."""

import itertools
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from benchmarks.models import pictures
from benchmarks.models.pictures import loss_fn

__all__ = ["BATCH", "MLP", "SIZES", "loss_fn", "make_data", "make_model"]

BATCH = 128
SIZES = (784, 512, 512, 10)


class MLP(nnx.Module):
    """Linear layers of these sizes with relu between them."""

    def __init__(self, sizes: tuple[int, ...], *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List(
            [nnx.Linear(i, o, rngs=rngs) for i, o in itertools.pairwise(sizes)]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


def make_model() -> MLP:
    return MLP(SIZES, rngs=nnx.Rngs(0))


def make_data(examples: int = 4096, source: Path | None = None) -> tuple[Any, Any]:
    """Vectors float32[n, 784] and labels."""
    return pictures.make_data(SIZES[:1], examples, source)
