"""Towers and pipelines that are traced once for all batches they can cut."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jgraph as jg
from jgraph.errors import FeedError
from tests.support.plans import PS
from tests.support.sizes import batch, check_sizes


def squares(y: Any, t: Any) -> Any:
    return ((y - t) ** 2).mean()


def test_towers_cut_any_batch_that_their_number_divides() -> None:
    w = jg.Variable("w", jnp.ones((3, 2)) / 3, device=PS[0])

    @jg.function(symbolic="2*b, ...")
    def step(x: Any) -> Any:
        run = jg.towers(lambda w, x: squares(jnp.tanh(x @ w), 0.5), 2)
        loss, gradient = run(w[...], x)
        w[...] = w[...] - gradient
        return loss

    check_sizes(step, [w], 4, 2, 6)


def test_a_pipeline_cuts_any_batch_that_its_microbatches_divide() -> None:
    stages = [lambda w, x: jnp.tanh(x @ w), lambda w, x: x @ w]
    pipe = jg.Pipeline(stages, squares, microbatches=2)
    params = [np.ones((3, 4), np.float32) / 3, np.ones((4, 1), np.float32) / 4]

    @jg.function(symbolic="2*b, ...")
    def step(x: Any) -> Any:
        return pipe.value_and_grad(params, x, x[:, :1])

    check_sizes(step, [], 2, 6)


def test_a_batch_of_any_size_cannot_be_cut_and_says_so() -> None:
    run = jg.towers(lambda w, x: squares(x @ w, 0.5), 2)
    step = jg.function(lambda x: run(jnp.ones((3, 2)), x), symbolic="b, ...")
    with pytest.raises(FeedError, match="b examples, which cannot be cut into 2"):
        step.graph(batch(4))
