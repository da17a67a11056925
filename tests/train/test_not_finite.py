"""A run ends at the step that is not finite, before it is applied, on every strategy.

One batch of the data is bad. Each update adds 1 to a parameter, so that this says how
many updates were applied.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.errors import NonFiniteError, RowIdError
from jgraph.runtime.files.step_files import steps_in
from jgraph.train.run.report import Report
from jgraph.train.run.run import Run
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.local import Local
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer

EXAMPLES, BATCH, ROWS = 6000, 2, 4
OTHERS: list[Strategy] = [
    AsyncPS(),
    AsyncPS(max_staleness=1, gradient_dtype="bfloat16"),
    SyncPS(gradient_dtype="int8"),
]
each_strategy = pytest.mark.parametrize(
    "strategy",
    [
        *(Local(), SyncPS()),
        *(pytest.param(other, marks=pytest.mark.nightly) for other in OTHERS),
    ],
    ids=lambda strategy: repr(strategy)[:30],
)


class Counter(nnx.Module):
    def __init__(self) -> None:
        self.count = nnx.Param(jnp.zeros(()))
        self.other = nnx.Param(jnp.ones(3))
        self.seen = nnx.BatchStat(jnp.zeros(()))
        self.table = nnx.Param(jnp.ones((ROWS, 2)))


def loss(model: Any, batch: Any) -> Any:
    """Its gradient is -1 for the count, and NaN for the others where the data is."""
    x = batch["x"]
    model.seen[...] = model.seen[...] + 1
    return (model.other[...] * x.mean()).sum() - model.count[...]


def loss_with_rows(model: Any, batch: Any) -> Any:
    return loss(model, batch) + model.table[batch["ids"]].sum()


def source(directory: Path, bad: str = "") -> Any:
    """Data of which one example is bad, in 3,000 batches."""
    data: dict[str, Any] = {
        "x": np.zeros(EXAMPLES, np.float32),
        "ids": np.zeros(EXAMPLES, np.int32),
    }
    if bad:
        data[bad][400] = {"x": np.nan, "ids": ROWS}[bad]
    file = directory / f"data{bad}.npz"
    np.savez(file, **data)
    return jg.Source.npz(str(file))


def trainer(cluster: Cluster, strategy: Strategy, loss: Any, **options: Any) -> Trainer:
    there = None if isinstance(strategy, Local) else cluster
    tx = optax.sgd(1.0)
    return Trainer(Counter(), loss, tx, cluster=there, strategy=strategy, **options)


def ends_at_the_bad_step(
    there: Trainer, error: type[Exception], bad: Any, good: Any, directory: Path
) -> None:
    reports: list[Report] = []
    options: dict[str, Any] = {
        "batch_size": BATCH,
        "progress": False,
        "callbacks": [lambda run, report: reports.append(report)],
    }
    saves = jg.Checkpoints(str(directory), every=100_000)
    with pytest.raises(error):
        there.fit(bad, steps=3000, checkpoint=saves, **options)
    run, strategy = there.run, there._config.strategy
    assert isinstance(run, Run)
    assert run.state == "failed"
    state = dict(zip(there.names, there.current_values(), strict=True))
    applied = round(float(state["params/count"]))
    assert applied == int(state["global_step"]) == run.steps
    assert 0 < applied < 2000
    if not isinstance(strategy, AsyncPS):  # one at a time
        assert round(float(state["state/seen"])) == applied
    assert np.isfinite(state["params/other"]).all()
    # What is reported, saved, and to be done next is of the same moment.
    assert run.metrics("loss")["step"].tolist()[-1] == reports[-1].step == applied
    assert np.isfinite(run.metrics("loss")["value"]).all()
    assert steps_in(directory) == [applied]
    batches = applied * (2 if isinstance(strategy, SyncPS) else 1)
    position = there.current_position()
    assert position is not None
    assert (position["done"], position["again"]) == (batches, 0)
    # With good data the run goes on from there.
    assert there.fit(good, steps=5, **options).steps == applied + 5
    there.close()


@pytest.mark.bad_input_row(11)
@each_strategy
def test_run_ends_at_the_step_that_is_not_finite(
    cluster: Cluster, strategy: Strategy, tmp_path: Path
) -> None:
    there = trainer(cluster, strategy, loss, check_finite=True)
    data = source(tmp_path, "x"), source(tmp_path)
    ends_at_the_bad_step(there, NonFiniteError, *data, tmp_path / "saved")


@pytest.mark.parametrize(
    "strategy",
    [
        Local(),
        # There is a smaller one of these in test_sync_rows.py.
        *(
            pytest.param(each(), marks=pytest.mark.nightly)
            for each in (AsyncPS, SyncPS)
        ),
    ],
    ids=repr,
)
def test_run_ends_at_the_step_that_looks_up_a_row_that_is_not_there(
    cluster: Cluster, strategy: Strategy, tmp_path: Path
) -> None:
    there = trainer(cluster, strategy, loss_with_rows)
    data = source(tmp_path, "ids"), source(tmp_path)
    ends_at_the_bad_step(there, RowIdError, *data, tmp_path / "saved")
