"""A language model of characters with one LSTM of 256: 0.5 million parameters.

Source: Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997.
"""

import jax
from flax import nnx

from benchmarks.models.characters import VOCABULARY, loss_fn, make_data

__all__ = ["BATCH", "LSTM", "loss_fn", "make_data", "make_model"]

BATCH = 32
WIDTH, HIDDEN = 128, 256


class LSTM(nnx.Module):
    """Embedding, LSTM, dense layer."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.rnn = nnx.RNN(nnx.LSTMCell(WIDTH, HIDDEN, rngs=rngs))
        self.dense = nnx.Linear(HIDDEN, VOCABULARY, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        return self.dense(self.rnn(self.embed(text)))


def make_model() -> LSTM:
    return LSTM(rngs=nnx.Rngs(0))
