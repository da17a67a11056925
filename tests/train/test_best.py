"""The copy of a model that was evaluated as the best: saved, and gone back to.

Each update adds 1 to every number of the model, and the evaluation is how far they are
from 60: so its best copy is known, and all that is kept shows of which updates it is.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jgraph.client.cluster import Cluster
from jgraph.errors import ConfigError
from jgraph.runtime.files.manifest import read_manifest
from jgraph.runtime.files.step_files import best_in, steps_in
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.run.callbacks import EarlyStopping
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.local import Local
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.two_counts import Counts, X, counting, one_more

pytestmark = pytest.mark.usefixtures("nothing_is_left")

WORKERS = 2


def far(model: Any, batch: Any) -> Any:
    wrong = (
        jnp.abs(model.first[...] - 60).mean() + jnp.abs(model.second[...] - 60).mean()
    )
    return wrong + 0.0 * batch.mean()


def trainer(cluster: Cluster | None, strategy: Strategy) -> Trainer:
    return Trainer(
        *(Counts(), one_more, optax.sgd(1.0)),
        metrics={"far": far},
        cluster=cluster,
        strategy=strategy,
    )


def values_of(one: Trainer) -> dict[str, Any]:
    return dict(zip(one.names, map(np.asarray, one.current_values()), strict=True))


def check_moment(found: dict[str, Any], position: Any, strategy: Strategy) -> None:
    """Checks that all ps, and the data, are at the updates that the copy has."""
    step, done = int(found["global_step"]), position["done"]
    on_ps = [np.unique(found[f"params/{n}"]).item() for n in ("first", "second")]
    if isinstance(strategy, AsyncPS):
        assert max(on_ps) - min(on_ps) <= 2 * WORKERS
        assert done <= min(*on_ps, step)
        assert max(*on_ps, step) - done <= position["again"] <= 2 * WORKERS
    else:
        assert on_ps == [step, step]
        assert done == step * (WORKERS if isinstance(strategy, SyncPS) else 1)


STRATEGIES = pytest.mark.parametrize(
    "strategy",
    [Local(), AsyncPS(), pytest.param(SyncPS(), marks=pytest.mark.nightly)],
    ids=["local", "async", "sync"],
)


@STRATEGIES
def test_the_best_copy_is_saved_as_it_was_evaluated_and_stays(
    cluster: Cluster, tmp_path: Path, strategy: Strategy
) -> None:
    there = trainer(None if isinstance(strategy, Local) else cluster, strategy)
    where = Checkpoints(tmp_path, every=100, keep=1, best="eval_far")
    options: Any = {"batch_size": 2, "progress": False, "checkpoint": where}
    run = there.fit(X, steps=120, eval_data=X[:4], eval_every=20, **options)
    told = run.metrics("eval_far")
    best = int(told["step"][np.argmin(told["value"])])
    if not isinstance(strategy, AsyncPS):
        assert told["step"].tolist() == [*range(20, 121, 20)]
    assert best_in(tmp_path) == best
    assert steps_in(tmp_path) == sorted({best, 120})
    here = counting(None).restore(tmp_path / "best")
    found = values_of(here)
    wrong = [np.abs(found[f"params/{n}"] - 60).mean() for n in ("first", "second")]
    assert sum(wrong) == told["value"].min()
    check_moment(found, here.current_position(), strategy)
    evaluation = read_manifest(tmp_path / str(best)).evaluation
    assert evaluation is not None
    assert evaluation["eval_far"] == told["value"].min()
    there.fit(X, steps=20, eval_data=X[:4], **options)
    assert best_in(tmp_path) == best, "another run knows how good it was"
    there.close()


@STRATEGIES
def test_early_stopping_goes_back_to_the_copy_that_was_evaluated(
    cluster: Cluster, strategy: Strategy
) -> None:
    there = trainer(None if isinstance(strategy, Local) else cluster, strategy)
    early = EarlyStopping("eval_far", patience=2, restore_best=True)
    how: Any = {"batch_size": 2, "progress": False, "callbacks": early}
    run = there.fit(X, steps=20_000, eval_data=X[:4], eval_every=20, **how)
    assert run.state == "stopped"
    found = values_of(there)
    assert run.steps == found["global_step"] == early.best_step
    check_moment(found, there.current_position(), strategy)
    wrong = [np.abs(found[f"params/{n}"] - 60).mean() for n in ("first", "second")]
    assert sum(wrong) == early.best == run.metrics("eval_far")["value"].min()
    there.fit(X, steps=5, batch_size=2, progress=False)  # the Trainer trains on
    assert values_of(there)["global_step"] == early.best_step + 5
    there.close()


def test_early_stopping_goes_back_only_if_it_is_to(tmp_path: Path) -> None:
    there = trainer(None, Local())
    where = Checkpoints(tmp_path, every=1000, best="eval_far")
    how: Any = {"batch_size": 2, "progress": False, "checkpoint": where}
    early = EarlyStopping("eval_far", patience=2)
    there.fit(X, steps=400, eval_data=X[:4], eval_every=20, callbacks=early, **how)
    assert values_of(there)["global_step"] > early.best_step
    there.close()


def test_what_is_to_be_the_best_must_be_evaluated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="such as best='eval_loss'"):
        Checkpoints(tmp_path, best="loss")
    with pytest.raises(ConfigError, match="was evaluated"):
        EarlyStopping("loss", restore_best=True)
    there = trainer(None, Local())
    options: Any = {"steps": 1, "batch_size": 2, "progress": False}
    with pytest.raises(ConfigError, match="nothing is evaluated"):
        there.fit(X, checkpoint=Checkpoints(tmp_path, best="eval_far"), **options)
    where = Checkpoints(tmp_path, best="eval_farr")
    with pytest.raises(ConfigError, match="finds no such metric"):
        there.fit(X, eval_data=X, checkpoint=where, **options)
