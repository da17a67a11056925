"""Hash tables in synchronous training, on servers of this process."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.errors import MalformedMessageError
from jgraph.graph.rows.hash_spec import Column, HashSpec, Initial
from jgraph.plan.program.accumulate import mean_of_rows
from jgraph.runtime.store.hash_policy import nbytes_for
from jgraph.runtime.store.hash_rows import initial_rows
from jgraph.train.model.adapters import adapt
from jgraph.train.step.train_step import TrainStep
from jgraph.train.strategies.sync_runner import SyncPS, SyncRunner
from tests.support.models import values_alone
from tests.support.servers import connected

DIM, BATCH, WORKERS, STEPS = 3, 8, 2, 8
INITIAL = Initial("normal", 0.1, seed=4)
rng = np.random.default_rng(0)
KEYS = np.sort(rng.integers(-(2**62), 2**62, 60))
# Workers meet at some keys, and have others for themselves; some come twice.
PLACES = rng.integers(0, len(KEYS), (64, 3)).astype(np.int32)
Y = rng.normal(size=64).astype(np.float32)


class Hashed(nnx.Module):
    def __init__(self, capacity_bytes: int = 1 << 20) -> None:
        self.table = jg.HashTable(
            DIM, capacity_bytes=capacity_bytes, initializer=INITIAL
        )
        self.last = nnx.Linear(DIM, 1, rngs=nnx.Rngs(1))

    def __call__(self, ids: Any) -> Any:
        return self.last(jnp.tanh(self.table(ids)).mean(1))[:, 0]


class Known(nnx.Module):
    """The same with a row for each of ``KEYS`` from the beginning."""

    def __init__(self) -> None:
        column = Column("", DIM, initial=INITIAL)
        self.table = nnx.Embed(len(KEYS), DIM, rngs=nnx.Rngs(0))
        self.table.embedding[...] = jnp.asarray(initial_rows(KEYS, column))
        self.last = nnx.Linear(DIM, 1, rngs=nnx.Rngs(1))

    def __call__(self, ids: Any) -> Any:
        return self.last(jnp.tanh(self.table(ids)).mean(1))[:, 0]


def loss(model: Any, batch: Any) -> Any:
    return jnp.mean((model(batch["ids"]) - batch["y"]) ** 2)


def hashed(places: Any = PLACES) -> dict[str, Any]:
    return {"ids": jg.split_keys(KEYS[places]), "y": Y[: len(places)]}


def trainer(cluster: Cluster, tx: Any, model: Any = None, **options: Any) -> jg.Trainer:
    strategy = SyncPS(step_timeout_s=20, **options)
    model = model or Hashed()
    return jg.Trainer(
        model, loss, tx, cluster=cluster, strategy=strategy, sparse="lazy"
    )


def fit(there: jg.Trainer, steps: int = STEPS, data: Any = None) -> Any:
    given = hashed() if data is None else data
    return there.fit(given, steps=steps, batch_size=BATCH, progress=False)


def alone(tx: Any, steps: int) -> nnx.Module:
    step = TrainStep(adapt(Known(), loss, seed=0), tx, sparse="lazy")
    fields = {"ids": PLACES, "y": Y}
    tree = step.unflatten(values_alone(step, fields, WORKERS, steps))
    made: nnx.Module = step.adapter.model(tree["params"], tree["state"])
    return made


def rows_of(model: Any) -> dict[int, Any]:
    rows = np.asarray(model.table.rows[...])[1:]
    return dict(zip(model.table.keys().tolist(), rows, strict=True))


def assert_same(model: Any, wanted: Any) -> None:
    due = np.asarray(wanted.table.embedding[...])
    found = rows_of(model)
    assert set(found) <= set(KEYS.tolist())
    for key, row in found.items():
        np.testing.assert_allclose(row, due[np.searchsorted(KEYS, key)], 0, 1e-6)
    np.testing.assert_allclose(
        np.asarray(model.last.kernel[...]), np.asarray(wanted.last.kernel[...]), 0, 1e-6
    )


@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(optax.adagrad(0.1), marks=pytest.mark.nightly),
        optax.chain(optax.clip_by_global_norm(0.01), optax.adam(0.01)),
        pytest.param(optax.lamb(0.01), marks=pytest.mark.nightly),
    ],
    ids=["adagrad", "clip + adam", "lamb"],
)
def test_keys_of_all_workers_together_are_updated_once(
    cluster: Cluster, tx: Any
) -> None:
    there = trainer(cluster, tx)
    run = fit(there)
    assert_same(run.model(), alone(tx, STEPS))
    assert not there.plan().graph.gathered
    assert sum(event.rows for event in run.events()) == len(rows_of(run.model()))
    assert not any(event.dropped for event in run.events())
    there.close()


@pytest.mark.nightly  # smaller: tests/train/test_sync_rows.py
def test_rows_of_a_frozen_table_count_for_a_norm_only(cluster: Cluster) -> None:
    frozen = {"table": optax.set_to_zero(), "last": optax.sgd(0.1)}
    rest = optax.multi_transform(frozen, {"table": "table", "last": "last"})
    tx = optax.chain(optax.clip_by_global_norm(0.01), rest)
    there = trainer(cluster, tx)
    model = fit(there, 3).model()
    assert_same(model, alone(tx, 3))
    for key, row in rows_of(model).items():
        new = initial_rows(np.array([key]), Column("", DIM, initial=INITIAL))
        np.testing.assert_array_equal(row, new[0])
    there.close()


def test_a_checkpoint_of_one_strategy_goes_on_in_the_other(
    cluster: Cluster, tmp_path: Path
) -> None:
    tx = optax.adagrad(0.1)
    first = trainer(cluster, tx)
    saved = fit(first, 3).save(tmp_path / "saved")
    first.close()
    second = trainer(cluster, tx).restore(saved)
    assert_same(fit(second, STEPS - 3).model(), alone(tx, STEPS))
    second.close()


def test_rows_evicted_by_the_lookups_of_a_step_begin_anew() -> None:
    """A shard has room for the keys of one step: each step's replace the last's."""
    parts = {"table": optax.adagrad(0.1), "last": optax.set_to_zero()}
    tx, count = optax.multi_transform(parts, {"table": "table", "last": "last"}), 32
    spec = HashSpec("t", (Column("", DIM), Column("", DIM)), 1 << 20)
    keys = rng.permutation(10_000)[: 2 * count].reshape(2, WORKERS * BATCH, -1)
    first, second = ({"ids": jg.split_keys(k), "y": Y[: len(k)]} for k in keys)
    with connected(ps=1, worker=WORKERS) as small:
        tight = trainer(small, tx, Hashed(nbytes_for(spec, count)))
        runs = [fit(tight, 1, data) for data in (first, second, first)]
        (event,) = runs[-1].events()
        assert (event.rows, event.evicted) == (count, 2 * count)
        assert event.dropped == event.refused == 0
        once = rows_of(fit(trainer(small, tx), 1, first).model())
        again = rows_of(runs[-1].model())
        assert once.keys() == again.keys()
        for key, row in again.items():
            np.testing.assert_allclose(row, once[key], 0, 1e-6)


def test_rows_for_which_there_was_no_room_are_not_updated_and_counted() -> None:
    spec = HashSpec("t", (Column("", DIM), Column("", DIM)), 1 << 20)
    keys = rng.permutation(10_000)[: 3 * WORKERS * BATCH].reshape(-1, 3)
    data = {"ids": jg.split_keys(keys), "y": Y[: len(keys)]}
    with connected(ps=1, worker=WORKERS) as small:
        tight = trainer(small, optax.adagrad(0.1), Hashed(nbytes_for(spec, 20)))
        (event,) = fit(tight, 1, data).events()
        assert (event.rows, event.evicted) == (20, 0)
        assert event.refused == event.dropped == keys.size - 20


@pytest.mark.nightly  # smaller: tests/train/test_sync_rows.py
def test_late_rows_of_a_slow_worker_are_dropped(cluster: Cluster) -> None:
    there = trainer(cluster, optax.adagrad(0.1), backup_workers=1)
    fit(there, 1)
    runner = there._build()[1]
    assert isinstance(runner, SyncRunner)
    runner.compute_wait_s = {1: 0.05}
    run = fit(there, 30)
    assert set(run.metrics("contributions")["value"]) == {1}
    assert np.isfinite(run.metrics("loss")["value"]).all()
    assert run.dropped()["/job:worker/task:1"] > 0
    assert not any(event.dropped for event in run.events())
    there.close()


def test_the_mean_of_rows_by_key_is_padded_with_no_key() -> None:
    one = np.array([-5, 2**40]), np.full((2, 1), 2, np.float32)
    two = np.array([2**40]), np.full((1, 1), 6, np.float32)
    pairs, rows = mean_of_rows([one, two], 3)
    assert pairs.tolist() == [*jg.split_keys(one[0]).tolist(), [0, 1 << 31]]
    assert rows.tolist() == [[1.0], [4.0], [0.0]]
    with pytest.raises(MalformedMessageError):
        mean_of_rows([one, two], 1)
