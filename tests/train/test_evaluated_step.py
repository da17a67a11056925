"""Evaluations carry the number of updates of the copy that was evaluated."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.errors import DataError
from jgraph.train.run.callbacks import EarlyStopping
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.local import Local
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.servers import connected


class Counter(nnx.Module):
    def __init__(self) -> None:
        self.count = nnx.Param(jnp.zeros(()))

    def __call__(self, x: Any) -> Any:
        return x + self.count[...]


def loss(model: Any, batch: Any) -> Any:
    """Each update adds 1 to the count."""
    return batch.mean() - model.count[...]


@pytest.mark.parametrize(
    ("strategy", "job"),
    [(Local(), ""), (AsyncPS(), ""), (SyncPS(), ""), (AsyncPS(), "evaluator")],
    ids=["local", "async", "sync", "evaluator"],
)
def test_model_that_was_evaluated_had_so_many_updates(
    strategy: Strategy, job: str
) -> None:
    data = np.zeros(64, np.float32)
    stopping = EarlyStopping("eval_count", patience=10**6, higher_is_better=True)
    more: dict[str, Any] = {job: 1} if job else {}
    with connected(ps=1, worker=2, **more) as cluster:
        there = Trainer(
            Counter(),
            loss,
            optax.sgd(1.0),
            metrics={"count": lambda model, batch: model.count[...]},
            strategy=strategy,
            cluster=None if isinstance(strategy, Local) else cluster,
        )
        run = there.fit(
            data,
            steps=120,
            batch_size=4,
            eval_data=data,
            eval_every=20,
            callbacks=[stopping],
            progress=False,
        )
        there.close()
    found = run.metrics("eval_count")
    assert found["value"].tolist() == found["step"].tolist()
    assert found["step"][-1] == 120
    assert len({*found["step"].tolist()}) == len(found["step"])  # each copy once
    assert stopping.best_step == stopping.best == 120


def test_prediction_without_a_row_for_each_example_is_refused() -> None:
    there = Trainer(Counter(), loss, optax.sgd(1.0))
    x = np.arange(6, dtype=np.float32)
    for fn in (lambda model, x: model(x).mean(), lambda model, x: model(x)[:2]):
        with pytest.raises(DataError, match=r"has shape \(.*\) for 4 examples"):
            there.predict(x, batch_size=4, fn=fn)
    with pytest.raises(DataError, match=r"output\['mean'\] of .* for 4 examples"):
        there.predict(
            x, batch_size=4, fn=lambda model, x: {"all": model(x), "mean": x.mean()}
        )
    assert there.predict(x, batch_size=4).shape == (6,)
