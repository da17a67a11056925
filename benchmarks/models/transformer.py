"""A language model of characters: a transformer of 4 layers, 0.84 million parameters.

Source: Vaswani et al., "Attention Is All You Need", 2017, decoder only, with the layer
normalisation first.
"""

from dataclasses import dataclass
from typing import final

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.models.characters import LENGTH, VOCABULARY, loss_fn, make_data

__all__ = ["BATCH", "Sizes", "Transformer", "loss_fn", "make_data", "make_model"]

BATCH = 32


@final
@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a transformer; the hidden layer of each block is ``hidden`` times as wide."""

    width: int = 128
    heads: int = 4
    layers: int = 4
    length: int = LENGTH
    hidden: int = 4
    bias: bool = True


class Layer(nnx.Module):
    """Attention to what came before, then two dense layers."""

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs) -> None:
        width, hidden = sizes.width, sizes.hidden * sizes.width
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            sizes.heads, width, decode=False, use_bias=sizes.bias, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.dense1 = nnx.Linear(width, hidden, rngs=rngs)
        self.dense2 = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.dense2(nnx.gelu(self.dense1(self.norm2(x))))


class Transformer(nnx.Module):
    """Characters and places embedded, layers, dense layer."""

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs) -> None:
        self.characters = nnx.Embed(VOCABULARY, sizes.width, rngs=rngs)
        self.places = nnx.Embed(sizes.length, sizes.width, rngs=rngs)
        self.layers = nnx.List([Layer(sizes, rngs=rngs) for _ in range(sizes.layers)])
        self.norm = nnx.LayerNorm(sizes.width, rngs=rngs)
        self.dense = nnx.Linear(sizes.width, VOCABULARY, use_bias=sizes.bias, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        x = self.characters(text) + self.places(jnp.arange(text.shape[1]))
        mask = nnx.make_causal_mask(text)
        for layer in self.layers:
            x = layer(x, mask)
        return self.dense(self.norm(x))


def make_model() -> Transformer:
    return Transformer(Sizes(), rngs=nnx.Rngs(0))
