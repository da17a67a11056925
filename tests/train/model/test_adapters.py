"""Flax models as pure functions over named arrays."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import freeze

from jgraph.errors import ConfigError
from jgraph.train.arguments import check_model
from jgraph.train.data.data import as_dataset
from jgraph.train.model.adapters import adapt
from tests.support.models import (
    LinenMLP,
    LinenNorm,
    NnxMLP,
    NnxNorm,
    cross_entropy,
    data,
    nnx_loss,
)

BATCH = data(8)


class Noise(nnx.Module):
    """Streams of keys in an array, as ``nnx.vmap`` over layers makes them."""

    def __init__(self, impl: str) -> None:
        keys = jax.random.split(jax.random.key(0, impl=impl), 3)
        self.stream = nnx.RngStream(keys, tag="noise")
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self) -> Any:
        keys = self.stream.key[...]
        return jax.vmap(jax.random.normal)(keys) * self.scale[...]


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_arrays_of_random_keys_are_folded_one_by_one(impl: str) -> None:
    def loss(model: Noise, batch: Any) -> Any:
        noise = model()
        return noise.sum(), {"noise": noise}

    adapter = adapt(Noise(impl), loss, seed=0)
    run = jax.jit(lambda step: adapter.loss(adapter.params, {}, 0, (0, step)))
    _, (first, _) = run(0)
    _, (second, _) = run(1)
    values = np.concatenate([first["noise"], second["noise"]])
    assert len(set(values.tolist())) == 6


def test_random_keys_of_a_model_are_not_its_state() -> None:
    adapter = adapt(NnxNorm(rngs=nnx.Rngs(0)), nnx_loss, seed=0)
    assert set(adapter.state) == {"norm"}


def test_nnx_loss_gives_new_statistics_and_keeps_the_model() -> None:
    model = NnxNorm(rngs=nnx.Rngs(0))
    adapter = adapt(model, nnx_loss, seed=0)
    _, (_, state) = adapter.loss(adapter.params, adapter.state, BATCH, (0, 0))
    assert not np.allclose(state["norm"]["mean"], 0)
    assert np.allclose(model.norm.mean[...], 0)


def test_statistics_are_found_beside_what_has_no_name() -> None:
    """As Flax's examples return them: ``loss, (new_state, logits)``."""
    model = LinenNorm()
    variables = model.init(jax.random.key(0), BATCH[0])

    def loss(variables: Any, batch: Any, rng: Any) -> Any:
        options: Any = {"mutable": ["batch_stats"], "rngs": {"dropout": rng}}
        logits, new = model.apply(variables, batch[0], train=True, **options)
        return cross_entropy(logits, batch[1]), (new, [logits, None, {"n": 8}])

    adapter = adapt(model, loss, seed=0, variables=variables)
    _, (metrics, state) = adapter.loss(adapter.params, adapter.state, BATCH, (0, 0))
    assert metrics == {"n": 8}
    means = [jax.tree.leaves(tree)[0] for tree in (adapter.state, state)]
    assert not np.allclose(*means)


def test_shared_parameters_stay_shared() -> None:
    class Tied(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(4, 4, rngs=rngs)
            self.again = self.first

        def __call__(self, x: Any) -> Any:
            return self.again(self.first(x))

    adapter = adapt(Tied(rngs=nnx.Rngs(0)), nnx_loss, seed=0)
    assert len(jax.tree.leaves(adapter.params)) == 2
    model = adapter.model(adapter.params, adapter.state)
    assert model.first is model.again


@pytest.mark.parametrize(
    ("take", "keys", "with_rng"),
    [
        (lambda got: lambda params, batch: got(params), {"Dense_0", "Dense_1"}, False),
        (lambda got: lambda variables, batch: got(variables), {"params"}, False),
        (lambda got: lambda p, b, rng: got(p, rng), {"Dense_0", "Dense_1"}, True),
        (
            lambda got: lambda params, batch, rng=None: got(params, rng),
            {"Dense_0", "Dense_1"},
            True,
        ),
    ],
)
def test_linen_loss_is_given_what_its_signature_asks_for(
    take: Any, keys: set[str], with_rng: bool
) -> None:
    taken: list[Any] = []

    def got(first: Any, rng: Any = None) -> float:
        taken[:] = first, rng
        return 0.0

    loss = take(got)
    check_model(LinenMLP(), loss)
    adapter = adapt(LinenMLP(), loss, seed=0, data=as_dataset(BATCH[0][:1]))
    adapter.loss(adapter.params, adapter.state, BATCH, (0, 0))
    assert set(taken[0]) == keys
    assert (taken[1] is not None) == with_rng


def test_linen_loss_that_returns_no_collection_leaves_it_as_it_was() -> None:
    loss = lambda variables, batch, rng: 0.0
    adapter = adapt(LinenNorm(), loss, seed=0, data=as_dataset(BATCH[0][:1]))
    _, (_, state) = adapter.loss(adapter.params, adapter.state, BATCH, (0, 0))
    assert state.keys() == {"batch_stats"}


def test_frozen_and_boxed_variables_are_taken() -> None:
    class Boxed(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            init = nn.with_partitioning(nn.initializers.ones, (None, "model"))
            return nn.Dense(2, kernel_init=init)(x)

    variables = freeze(Boxed().init(jax.random.key(0), BATCH[0]))
    adapter = adapt(Boxed(), lambda p, b: 0.0, seed=0, variables=variables)
    assert adapter.params["Dense_0"]["kernel"].shape == (4, 2)


def test_params_in_place_of_variables_are_refused() -> None:
    params = LinenMLP().init(jax.random.key(0), BATCH[0])["params"]
    with pytest.raises(ConfigError, match=r"none is 'params'; give what model\.init"):
        adapt(LinenMLP(), lambda p, b: 0.0, seed=0, variables=params)


def test_predictions_take_a_function_for_models_with_more_arguments() -> None:
    adapter = adapt(NnxMLP(rngs=nnx.Rngs(0)), nnx_loss, seed=0)
    plain = adapter.predict(adapter.params, adapter.state, BATCH[0], None)
    twice = lambda model, x: 2 * model(x)
    found = adapter.predict(adapter.params, adapter.state, BATCH[0], twice)
    np.testing.assert_allclose(found, 2 * plain)
