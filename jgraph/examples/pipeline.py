"""A transformer that predicts the next word, in stages on as many workers.

Sources: Vaswani et al., "Attention Is All You Need", 2017; Radford et al., "Language
Models are Unsupervised Multitask Learners", 2019 (norms first, learnt positions).
"""

import math
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax

from jgraph.client.cluster import Cluster
from jgraph.errors import ConfigError
from jgraph.examples.lm import FILE, LENGTH, VOCABULARY
from jgraph.examples.options import Figures, Options
from jgraph.examples.text import read_corpus, sequences
from jgraph.train.model.trees import Tree
from jgraph.train.pipeline.pipeline import Pipeline

WIDTH = 128
HEADS = 4
BATCH_SIZE = 32
LEARNING_RATE = 1e-3
_REPORT = 100  # steps


class Block(nn.Module):
    """Attention to earlier words, then two layers for each word alone."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns float32[b, t, w] for the same."""
        attention = nn.MultiHeadDotProductAttention(HEADS)
        mask = nn.make_causal_mask(x[..., 0])
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        hidden = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(hidden)


class Stage(nn.Module):
    """A block, after the embedding in the first stage, before the output in the last.

    Attributes:
      words: different words.
      is_first: whether it takes words int32[b, t].
      is_last: whether it gives logits float32[b, t, words].
    """

    words: int
    is_first: bool
    is_last: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns what the next stage takes, float32[b, t, w]."""
        if self.is_first:
            places = self.param("places", nn.initializers.normal(0.02), (LENGTH, WIDTH))
            x = nn.Embed(self.words, WIDTH)(x) + places
        x = Block()(x)
        if self.is_last:
            x = nn.Dense(self.words)(nn.LayerNorm()(x))
        return x


def loss_fn(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the mean cross entropy of the next words."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    loss: jax.Array = losses.mean()
    return loss


def run(
    directory: Path,
    cluster: Cluster | None,
    options: Options,
    *,
    microbatches: int = 8,
    schedule: str = "1f1b",
    replicas: int = 1,
) -> Figures:
    """Trains on a directory with ``input.txt``, a stage on each worker.

    With replicas, workers are dealt to them, and each computes its part of a batch.

    Args:
      directory: with the text.
      cluster: where to train.
      options: how long.
      microbatches: parts of a batch of 32 sequences.
      schedule: see ``Pipeline``.
      replicas: likewise.

    Returns:
      ``perplexity`` on the last tenth of the text, that of the word frequencies of the
      rest, ``unigram_perplexity``, and the ``bubble`` of the schedule.

    Raises:
      DataError: the file is not there, or too short.
      ConfigError: there is no cluster, or it has workers that cannot be dealt evenly.
    """
    if cluster is None:
        raise ConfigError("a pipeline needs a cluster: jg.LocalCluster(workers=4)")
    workers = len(cluster.tasks("worker"))
    count = workers // max(replicas, 1)
    if workers != count * replicas:
        raise ConfigError(
            f"{workers} workers cannot be dealt to {replicas} replicas; give a "
            f"multiple of {replicas}, for example --workers {replicas * (count + 1)}"
        )
    corpus = read_corpus(directory / FILE, VOCABULARY)
    train = sequences(corpus.train, LENGTH, LENGTH // 2)
    test = sequences(corpus.test, LENGTH)
    words = len(corpus.words)
    pipe = Pipeline(
        [Stage(words, n == 0, n == count - 1) for n in range(count)],
        loss_fn,
        microbatches=microbatches,
        schedule=schedule,
        replicas=replicas,
    )
    options.say(f"{pipe.schedule}\n")
    step = pipe.step(
        pipe.init(options.seed, train["words"][:1]), optax.adam(LEARNING_RATE)
    )
    order = np.random.default_rng(options.seed)
    with cluster.session() as session:
        for number in range(options.steps):
            chosen = order.integers(len(train["words"]), size=BATCH_SIZE)
            loss = session.run(
                step.train, train["words"][chosen], train["next"][chosen]
            )
            if number % _REPORT == 0 or number == options.steps - 1:
                options.say(f"step {number}: loss {float(loss):.3f}")
        params = step.params(session)
    return {
        "perplexity": round(math.exp(_test_loss(pipe, params, test)), 1),
        "unigram_perplexity": round(corpus.unigram_perplexity(test["next"]), 1),
        "words": words,
        "microbatches": microbatches,
        "replicas": replicas,
        "bubble": round(pipe.bubble, 3),
    }


def _test_loss(pipe: Pipeline, params: list[Tree], test: dict[str, Any]) -> float:
    """Returns the loss of the test data, computed here."""
    loss = jax.jit(lambda x, y: loss_fn(pipe.apply(params, x), y))
    total = 0.0
    for first in range(0, len(test["words"]), BATCH_SIZE):
        x, y = (test[name][first : first + BATCH_SIZE] for name in ("words", "next"))
        total += float(loss(x, y)) * len(x)
    return total / len(test["words"])
