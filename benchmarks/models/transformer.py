"""A language model of characters: a transformer of 4 layers, 0.84 million parameters.

Source: Vaswani et al., "Attention Is All You Need", 2017, decoder only, with the layer
normalisation first.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.models.characters import LENGTH, VOCABULARY, loss_fn, make_data

__all__ = ["BATCH", "Transformer", "loss_fn", "make_data", "make_model"]

BATCH = 32
WIDTH, HEADS, LAYERS = 128, 4, 4


class Layer(nnx.Module):
    """Attention to what came before, then two dense layers."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.dense1 = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.dense2 = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.dense2(nnx.gelu(self.dense1(self.norm2(x))))


class Transformer(nnx.Module):
    """Characters and places embedded, layers, dense layer."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.characters = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs=rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.dense = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        x = self.characters(text) + self.places(jnp.arange(text.shape[1]))
        mask = nnx.make_causal_mask(text)
        for layer in self.layers:
            x = layer(x, mask)
        return self.dense(self.norm(x))


def make_model() -> Transformer:
    return Transformer(rngs=nnx.Rngs(0))
