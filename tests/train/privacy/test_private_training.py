"""Private training in this process and on servers, against loops by hand."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.coordination.run.privacy_account import Spent
from jgraph.errors import ConfigError, DataError
from jgraph.train.privacy.accounting import epsilon_of
from jgraph.train.trainer import Trainer
from tests.support.models import (
    NnxMLP,
    NnxNorm,
    cross_entropy,
    data,
    nnx_loss,
    parameters,
)
from tests.support.servers import connected

pytestmark = pytest.mark.usefixtures("nothing_is_left")

EXAMPLES, STEPS, CLIP, DELTA = 40, 4, 0.05, 1e-5
SILENT = 1e-6
"""A noise that changes nothing, to compare what is left with a loop by hand."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with connected(ps=2, worker=2) as cluster:
        yield cluster


def privacy(noise: float = SILENT, **options: Any) -> jg.Privacy:
    return jg.Privacy(
        **{"clip": CLIP, "delta": DELTA, **options}, noise_multiplier=noise
    )


def trainer(strategy: Any, cluster: Any = None, **options: Any) -> Trainer:
    model = options.pop("model", NnxMLP)(rngs=nnx.Rngs(0))
    tx = options.pop("tx", optax.sgd(0.5))
    return Trainer(model, nnx_loss, tx, cluster=cluster, strategy=strategy, **options)


def fit(there: Trainer, batch_size: int, steps: int = STEPS, **options: Any) -> Any:
    some = data(EXAMPLES)
    return there.fit(
        some, steps=steps, batch_size=batch_size, progress=False, **options
    )


def assert_close(found: list[Any], wanted: list[Any], atol: float = 1e-5) -> None:
    for value, due in zip(found, wanted, strict=True):
        np.testing.assert_allclose(value, due, rtol=1e-4, atol=atol)


def by_hand(tx: Any) -> list[Any]:
    """Gradient descent on all examples, each one's gradient cut to the norm."""
    graph, params = nnx.split(NnxMLP(rngs=nnx.Rngs(0)))
    x, y = data(EXAMPLES)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return cross_entropy(nnx.merge(graph, params)(x[None]), y[None])

    each = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))
    opt = tx.init(params)
    for _ in range(STEPS):
        grads = each(params, x, y)
        squares = [
            np.square(g).reshape(EXAMPLES, -1).sum(1) for g in jax.tree.leaves(grads)
        ]
        scale = np.minimum(1, CLIP / np.sqrt(sum(squares)))
        total = partial(jnp.tensordot, scale / EXAMPLES, axes=1)
        mean = jax.tree.map(total, grads)
        updates, opt = tx.update(mean, opt, params)
        params = optax.apply_updates(params, updates)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.to_pure_dict(params))]


TX = optax.adam(1e-2)


def test_updates_of_all_examples_are_those_of_a_loop_by_hand() -> None:
    """A sample of the rate 1 has all of them, so nothing is drawn but the noise."""
    there = trainer(jg.Local(privacy=privacy()), tx=TX)
    assert_close(parameters(fit(there, EXAMPLES).model()), by_hand(TX))


def test_workers_that_draw_all_examples_make_the_same_updates(
    cluster: Cluster,
) -> None:
    with trainer(jg.SyncPS(privacy=privacy()), cluster, tx=TX) as there:
        run = fit(there, EXAMPLES // 2)
        assert_close(parameters(run.model()), by_hand(TX))
        assert "cut to the norm 0.05" in str(there.plan())
        assert run.metrics("contributions")["value"].tolist() == [2] * STEPS


def test_epsilon_is_that_of_poisson_samples_by_all_workers(cluster: Cluster) -> None:
    with trainer(jg.SyncPS(privacy=privacy(1.0)), cluster) as there:
        run = fit(there, 5, steps=6)
        due = epsilon_of([Spent("example", 1.0, 10 / EXAMPLES, 6)], DELTA)
        assert abs(run.epsilon - due) < 1e-9
        assert run.metrics("epsilon")["step"][-1] == 6
        assert "epsilon=" in repr(run)


def test_no_seed_decides_the_noise(cluster: Cluster) -> None:
    """All examples are in each sample, so that two runs differ by their noise alone."""
    found = []
    for where in (None, None, cluster, cluster):
        private = privacy(1.0)
        strategy = jg.SyncPS(privacy=private) if where else jg.Local(privacy=private)
        with trainer(strategy, where) as there:
            model = fit(there, EXAMPLES // (2 if where else 1), steps=1).model()
            found.append(np.concatenate([p.ravel() for p in parameters(model)]))
    due = 0.5 * CLIP / EXAMPLES * np.sqrt(2)  # 0.5: the rate of the optimizer
    for n, one in enumerate(found):
        for other in found[:n]:
            assert 0.5 < (one - other).std() / due < 1.8


def test_a_target_ends_a_run_before_it_is_passed() -> None:
    there = trainer(jg.Local(privacy=privacy(2.0, target_epsilon=0.8)))
    run = fit(there, 4, steps=30)
    kind = ("example", 2.0, 0.1)
    assert run.state == "done"
    assert 3 < run.steps < 30
    assert run.epsilon <= 0.8
    assert epsilon_of([Spent(*kind, run.steps + 1)], DELTA) > 0.8
    with pytest.raises(ConfigError, match=r"target_epsilon=0\.8 allows no update"):
        fit(there, 4, steps=1)
    assert there.run is run


@pytest.mark.nightly  # smaller: test_accounting.py
def test_a_checkpoint_goes_on_with_what_was_spent(tmp_path: Path) -> None:
    first = trainer(jg.Local(privacy=privacy(1.0)))
    keep = jg.Checkpoints(tmp_path / "run", every=3)
    run = fit(first, 4, steps=6, checkpoint=keep)
    run.save(tmp_path / "alone")
    due = epsilon_of([Spent("example", 1.0, 0.1, 10)], DELTA)
    for path in ("run", "alone"):
        second = trainer(jg.Local(privacy=privacy(1.0)))
        second.restore(tmp_path / path)
        assert abs(fit(second, 4, steps=4).epsilon - due) < 1e-9
    # Who keeps no account can read it as any other.
    plain = trainer(jg.Local()).restore(tmp_path / "alone")
    assert_close(parameters(plain.model()), parameters(run.model()), 0)
    fit(plain, 4, steps=1)
    plain.save(tmp_path / "plain")
    third = trainer(jg.Local(privacy=privacy(1.0)))
    with pytest.raises(ConfigError, match="no account of the privacy"):
        third.restore(tmp_path / "plain")
    assert_close(parameters(third.model()), parameters(trainer(jg.Local()).model()), 0)


def test_what_has_no_noise_is_refused(cluster: Cluster) -> None:
    private = jg.Local(privacy=privacy())
    with pytest.raises(ConfigError, match="as BatchNorm does"):
        fit(trainer(private, model=NnxNorm), 4)
    with pytest.raises(ConfigError, match="check_finite=True ends a run"):
        fit(trainer(private, check_finite=True), 4)
    with pytest.raises(ConfigError, match="might pass its epsilon unseen"):
        fit(trainer(jg.SyncPS(privacy=privacy()), cluster), 4, detached=True)
    with pytest.raises(ConfigError, match="comes as it is read"):
        trainer(private).fit(iter([data(8)]), steps=1, progress=False)
    with pytest.raises(DataError, match="batch_size is 21"):
        fit(trainer(jg.SyncPS(privacy=privacy()), cluster), 21)
    with pytest.raises(ConfigError, match=r"takes jg\.Privacy"):
        trainer(jg.SyncPS(privacy=1), cluster)  # type: ignore[arg-type]


def test_rounds_of_clients_are_cut_and_summed(cluster: Cluster) -> None:
    """With a norm that cuts nothing, and hardly any noise, they are plain rounds."""
    wide = privacy(clip=1e3, noise=1e-9, unit="client")
    found = []
    for private in (wide, None):
        strategy = jg.LocalSGD(sync_every=3, privacy=private)
        with trainer(strategy, cluster, tx=optax.sgd(0.1)) as there:
            found.append(fit(there, 4, steps=2))
    assert_close(parameters(found[0].model()), parameters(found[1].model()))
    narrow = jg.LocalSGD(sync_every=3, privacy=privacy(unit="client"))
    with trainer(narrow, cluster, tx=optax.sgd(0.1)) as there:
        run = fit(there, 4, steps=2)
        start = parameters(NnxMLP(rngs=nnx.Rngs(0)))
        moved = [a - b for a, b in zip(parameters(run.model()), start, strict=True)]
        norm = np.sqrt(sum(np.square(m).sum() for m in moved))
        assert 0.5 * CLIP < norm <= 2 * CLIP * 1.001


@pytest.mark.nightly  # smaller: tests/train/privacy/test_accounting.py
def test_epsilon_of_clients_is_that_of_noise_alone(cluster: Cluster) -> None:
    strategy = jg.LocalSGD(sync_every=2, privacy=privacy(4.0, unit="client"))
    with trainer(strategy, cluster) as there:
        run = fit(there, 4, steps=2)
        due = epsilon_of([Spent("client", 4.0, 1.0, 2)], DELTA)
        assert abs(run.epsilon - due) < 1e-9


class Digits(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(64, 64, rngs=rngs)
        self.last = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(nnx.relu(self.first(x)))


def accuracy(model: Any, batch: Any) -> Any:
    x, y = batch
    return jnp.mean(model(x).argmax(-1) == y)


@pytest.mark.nightly  # smaller: the loops by hand above, and test_accounting.py
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.slow
def test_digits_are_learned_for_an_epsilon_of_eight(workers: int) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x = (digits.data[order] / 16).astype(np.float32)
    y = digits.target[order].astype(np.int32)
    private = privacy(1.6, clip=1.0, target_epsilon=8.0)

    def train(strategy: Any, cluster: Any, batch_size: int) -> None:
        there = Trainer(
            *(Digits(rngs=nnx.Rngs(0)), nnx_loss, optax.adam(5e-3)),
            cluster=cluster,
            strategy=strategy,
            metrics=accuracy,
        )
        with there:
            some = (x[:1500], y[:1500])
            run = there.fit(some, steps=600, batch_size=batch_size, progress=False)
            assert run.epsilon is not None
            assert 6 < run.epsilon <= 8
            assert there.evaluate((x[1500:], y[1500:]))["accuracy"] >= 0.90

    if not workers:
        train(jg.Local(privacy=private), None, 128)
        return
    with connected(ps=1, worker=workers) as cluster:
        train(jg.SyncPS(privacy=private), cluster, 128 // workers)
