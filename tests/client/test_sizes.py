"""Steps of any batch size, and meshes inside a task, over real servers."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.client.session import Session
from jgraph.errors import FeedError


def test_one_registration_serves_any_batch_without_tracing_again(
    cluster: Cluster, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    w = jg.Variable("w", jnp.ones((3, 2)), device="/job:ps/task:0")
    traced = []

    @jg.function(symbolic="batch, ...")
    def step(x: Any, y: Any) -> Any:
        traced.append(x.shape)

        def loss(value: Any) -> Any:
            with jg.device("/job:worker/task:0"):
                hidden = jnp.tanh(x @ value)
            with jg.device("/job:worker/task:1"):
                return ((hidden.sum(1) - y) ** 2).mean()

        value, gradient = jax.value_and_grad(loss)(w[...])
        w[...] = w[...] - 0.1 * gradient
        return value

    expected = np.ones((3, 2), np.float32)
    with caplog.at_level(logging.WARNING):
        for size in (4, 1, 7, 4):
            x = np.linspace(-1, 1, size * 3, dtype=np.float32).reshape(size, 3)
            y = np.arange(size, dtype=np.float32)

            def alone(value: Any, x: Any = x, y: Any = y) -> Any:
                return ((jnp.tanh(x @ value).sum(1) - y) ** 2).mean()

            wanted, gradient = jax.value_and_grad(alone)(expected)
            expected = expected - 0.1 * gradient
            np.testing.assert_allclose(session.run(step, x, y), wanted, rtol=1e-5)
    np.testing.assert_allclose(session.read([w])["w"], expected, rtol=1e-5)
    assert len(traced) == 2  # one finds the variables
    assert len(session._programs) == 1
    assert not caplog.records


def test_a_callable_made_for_a_named_size_takes_any(session: Session) -> None:
    shape = jax.export.symbolic_shape("n, 2")
    total = session.make_callable(
        lambda x: x.sum(0) * x.shape[0], jax.ShapeDtypeStruct(shape, "float32")
    )
    for n in (1, 3):
        assert total(np.ones((n, 2), np.float32)).tolist() == [n * n] * 2


def test_sizes_of_one_name_must_agree(session: Session) -> None:
    add = jg.function(lambda x, y: x + y, symbolic="n")
    assert session.run(add, np.ones(2), np.ones(2)).tolist() == [2, 2]
    with pytest.raises(FeedError, match=r"'y' of .* has n=3 where 'x' has n=2"):
        session.run(add, np.ones(2), np.ones(3))
    with pytest.raises(FeedError, match=r"takes \[n\]|wants float32\[n\]"):
        session.run(add, np.ones(0), np.ones(0))
    assert session.run(add, np.ones(3), np.ones(3)).tolist() == [2, 2, 2]
