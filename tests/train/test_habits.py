"""What people bring along from Keras, NNX, Accelerate and Ray: it works, or is told."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.errors import ConfigError, DataError, GraphError
from jgraph.train.data.data import as_dataset
from jgraph.train.model.optimizer import unwrapped
from jgraph.train.run.hooks import as_callbacks
from jgraph.train.strategies.strategies import batches_per_update
from tests.support.data_forms import Loader, batches
from tests.support.servers import connected
from tests.support.straight_line import X, Y, loss


def close_to(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(jnp.abs(model(batch[0])[:, 0] - batch[1]) < 0.1)


def trainer(**options: Any) -> Any:
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    return jg.Trainer(model, loss, **{"tx": optax.sgd(0.1), **options})


class Told:
    """A callback with hooks, and none that is called in between."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin(self, run: Any) -> None:
        self.calls.append(f"begin {run.steps}")

    def end(self, run: Any) -> None:
        self.calls.append(f"end {run.steps}")


def test_a_keras_users_first_fit_works() -> None:
    told, reports = Told(), []
    given = trainer(
        tx=nnx.Optimizer(
            nnx.Linear(1, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param
        ),
        metrics=close_to,
    )
    run = given.fit(
        X,
        Y,
        epochs=3,
        batch_size=8,
        validation_data=(X, Y),
        callbacks=told,
        progress=False,
    )
    assert run.steps == 15
    assert {"eval_loss", "eval_close_to"} <= set(run.metric_names)
    assert told.calls == ["begin 0", "end 15"]
    given.fit(
        X,
        Y,
        steps=1,
        batch_size=8,
        progress=False,
        callbacks=lambda run, report: reports.append(report.step),
    )
    assert reports[-1] == 16


def test_run_whose_loss_is_nan_at_the_end_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "jgraph.train"):
        run = trainer(tx=optax.sgd(1e30)).fit(
            X, Y, steps=9, batch_size=8, progress=False
        )
    assert run.state == "done"
    assert "the loss was nan at the end of the run; callbacks=jg.NanGuard()" in (
        caplog.text
    )


def test_epochs_are_counted_in_batches_and_updates() -> None:
    assert as_dataset((X, Y)).batches_per_epoch(12) == 3
    assert as_dataset(Loader()).batches_per_epoch(4) == 3
    with pytest.raises(DataError, match="a generator, does not tell how many batches"):
        as_dataset(batches()).batches_per_epoch(4)
    assert batches_per_update(None, jg.AsyncPS()) == 1


def test_transformation_of_an_nnx_optimizer_is_taken_and_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tx, model = optax.adam(1e-3), nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    with caplog.at_level(logging.WARNING, "jgraph.train"):
        assert unwrapped(tx, nnx.Param) == (tx, nnx.Param)
        assert not caplog.records
        wrapped = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
        assert unwrapped(wrapped, nnx.Param) == (tx, nnx.LoRAParam)
    assert "keeps the state of the optimizer itself" in caplog.text


def test_tab_shows_what_users_call() -> None:
    shown = {name for name in dir(trainer()) if not name.startswith("_")}
    assert {"evaluate", "fit", "model", "plan", "predict", "restore", "run"} <= shown
    assert not {"model_of", "save_values", "current_values"} & shown
    inner = {"call", "transport", "move_to", "check_startable", "drop_held"}
    assert not inner & set(jg.LocalCluster.__dir__(object.__new__(jg.LocalCluster)))


class OfKeras:
    def set_model(self, model: Any) -> None: ...

    def on_epoch_end(self, epoch: int) -> None: ...


def one_argument(run: Any) -> None: ...


CALLBACKS: Any = as_callbacks
CLUSTER: Any = jg.LocalCluster
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "verbose": (lambda: trainer().fit(X, steps=1, verbose=0), "progress=False to show"),
    "a typo": (lambda: trainer().fit(X, step=1), r"no argument 'step': write steps=…"),
    "a foreign name": (lambda: trainer().fit(X, zorn=1), r"'zorn'; it takes data, y, "),
    "no length": (lambda: trainer().fit((X, Y)), r"give steps=1000, or epochs=10"),
    "two lengths": (lambda: trainer().fit(X, steps=1, epochs=1), "not both"),
    "no epochs": (lambda: trainer().fit(X, epochs=0), "epochs is 0; it must be at"),
    "evaluated twice": (
        lambda: trainer().fit(X, Y, steps=1, eval_data=X, validation_data=X),
        "are the same; give one",
    ),
    "targets beside inputs": (
        lambda: trainer().evaluate(X, Y),
        r"a ndarray of \d+; inputs and targets are one argument: \(x, y\)",
    ),
    "no batch": (lambda: trainer().predict(X, batch_size=0), "batch_size is 0; it mu"),
    "a plan of no batch": (lambda: trainer().plan((X, Y), 0), "batch_size is 0; it"),
    "evaluate quietly": (
        lambda: trainer().evaluate((X, Y), verbose=0),
        "evaluate has no argument 'verbose': write nothing",
    ),
    "a number as metric": (lambda: trainer(metrics={1: loss}), "has the name 1; names"),
    "optimizer": (lambda: trainer(optimizer=None), r"Trainer has no .* tx=optax\.adam"),
    "num_ps": (lambda: CLUSTER(num_ps=1), "LocalCluster has no .* write ps=2"),
    "callback(run)": (lambda: CALLBACKS(one_argument), r"callback\(run, report\)"),
    "a class": (lambda: CALLBACKS([jg.NanGuard]), r"make one: jg\.NanGuard\(…\)"),
    "of Keras": (lambda: CALLBACKS(OfKeras()), "the hooks of Keras"),
    "no callback": (lambda: CALLBACKS([3]), "a callback is 3; give functions"),
    "a text": (lambda: CALLBACKS("nan"), "callbacks is 'nan'; give functions"),
}


N: Any = np.int64
STRATEGIES = [
    jg.AsyncPS(
        max_staleness=N(8), variable_partitioner=jg.fixed_size_partitioner(N(1))
    ),
    jg.SyncPS(backup_workers=N(0), replicas_to_aggregate=N(1)),
    None,
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["async", "sync", "local"])
def test_numpys_integers_are_whole_numbers_wherever_one_is_taken(
    strategy: Any, tmp_path: Path
) -> None:
    with connected(ps=1, worker=1) as cluster:
        there = cluster if strategy is not None else None
        given = trainer(seed=N(3), cluster=there, strategy=strategy)
        run = given.fit(
            (X, Y),
            steps=N(4),
            batch_size=N(8),
            eval_data=(X, Y),
            eval_every=N(2),
            checkpoint=jg.Checkpoints(tmp_path, every=N(2), keep=N(1)),
            progress=False,
        )
        assert run.steps == 4
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["4"]
        again = trainer(cluster=there, strategy=strategy)
        again.restore(tmp_path)
        assert again.fit((X, Y), steps=1, batch_size=N(8)).steps == 5


@pytest.mark.parametrize("mistake", MISTAKES)
def test_names_of_others_are_told_before_anything_starts(mistake: str) -> None:
    make, message = MISTAKES[mistake]
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("train", r"trainer\.fit\(data, steps=…\)"),
        ("get_weights", r"trainer\.model\(\)"),
        ("fit_generator", r"trainer\.fit\(data, steps=…\); data may be a generator"),
        ("train_step", r"the loss as a function of \(model, batch\), and trainer\.fit"),
        ("optimizer", r"trainer\.hyperparams\(\)"),
        ("state_dict", r"trainer\.model\(\), or trainer\.save\(path\)"),
    ],
)
def test_methods_of_others_are_told(name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=f"'{name}': write {instead}"):
        getattr(trainer(), name)


def test_a_run_tells_what_its_results_are_called() -> None:
    run = trainer().fit((X, Y), steps=1, batch_size=8, progress=False)
    for name, instead in (("params", "run.model()"), ("step", "run.steps")):
        with pytest.raises(AttributeError) as caught:
            getattr(run, name)
        assert str(caught.value).endswith(f"'{name}': write {instead}")


def test_data_without_targets_is_given_as_keras_users_do() -> None:
    seen: list[Any] = []

    def of_inputs(model: Any, batch: Any) -> Any:
        x, y = batch
        seen.append(y)
        return jnp.mean((model(x) - x) ** 2)

    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    given = jg.Trainer(model, of_inputs, optax.sgd(0.1))
    given.fit((X, None), steps=2, batch_size=8, progress=False)
    given.fit(iter([(X, None)]), steps=1, progress=False)
    assert set(seen) == {None}


def condition(model: Any, batch: Any) -> Any:
    value = loss(model, batch)
    if value > 1:  # the line
        return value
    return 2 * value


def number(model: Any, batch: Any) -> Any:
    return float(loss(model, batch))  # the line


def with_numpy(model: Any, batch: Any) -> Any:
    return np.asarray(model(batch[0])).mean()  # the line


def missing_key(model: Any, batch: Any) -> Any:
    return model(batch["image"]).mean()  # the line


def lines_of(path: str) -> Iterator[int]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if "# the line" in line and "if" not in line.partition("#")[2]:
                yield number


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (condition, GraphError, r"condition of Python .*; .* jnp\.where"),
        (number, GraphError, r"needs the value of an array .* read values from what"),
        (with_numpy, GraphError, r"gives an array to NumPy .* use jax\.numpy"),
        (missing_key, DataError, r"KeyError: 'image'; check the data against"),
    ],
)
def test_mistake_in_a_loss_is_told_with_its_line(
    wrong: Any, error: type[Exception], message: str
) -> None:
    given = trainer()
    data = {"x": X, "y": Y} if wrong is missing_key else (X, Y)
    broken = jg.Trainer(given.model(), wrong, optax.sgd(0.1))
    with pytest.raises(error, match=message) as caught:
        broken.plan(data, batch_size=8)
    told = [f"{__file__}:{line}" in str(caught.value) for line in lines_of(__file__)]
    assert sum(told) == 1
