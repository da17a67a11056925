"""Clipping and noise of private updates, against loops by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.errors import ConfigError
from jgraph.train.privacy.options import Privacy
from jgraph.train.privacy.private_update import PrivateUpdate, SampledBatch

CLIP = 0.5
ROOM, COUNT = 11, 7


def update(**options: Any) -> PrivateUpdate:
    defaults = {"noise_multiplier": 2.0, "clip": CLIP, "delta": 1e-5}
    return PrivateUpdate(Privacy(**{**defaults, **options}))


def loss(params: Any, state: Any, batch: Any, seeds: Any) -> Any:
    del seeds
    x, y = batch
    value = jnp.mean((x @ params["w"] + params["b"] - y) ** 2)
    return value, ({"seen": jnp.int32(len(y)), "largest": jnp.max(y)}, state)


def batch(rng: np.random.Generator) -> tuple[Any, Any]:
    x = rng.normal(size=(ROOM, 3)).astype(np.float32)
    y = rng.normal(size=ROOM).astype(np.float32)
    x[COUNT:], y[COUNT:] = 0, 0
    return x, y


PARAMS = {"w": jnp.ones(3), "b": jnp.float32(0.3)}


def computed(some: PrivateUpdate, x: Any, y: Any) -> Any:
    sampled = SampledBatch((x, y), jnp.arange(ROOM) < COUNT, expected=5)

    @jax.jit
    def run() -> Any:
        now = {"params": PARAMS, "state": {}}
        result = some.computed(loss, now, sampled, 3, 1)
        return result.loss, result.metrics, result.grads

    return jax.tree.map(np.asarray, run())


def by_hand(x: Any, y: Any, skip: int | None = None) -> Any:
    total = {"w": np.zeros(3), "b": 0.0}
    for n in range(COUNT):
        if n == skip:
            continue
        grads = jax.grad(lambda p: loss(p, {}, (x[n : n + 1], y[n : n + 1]), 0)[0])(  # noqa: B023
            PARAMS
        )
        norm = np.sqrt(sum(np.sum(np.square(g)) for g in grads.values()))
        for name, grad in grads.items():
            total[name] = total[name] + np.asarray(grad) * min(1.0, CLIP / norm)
    return total


@pytest.mark.parametrize("at_once", [1, 3, 32])
def test_the_sum_is_that_of_gradients_clipped_one_by_one(at_once: int) -> None:
    x, y = batch(np.random.default_rng(0))
    value, metrics, grads = computed(update(examples_at_once=at_once), x, y)
    due = by_hand(x, y)
    for name in due:
        np.testing.assert_allclose(grads[name], due[name], rtol=1e-5, atol=1e-6)
    whole = loss(PARAMS, {}, (x[:COUNT], y[:COUNT]), 0)[0]
    np.testing.assert_allclose(value, whole, rtol=1e-5)
    assert metrics["seen"] == COUNT
    np.testing.assert_allclose(metrics["largest"], y[:COUNT].mean(), rtol=1e-5)


def test_no_example_adds_more_than_the_norm() -> None:
    x, y = batch(np.random.default_rng(1))
    _, _, before = computed(update(), x, y)
    y[2] = 1e9
    _, _, after = computed(update(), x, y)
    moved = sum(np.sum(np.square(after[n] - before[n])) for n in before)
    assert 0 < np.sqrt(moved) <= 2 * CLIP * (1 + 1e-5)


def test_an_example_that_is_not_finite_adds_nothing() -> None:
    x, y = batch(np.random.default_rng(2))
    y[4] = np.nan
    _, _, grads = computed(update(), x, y)
    due = by_hand(x, y, skip=4)
    for name in due:
        np.testing.assert_allclose(grads[name], due[name], rtol=1e-5, atol=1e-6)


def test_a_sample_of_nothing_is_a_sum_of_nothing() -> None:
    sampled = SampledBatch((jnp.ones((4, 3)), jnp.ones(4)), jnp.zeros(4, bool), 2)
    now = {"params": PARAMS, "state": {}}
    result = update().computed(loss, now, sampled, 0, 0)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(result.grads))
    assert float(result.loss) == 0.0


def test_the_way_of_a_client_is_cut_as_a_whole() -> None:
    way = {"a": jnp.full(4, 3.0), "b": jnp.full((2, 2), 4.0)}
    cut = update().clipped(way)
    norm = np.sqrt(sum(np.sum(np.square(v)) for v in cut.values()))
    np.testing.assert_allclose(norm, CLIP, rtol=1e-6)
    np.testing.assert_allclose(cut["b"], 4.0 * CLIP / 10, rtol=1e-6)
    short = {"a": jnp.full(4, 0.01), "b": jnp.zeros((2, 2))}
    np.testing.assert_array_equal(update().clipped(short)["a"], short["a"])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.complex64])
def test_parameters_whose_sums_are_rounded_before_they_have_noise_are_refused(
    dtype: Any,
) -> None:
    params = {"dense": {"bias": jnp.zeros(2), "kernel": jnp.zeros((2, 2), dtype)}}
    with pytest.raises(ConfigError, match=r"dense/kernel is of .*param_dtype"):
        update().check(params)


def test_noise_has_the_deviation_that_the_accountant_assumes() -> None:
    some, expected = update(), 10
    total = {"w": jnp.full((300, 300), 20.0), "b": jnp.zeros(50_000)}
    words = some.entropy(total)
    rng = np.random.default_rng(0)
    entropy = rng.integers(0, 2**32, (2, *words.shape), np.uint32)
    first, second = (some.mean(total, jnp.asarray(e), expected) for e in entropy)
    deviation = 2.0 * CLIP
    noise = {n: np.asarray(first[n]) * expected - total[n] for n in total}
    for values in noise.values():
        assert abs(values.std() / deviation - 1) < 0.02
        assert abs(values.mean()) < 5 * deviation / np.sqrt(values.size)
    # Of a normal number the fourth moment is three times the squared second.
    kurtosis = np.mean(noise["w"] ** 4) / np.mean(noise["w"] ** 2) ** 2
    assert abs(kurtosis - 3) < 0.1
    assert not np.allclose(first["b"], second["b"])
    both = noise["w"].ravel()[:50_000] * noise["b"]
    assert abs(both.mean()) < 5 * deviation**2 / np.sqrt(both.size)
