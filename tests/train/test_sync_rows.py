"""Tables of rows in synchronous training, on servers of this process."""

from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.errors import DataError, RowIdError
from jgraph.plan.program.nodes import ContributeNode
from jgraph.train.model.adapters import adapt
from jgraph.train.step.train_step import TrainStep
from jgraph.train.strategies.sync_runner import SyncPS, SyncRunner
from jgraph.train.trainer import Trainer
from tests.support.embeddings import DIM, ROWS, TABLE, Embed, data, loss
from tests.support.models import values_alone

BATCH, WORKERS, STEPS = 8, 2, 12


def trainer(cluster: Cluster, tx: Any, sparse: Any, **options: Any) -> Trainer:
    rows = options.pop("rows", ROWS)
    strategy = SyncPS(step_timeout_s=20, **options)
    model = Embed(nnx.Rngs(0), rows)
    return Trainer(model, loss, tx, cluster=cluster, strategy=strategy, sparse=sparse)


def fit(trainer: Trainer, steps: int = STEPS, data: Any = data) -> Any:
    return trainer.fit(data, steps=steps, batch_size=BATCH, progress=False)


def alone(tx: Any, sparse: Any) -> dict[str, Any]:
    step = TrainStep(adapt(Embed(nnx.Rngs(0)), loss, seed=0), tx, sparse=sparse)
    values = values_alone(step, data, WORKERS, STEPS)
    return dict(zip(step.names, values, strict=True))


def assert_same(trainer: Trainer, wanted: dict[str, Any]) -> None:
    for name, value in zip(trainer.names, trainer.current_values(), strict=True):
        due = np.asarray(wanted[name])
        error = np.abs(np.asarray(value) - due).max() / (np.abs(due).max() + 1e-30)
        assert error <= 1e-6, f"{name}: {error}"


@pytest.mark.parametrize(
    ("tx", "sparse", "kind"),
    [
        (optax.sgd(0.1), "auto", None),
        pytest.param(optax.adagrad(0.1), "auto", "mod", marks=pytest.mark.nightly),
        (optax.chain(optax.clip_by_global_norm(0.01), optax.adam(0.01)), "lazy", "div"),
        pytest.param(
            optax.sgd(0.1, momentum=0.9), "exact", "div", marks=pytest.mark.nightly
        ),
        pytest.param(optax.lamb(0.01), "lazy", "mod", marks=pytest.mark.nightly),
    ],
    ids=["sgd", "adagrad", "clip + lazy adam", "exact momentum", "lazy lamb"],
)
def test_rows_of_all_workers_together_are_updated_once(
    cluster: Cluster, tx: Any, sparse: Any, kind: str | None
) -> None:
    options: Any = {}
    if kind is not None:
        cut = jg.fixed_size_partitioner(2)
        options = {"variable_partitioner": cut, "partition_strategy": kind}
    there = trainer(cluster, tx, sparse, **options)
    fit(there)
    planned = there.plan()
    assert f"{TABLE} travels by rows" in planned.graph.notes[0]
    assert not planned.graph.gathered
    assert_same(there, alone(tx, sparse))
    there.close()


def contributed(trainer: Trainer) -> dict[str, str]:
    """Returns the types of what a worker contributes, by name of the variable."""
    program = trainer.plan(data, batch_size=BATCH).program
    return {
        partition.variables[v].name: str(partition.values[value])
        for partition in program.partitions
        for node in partition.nodes
        if isinstance(node, ContributeNode)
        for v, value in zip(node.variables, node.values, strict=True)
    }


def test_bytes_of_a_step_do_not_depend_on_the_table(cluster: Cluster) -> None:
    def nbytes(rows: int) -> int:
        there = trainer(cluster, optax.adagrad(0.1), "auto", rows=rows)
        planned = there.plan(data, batch_size=BATCH)
        there.close()
        return int(planned.nbytes_per_step)

    assert nbytes(ROWS) == nbytes(20 * ROWS)


def test_only_rows_that_are_there_are_contributed(cluster: Cluster) -> None:
    there = trainer(cluster, optax.sgd(0.1), "auto")
    found = contributed(there)
    assert found["mean/ids/" + TABLE] == "int32[≤24]"
    assert found["mean/rows/" + TABLE] == "float32[≤24,4]"
    there.close()


def test_rows_of_a_frozen_table_stay_on_the_worker_and_as_they_are(
    cluster: Cluster,
) -> None:
    frozen = {"table": optax.set_to_zero(), "last": optax.sgd(0.1)}
    tx = optax.multi_transform(frozen, {"table": "table", "last": "last"})
    there = trainer(cluster, tx, "auto")
    assert "mean/rows/" + TABLE not in contributed(there)
    before = there.model().table.embedding[...]
    last = there.model().last.kernel[...]
    model = fit(there, 3).model()
    np.testing.assert_array_equal(model.table.embedding[...], before)
    assert np.abs(model.last.kernel[...] - last).max() > 0
    there.close()


def test_table_whose_rows_are_cut_is_trained_alike(cluster: Cluster) -> None:
    """Each ps has a part of every row: rows are handed in whole, and cut there."""

    def columns(shape: Any, dtype: Any) -> list[int]:
        return [1, 2] if shape == (ROWS, DIM) else [1] * len(shape)

    tx = optax.adagrad(0.1)
    there = trainer(cluster, tx, "auto", variable_partitioner=columns)
    fit(there)
    assert_same(there, alone(tx, "auto"))
    there.close()


@pytest.mark.parametrize("strategy", [SyncPS(), jg.AsyncPS()], ids=["sync", "async"])
def test_bad_ids_end_the_run_and_change_nothing(
    cluster: Cluster, strategy: Any
) -> None:
    model = Embed(nnx.Rngs(0))
    there = Trainer(model, loss, optax.sgd(0.1), cluster=cluster, strategy=strategy)
    before = there.current_values()
    ids = data["ids"]
    for bad, error, message in [
        (np.full_like(ids, ROWS), RowIdError, rf"batch\['ids'\].* has the id {ROWS}"),
        (
            np.full_like(ids, -1),
            RowIdError,
            r"batch\['ids'\].* has the id -1 \(4294967295 if unsigned\) at",
        ),
        (ids.astype(np.float32), DataError, r"ids.*float32"),
    ]:
        with pytest.raises(error, match=message) as e:
            fit(there, 2, {**data, "ids": bad})
        assert e.value.code.startswith("JG-")
    for old, new in zip(before, there.current_values(), strict=True):
        np.testing.assert_array_equal(old, new)
    there.close()


def test_late_rows_of_a_slow_worker_are_dropped(cluster: Cluster) -> None:
    there = trainer(cluster, optax.adagrad(0.1), "auto", backup_workers=1)
    fit(there, 1)
    runner = there._build()[1]
    assert isinstance(runner, SyncRunner)
    runner.compute_wait_s = {1: 0.05}
    run = fit(there, 30)
    assert set(run.metrics("contributions")["value"]) == {1}
    assert np.isfinite(run.metrics("loss")["value"]).all()
    assert run.dropped()["/job:worker/task:1"] > 0
    there.close()
