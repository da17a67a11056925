"""A language model of words: an LSTM between an embedding and a softmax.

Source: Zaremba et al., "Recurrent Neural Network Regularization", 2014; tied output:
Press and Wolf, "Using the Output Embedding to Improve Language Models", 2017.
"""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jgraph.client.cluster import Cluster
from jgraph.examples.options import Figures, Options
from jgraph.examples.text import read_corpus, sequences

FILE = "input.txt"
VOCABULARY = 4000
WIDTH = 128
LENGTH = 32
BATCH_SIZE = 16
LEARNING_RATE = 2e-3


class LSTM(nnx.Module):
    """Predicts the next word from those before it."""

    def __init__(self, words: int, *, tied: bool, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(words, WIDTH, rngs=rngs)
        self.cell = nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs)
        self.out = None if tied else nnx.Linear(WIDTH, words, rngs=rngs)

    def __call__(self, words: jax.Array) -> jax.Array:
        """Returns logits float32[b, t, words] of words int32[b, t]."""

        def step(carry: Any, x: jax.Array) -> Any:
            return self.cell(carry, x)

        zeros = jnp.zeros((len(words), WIDTH))
        x = self.embed(words).swapaxes(0, 1)
        _, outputs = jax.lax.scan(step, (zeros, zeros), x)
        out = self.embed.attend if self.out is None else self.out
        logits: jax.Array = out(outputs.swapaxes(0, 1))
        return logits


def loss_fn(model: LSTM, batch: Any) -> jax.Array:
    """Returns the mean cross entropy of the next words."""
    logits = model(batch["words"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"])
    loss: jax.Array = losses.mean()
    return loss


def run(
    directory: Path, cluster: Cluster | None, options: Options, *, tied: bool = False
) -> Figures:
    """Trains on a directory with ``input.txt``.

    Args:
      directory: with the text.
      cluster: where to train; this process if unset.
      options: how long.
      tied: use the embedding for the output too. It is then needed whole, so it
        travels whole, and the plan says so.

    Returns:
      ``perplexity`` on the last tenth of the text, and that of the word frequencies
      of the rest: ``unigram_perplexity``.

    Raises:
      DataError: the file is not there, or too short.
    """
    corpus = read_corpus(directory / FILE, VOCABULARY)
    # Half a sequence further each time: most words are seen with words before them.
    train = sequences(corpus.train, LENGTH, LENGTH // 2)
    test = sequences(corpus.test, LENGTH)
    options.say(
        f"{len(corpus.train)} words to train on, {len(corpus.test)} to test, "
        f"{len(corpus.words)} different ones"
    )
    model = LSTM(len(corpus.words), tied=tied, rngs=nnx.Rngs(options.seed))
    tx = optax.adam(LEARNING_RATE)
    # Adam would change rows that no word names; here, those stay as they are.
    trainer, _ = options.fit(
        cluster, model, loss_fn, tx, train, BATCH_SIZE, sparse="lazy"
    )
    return {
        "perplexity": round(math.exp(trainer.evaluate(test, 64)["loss"]), 1),
        "unigram_perplexity": round(corpus.unigram_perplexity(test["next"]), 1),
        "words": len(corpus.words),
        "tied": tied,
    }
