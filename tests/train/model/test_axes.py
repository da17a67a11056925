"""Models that average over a named axis train as they are."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

from jgraph.errors import ConfigError
from jgraph.train.model.adapters import NamedAxes
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.models import BATCH, cross_entropy, data


class Normed(nnx.Module):
    def __init__(self, axis_name: str | None, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, axis_name=axis_name, rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.norm(nnx.relu(self.first(x))))


def normed_loss(model: Any, batch: Any) -> Any:
    return cross_entropy(model(batch[0]), batch[1])


class LinenNormed(nn.Module):
    axis_name: str | None

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = nn.relu(nn.Dense(8)(x))
        x = nn.BatchNorm(use_running_average=not train, axis_name=self.axis_name)(x)
        return nn.Dense(2)(x)


def linen_normed_loss(axis_name: str | None) -> Any:
    def loss(variables: Any, batch: Any) -> Any:
        logits, updates = LinenNormed(axis_name).apply(
            variables, batch[0], train=True, mutable=["batch_stats"]
        )
        return cross_entropy(logits, batch[1]), dict(updates)

    return loss


def trained(axis_name: str | None, *, linen: bool, **options: Any) -> Any:
    model: Any = LinenNormed(axis_name)
    loss: Any = linen_normed_loss(axis_name)
    if not linen:
        model, loss = Normed(axis_name, rngs=nnx.Rngs(0)), normed_loss
    trainer = Trainer(model, loss, optax.sgd(0.1), **options)
    run = trainer.fit(data(), steps=4, batch_size=BATCH, progress=False)
    losses = run.metrics("loss")["value"]
    assert trainer.predict(data()[0]).shape == (40, 2)
    trainer.close()
    return losses


@pytest.mark.parametrize(
    ("strategy", "linen"),
    [
        pytest.param(None, False, marks=pytest.mark.nightly),
        (None, True),
        pytest.param(AsyncPS(), True, marks=pytest.mark.nightly),
        (SyncPS(), False),
    ],
    ids=repr,
)
def test_the_mean_over_a_named_axis_is_that_of_a_batch(
    strategy: Strategy | None, linen: bool, request: pytest.FixtureRequest
) -> None:
    options: dict[str, Any] = {"strategy": strategy, "linen": linen}
    if strategy is not None:
        options["cluster"] = request.getfixturevalue("cluster")
    found = trained("batch", **options)
    if not isinstance(strategy, AsyncPS):  # two workers: in any order
        np.testing.assert_allclose(found, trained(None, **options), rtol=1e-6)
    assert np.isfinite(found).all()


def test_axes_may_have_any_name_and_several() -> None:
    def fn(x: Any) -> Any:
        return jax.lax.pmean(x, ("data", "model")) + jax.lax.axis_index("rows")

    axes = NamedAxes()
    for _ in range(2):
        assert axes.called(fn, jnp.arange(3.0)).tolist() == [0.0, 1.0, 2.0]


def test_a_name_that_is_not_defined_is_told_as_such() -> None:
    def fn(x: Any) -> Any:
        return x + undefined  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(NameError, match="'undefined' is not defined"):
        NamedAxes().called(fn, 1.0)


def test_a_model_on_an_explicit_mesh_is_refused_in_words() -> None:
    explicit = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((1, 1), ("batch", "model"), axis_types=(explicit,) * 2)
    init = nnx.with_partitioning(nnx.initializers.ones, (None, "model"))
    with jax.set_mesh(mesh):
        model = nnx.Linear(4, 2, kernel_init=init, rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match=r"has the axes of a mesh.*Type\.Auto"):
        Trainer(model, normed_loss, optax.sgd(0.1)).model()
