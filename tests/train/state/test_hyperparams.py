"""Hyperparameters that are set while a run goes on."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.runs.submission import submit_run
from jgraph.errors import ConfigError
from jgraph.train.strategies import remote_runs
from tests.support.servers import connected
from tests.support.straight_line import X, Y


def loss(model: Any, batch: Any) -> Any:
    """Each update takes the learning rate away from the kernel."""
    return model.kernel[...].sum() + 0.0 * batch[1].mean()


def trainer(tx: Any = None, **options: Any) -> jg.Trainer:
    tx = tx or optax.inject_hyperparams(optax.sgd)(learning_rate=0.125)
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    return jg.Trainer(model, loss, tx, **options)


@pytest.mark.parametrize(
    "strategy",
    [None, jg.AsyncPS(), jg.SyncPS(), jg.SyncPS(dense="workers")],
    ids=["local", "async", "sync", "dense workers"],
)
def test_a_hyperparameter_set_in_a_callback_is_that_of_all_later_updates(
    strategy: Any,
) -> None:
    kernels: dict[int, Any] = {}

    def freeze(run: Any, report: Any) -> None:
        if kernels and report.step > min(kernels):
            run.stop()
        elif not kernels:
            run.set_hyperparams(learning_rate=0.0)
            kernels[report.step] = run.model().kernel[...]

    one_ps = connected(ps=1, worker=1)
    with nullcontext() if strategy is None else one_ps as cluster:
        given = trainer(cluster=cluster, strategy=strategy)
        options: Any = {"batch_size": 8, "progress": False}
        given.fit((X, Y), steps=1, **options)
        given.set_hyperparams(learning_rate=0.0625)
        assert given.hyperparams() == {"learning_rate": 0.0625}
        before = given.model().kernel[...]
        run = given.fit((X, Y), steps=10**6, callbacks=freeze, **options)
        assert run.hyperparams() == {"learning_rate": 0.0}
        (kernel,) = kernels.values()
        assert not np.array_equal(before, kernel)
        np.testing.assert_array_equal(run.model().kernel[...], kernel)
        with pytest.raises(ConfigError, match=r"over; trainer\.set_hyperparams"):
            run.set_hyperparams(learning_rate=0.1)
        given.close()


def test_a_checkpoint_has_the_hyperparameters_that_were_set(tmp_path: Path) -> None:
    given = trainer()
    given.set_hyperparams(learning_rate=0.5)
    given.save(tmp_path / "saved")
    assert trainer().restore(tmp_path / "saved").hyperparams() == {"learning_rate": 0.5}


def test_parts_of_an_optimizer_are_set_together_or_by_their_names() -> None:
    sgd = optax.inject_hyperparams(optax.sgd)
    later = optax.MultiSteps(optax.chain(optax.clip(1.0), sgd(learning_rate=2.0)), 2)
    given = trainer({"kernel": sgd(learning_rate=1.0), "bias": later})
    given.set_hyperparams(learning_rate=0.5)
    given.set_hyperparams(**{"kernel/learning_rate": 0.25})
    assert given.hyperparams() == {
        "kernel/learning_rate": 0.25,
        "bias/1/learning_rate": 0.5,
    }


def test_a_run_with_copies_takes_hyperparameters_before_it_begins() -> None:
    refused: list[str] = []

    def change(run: Any, report: Any) -> None:
        with pytest.raises(ConfigError, match="copies") as caught:
            run.set_hyperparams(learning_rate=0.0)
        refused.append(caught.value.message)

    with connected(ps=2, worker=1) as cluster:
        strategy = jg.AsyncPS(durability="replica")
        given = trainer(cluster=cluster, strategy=strategy)
        given.set_hyperparams(learning_rate=0.5)
        options: Any = {"batch_size": 8, "progress": False}
        run = given.fit((X, Y), steps=4, callbacks=change, **options)
        assert refused
        assert run.hyperparams() == {"learning_rate": 0.5}
        given.close()


def test_a_run_with_copies_takes_no_hyperparameters_while_it_is_submitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused: list[str] = []

    def submit(*args: Any) -> Any:
        with pytest.raises(ConfigError, match="copies") as caught:
            given.set_hyperparams(learning_rate=0.0)
        refused.append(caught.value.message)
        return submit_run(*args)

    monkeypatch.setattr(remote_runs, "submit_run", submit)
    with connected(ps=2, worker=1) as cluster:
        strategy = jg.AsyncPS(durability="replica")
        given = trainer(cluster=cluster, strategy=strategy)
        given.fit((X, Y), steps=2, batch_size=8, progress=False)
        assert refused
        given.set_hyperparams(learning_rate=0.25)
        assert given.hyperparams() == {"learning_rate": 0.25}
        given.close()


SCHEDULE = optax.constant_schedule(0.1)


@pytest.mark.parametrize(
    ("tx", "name", "value", "message"),
    [
        (None, "learning_rat", 0.1, "'learning_rat': write learning_rate"),
        (None, "zorn", 0.1, "'zorn'; it has learning_rate"),
        (None, "learning_rate", "x", "learning_rate is 'x'; give a number"),
        (None, "learning_rate", np.nan, "learning_rate is nan; give a number"),
        (None, "learning_rate", np.zeros(3), "give a number"),
        (optax.adam(0.1), "learning_rate", 1, r"with optax\.inject_hyperparams"),
        (
            optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE),
            *("learning_rate", 1, "is a schedule, which sets it anew in each update"),
        ),
    ],
)
def test_what_cannot_be_set_is_told_and_changes_nothing(
    tx: Any, name: str, value: Any, message: str
) -> None:
    given = trainer(tx)
    before = given.hyperparams()
    with pytest.raises(ConfigError, match=message):
        given.set_hyperparams(**{name: value})
    assert given.hyperparams() == before
