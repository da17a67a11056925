"""A transformer of any depth that is narrow: many small variables, little to compute.

Adam keeps two arrays for each parameter and a count, and the Trainer one for the number
of updates: 305 variables of 8 layers, 881 of 24.
"""

from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.models.characters import VOCABULARY, loss_fn, make_data as make_text

__all__ = [
    "BATCH",
    "Narrow",
    "NarrowTransformer",
    "count",
    "loss_fn",
    "make_data",
    "make_model",
]

BATCH = 4
WIDTH, HEADS, LENGTH = 16, 2, 8


class Layer(nnx.Module):
    """Attention to what came before, then two dense layers; 12 parameters."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, use_bias=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.dense1 = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.dense2 = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.dense2(nnx.gelu(self.dense1(self.norm2(x))))


class NarrowTransformer(nnx.Module):
    """Characters and places embedded, layers, dense layer; 5 more parameters."""

    def __init__(self, layers: int, *, rngs: nnx.Rngs) -> None:
        self.characters = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs=rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.dense = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        x = self.characters(text) + self.places(jnp.arange(text.shape[1]))
        mask = nnx.make_causal_mask(text)
        for layer in self.layers:
            x = layer(x, mask)
        return self.dense(self.norm(x))


def make_model(layers: int) -> NarrowTransformer:
    return NarrowTransformer(layers, rngs=nnx.Rngs(0))


def make_data(examples: int = 1024, source: Path | None = None) -> tuple[Any]:
    """Pieces int32[n, LENGTH + 1] of random characters, or of a text file."""
    (text,) = make_text(examples, source)
    return (text[:, : LENGTH + 1].copy(),)


def count(layers: int) -> int:
    """Returns how many variables training has, with Adam's and the Trainer's."""
    parameters = 12 * layers + 5
    return 3 * parameters + 2


@final
class Narrow:
    """The model of one depth, as ``benchmarks.models.Work``."""

    BATCH = BATCH
    loss_fn = staticmethod(loss_fn)
    make_data = staticmethod(make_data)

    def __init__(self, layers: int) -> None:
        self._layers = layers

    def make_model(self) -> NarrowTransformer:
        return make_model(self._layers)
