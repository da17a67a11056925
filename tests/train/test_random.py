"""A loss draws other random numbers in each step, and is told if it does not."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

from jgraph.client.cluster import Cluster
from jgraph.errors import ConfigError, OuterStateError
from jgraph.train.data.data import as_dataset
from jgraph.train.model.adapters import adapt
from jgraph.train.step.train_step import TrainStep
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.models import BATCH, LinenMLP, NnxMLP, cross_entropy, data


class Dropped(nnx.Module):
    """Dropout as current tutorials have it: the random numbers come with the call."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: Any, rngs: nnx.Rngs | None = None) -> Any:
        return self.last(self.dropout(nnx.relu(self.first(x)), rngs=rngs))


def dropped_loss(model: Dropped, batch: Any, rngs: nnx.Rngs) -> Any:
    x, y = batch
    mask = model.dropout(jnp.ones(16), rngs=rngs)
    number = (mask > 0) @ 2.0 ** jnp.arange(16)
    return cross_entropy(model(x, rngs), y), {"mask": number}


def trained(loss: Any, model: Any = None, **options: Any) -> Any:
    model = model or Dropped(rngs=nnx.Rngs(0))
    trainer = Trainer(model, loss, optax.sgd(0.1), **options)
    run = trainer.fit(data(), steps=4, batch_size=BATCH, progress=False)
    name = "mask" if loss is dropped_loss else "loss"
    values = run.metrics(name)["value"]
    trainer.close()
    return values


@pytest.mark.parametrize(
    "strategy",
    [None, AsyncPS(), pytest.param(SyncPS(), marks=pytest.mark.nightly)],
    ids=repr,
)
def test_an_nnx_loss_is_given_other_random_numbers_in_each_step(
    strategy: Strategy | None, request: pytest.FixtureRequest
) -> None:
    cluster = None if strategy is None else request.getfixturevalue("cluster")
    masks = trained(dropped_loss, strategy=strategy, cluster=cluster)
    assert len({float(mask) for mask in masks}) == 4


def test_a_loss_with_random_numbers_is_evaluated_without_dropout() -> None:
    model = Dropped(rngs=nnx.Rngs(0))
    trainer = Trainer(model, dropped_loss, optax.sgd(0.1))
    x, y = data()
    model.dropout.deterministic = True
    expected = cross_entropy(model(jnp.asarray(x)), y)
    found = [trainer.evaluate((x, y))["loss"] for _ in range(2)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (NnxMLP(rngs=nnx.Rngs(0)), r"\(m, x, y\); .* or loss\(model, batch, rngs\)"),
        (LinenMLP(), r"\(m, x, y\); .* or loss\(params, batch, rng\)"),
    ],
)
def test_a_third_argument_that_is_no_rng_is_refused(model: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(model, lambda m, x, y: 0.0, optax.sgd(0.1))


def test_random_numbers_from_outside_point_to_the_third_argument() -> None:
    rngs = nnx.Rngs(0)
    loss = lambda model, batch: cross_entropy(model(batch[0], rngs), batch[1])
    with pytest.raises(OuterStateError, match=r"def loss\(model, batch, rngs\)"):
        trained(loss)


class LinenDropped(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = nn.Dropout(0.5, deterministic=not train)(nn.relu(nn.Dense(8)(x)))
        return nn.Dense(2)(x)


def linen_loss(key: Any) -> Any:
    def loss(params: Any, batch: Any, rng: Any) -> Any:
        rngs = {"dropout": key(rng)}
        logits = LinenDropped().apply({"params": params}, batch[0], True, rngs=rngs)
        return cross_entropy(logits, batch[1])

    return loss


SAME: dict[str, Any] = {
    "generator made in the loss": lambda model, batch: cross_entropy(
        model(batch[0], nnx.Rngs(0)), batch[1]
    ),
    "key made in the loss": lambda model, batch: cross_entropy(
        model(batch[0], nnx.Rngs(dropout=jax.random.key(3))), batch[1]
    ),
    "old kind of key, split": lambda model, batch: cross_entropy(
        model(batch[0], nnx.Rngs(jax.random.split(jax.random.PRNGKey(3))[1])), batch[1]
    ),
    "linen": linen_loss(lambda rng: jax.random.key(0)),
    "in a loop": lambda model, batch: jax.lax.scan(
        lambda _, x: (cross_entropy(model(x, nnx.Rngs(0)), batch[1]), None),
        jnp.float32(0),
        batch[0][None],
    )[0],
}
OTHER: dict[str, Any] = {
    "given": dropped_loss,
    "by the batch": lambda model, batch: cross_entropy(
        model(
            batch[0],
            nnx.Rngs(jax.random.fold_in(jax.random.key(0), batch[1].sum())),
        ),
        batch[1],
    ),
    "linen": linen_loss(lambda rng: rng),
    "none": lambda model, batch: cross_entropy(
        model.last(model.first(batch[0])), batch[1]
    ),
}


def step_graph(loss: Any, *, linen: bool) -> None:
    model = LinenDropped() if linen else Dropped(rngs=nnx.Rngs(0))
    adapter = adapt(model, loss, seed=0, data=as_dataset(data()))
    TrainStep(adapter, optax.sgd(0.1)).graph(as_dataset(data()).avals(BATCH))


@pytest.mark.parametrize("name", SAME)
def test_the_same_random_numbers_in_every_step_are_warned_of(name: str) -> None:
    with pytest.warns(UserWarning, match=r"same random numbers in every step, at .*py"):
        step_graph(SAME[name], linen=name == "linen")


@pytest.mark.parametrize("name", OTHER)
def test_random_numbers_of_the_step_are_not_warned_of(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_graph(OTHER[name], linen=name == "linen")


def test_a_synchronous_step_warns_too(cluster: Cluster) -> None:
    loss = SAME["generator made in the loss"]
    with pytest.warns(UserWarning, match="same random numbers"):
        trained(loss, strategy=SyncPS(), cluster=cluster)
