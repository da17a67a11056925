"""A Trainer says at once what is wrong, and leaves nothing half done."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from jgraph.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    GraphError,
    NonFiniteError,
)
from jgraph.train.pipeline.pipeline import Pipeline
from jgraph.train.run.run import Run
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.local import Local
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.models import BATCH, LinenMLP, NnxMLP, data, linen_loss, nnx_loss


def nnx_trainer(loss: Any = nnx_loss, **options: Any) -> Trainer:
    return Trainer(NnxMLP(rngs=nnx.Rngs(0)), loss, optax.sgd(0.1), **options)


def fit(trainer: Trainer, steps: int = 20) -> Run:
    return trainer.fit(data(), steps=steps, batch_size=BATCH, progress=False)


def assert_close(a: Any, b: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-6, 1e-6), a, b)


def test_first_step_that_is_not_finite_is_named_and_not_applied() -> None:
    def loss(model: Any, batch: Any) -> Any:
        return model(batch[0]).sum() / batch[1].min()

    x, _ = data(BATCH)
    zero = np.zeros(BATCH, np.float32)
    trainer = nnx_trainer(loss=loss, check_finite=True)
    good = trainer.fit((x, zero + 1), steps=2, batch_size=BATCH, progress=False)
    before = nnx.state(good.model())
    with pytest.raises(NonFiniteError, match=r"the loss .* at step 2 of replica 0"):
        trainer.fit((x, zero), steps=3, batch_size=BATCH, progress=False)
    assert_close(nnx.state(trainer.model()), before)


@pytest.mark.bad_input_row(11)
@pytest.mark.parametrize("strategy", [Local(), AsyncPS(), SyncPS()], ids=repr)
def test_gradient_that_is_not_finite_is_named(
    strategy: Strategy, request: pytest.FixtureRequest
) -> None:
    """The loss itself is finite."""

    def loss(model: Any, batch: Any) -> Any:
        bias = model.layers[1].bias[...]
        return nnx_loss(model, batch) + jnp.sqrt(jnp.abs(bias)).sum()

    cluster = None
    if not isinstance(strategy, Local):
        cluster = request.getfixturevalue("cluster")
    trainer = nnx_trainer(
        loss=loss, check_finite=True, strategy=strategy, cluster=cluster
    )
    before = nnx.state(trainer.model())
    with pytest.raises(NonFiniteError, match=r"gradient of 'params/layers/1/bias'"):
        fit(trainer)
    assert_close(nnx.state(trainer.model()), before)
    trainer.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": NnxMLP}, "model is the class NnxMLP"),
        ({"model": object()}, "model is a object"),
        (
            {"model": Pipeline([jnp.tanh], jnp.subtract, microbatches=1)},
            r"write train = pipe\.step\(params, tx\)",
        ),
        ({"loss": 3}, "loss is not a function"),
        ({"loss": lambda model: 0}, r"loss takes \(model\)"),
        (
            {"loss": lambda model, x, y: 0},
            r"\(model, x, y\); .* x, y = batch",
        ),
        (
            {"model": TrainState.create(apply_fn=None, params={}, tx=optax.sgd(1.0))},
            r"model is a TrainState; .* state\.tx, variables={'params': state\.params}",
        ),
        ({"tx": 1e-3}, "tx is a float"),
        ({"strategy": AsyncPS()}, "AsyncPS needs a cluster"),
        ({"strategy": "async"}, "strategy is 'async'"),
        ({"cluster": "jgraph://head:8470"}, r"cluster is 'jgraph://head.*jg\.connect"),
        ({"seed": None}, "seed is None"),
        ({"seed": True}, "seed is True"),
    ],
)
def test_wrong_argument_of_a_trainer_is_named(
    change: dict[str, Any], message: str
) -> None:
    right = {
        "model": NnxMLP(rngs=nnx.Rngs(0)),
        "loss": nnx_loss,
        "tx": optax.sgd(0.1),
    }
    with pytest.raises(ConfigError, match=message):
        Trainer(**{**right, **change})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"steps": 0}, ConfigError, "steps is 0"),
        ({"eval_every": 0}, ConfigError, "eval_every is 0"),
        ({"eval_every": 5}, ConfigError, "eval_every=5 needs data to evaluate on"),
        ({"steps": 2**63}, ConfigError, "steps is more than"),
        ({"steps": 10**30}, ConfigError, "steps is more than"),
        ({"steps": 1.5}, ConfigError, "steps is 1.5; it must be a whole number"),
        ({"steps": True}, ConfigError, "steps is True; it must be a whole number"),
        ({"batch_size": 0}, ConfigError, "batch_size is 0"),
        ({"batch_size": 8.0}, ConfigError, "batch_size is 8.0"),
        ({"batch_size": 41}, DataError, "batch_size is 41, but the data has only 40"),
        ({"eval_data": "x"}, DataError, "eval_data is the text 'x'"),
        ({"checkpoint": "run"}, ConfigError, r"is 'run'; give jg\.Checkpoints\('runs"),
    ],
)
def test_wrong_argument_of_fit_is_named(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    trainer = nnx_trainer()
    with pytest.raises(error, match=message):
        trainer.fit(
            data(), **{"steps": 1, "batch_size": 8, "progress": False, **change}
        )
    assert fit(trainer, 1).state == "done"


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, batch: model(batch[0]), r"array of shape \(8, 2\)"),
        (
            lambda model, batch: (nnx_loss(model, batch), 3),
            "scalar beside its",
        ),
        (lambda model, batch: None, "loss returned None"),
        (lambda model, batch: jnp.int32(1), "dtype int32, which has no gradient"),
        (lambda m, b: (nnx_loss(m, b), {"loss": 0.0}), "metric is called 'loss'"),
    ],
)
def test_loss_that_returns_something_else_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        fit(nnx_trainer(loss=loss))


@pytest.mark.parametrize("strategy", [Local(), AsyncPS(), SyncPS()], ids=repr)
def test_a_loss_that_no_parameter_has_an_influence_on_is_refused(
    strategy: Strategy, request: pytest.FixtureRequest
) -> None:
    on = None if isinstance(strategy, Local) else request.getfixturevalue("cluster")
    other = NnxMLP(rngs=nnx.Rngs(0))

    def loss(model: Any, batch: Any) -> Any:
        stopped = jax.lax.stop_gradient(nnx_loss(model, batch))
        return nnx_loss(other, batch) + stopped

    with pytest.raises(GraphError, match="no trained parameter has an influence"):
        fit(nnx_trainer(loss=loss, strategy=strategy, cluster=on))


def test_linen_model_without_parameters_cannot_be_restored_into() -> None:
    trainer = Trainer(LinenMLP(), linen_loss, optax.sgd(0.1))
    with pytest.raises(ConfigError, match=r"variables=model\.init"):
        trainer.restore("anywhere")


def test_plan_needs_data_once() -> None:
    trainer = nnx_trainer()
    with pytest.raises(ConfigError, match="give the data"):
        trainer.plan()
    assert "params/layers/0/kernel" in str(trainer.plan(data(), batch_size=8))
    assert trainer.plan() is trainer.plan(data(), batch_size=8)


def test_checkpoint_that_is_not_there_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no checkpoint at /nowhere"):
        nnx_trainer().restore("/nowhere")


def test_data_of_another_kind_than_trained_on_is_refused_by_name() -> None:
    trainer = Trainer(NnxMLP(rngs=nnx.Rngs(0)), nnx_loss, optax.sgd(0.1))
    x, y = data()
    wide = np.concatenate([x, x], axis=1)
    options: dict[str, Any] = {"steps": 2, "batch_size": 8, "progress": False}
    with pytest.raises(DataError, match=r"eval_data\[0\] is float32\[8\] per example"):
        trainer.fit((x, y), eval_data=(wide, y), **options)
    trainer.fit((x, y), **options)
    with pytest.raises(DataError, match=r"data\[0\] is float32\[8\] .* float32\[4\]"):
        trainer.fit((wide, y), **options)
    with pytest.raises(DataError, match=r"data\[1\] is float32\[\] .* int32\[\]"):
        trainer.evaluate((x, y.astype(np.float32)))
    with pytest.raises(DataError, match="give the same structure"):
        trainer.fit({"x": x, "y": y}, **options)
    assert trainer.fit((x, y), **options).steps == 4


def test_data_that_the_model_cannot_take_is_described() -> None:
    trainer = Trainer(NnxMLP(rngs=nnx.Rngs(0)), nnx_loss, optax.sgd(0.1))
    x, y = data()
    with pytest.raises(
        DataError, match=r"batch of data\[0\] float32\[8,8\], data\[1\]"
    ):
        trainer.fit(
            (np.concatenate([x, x], axis=1), y), steps=1, batch_size=8, progress=False
        )
    trainer.fit((x, y), steps=1, batch_size=8, progress=False)


def test_closed_trainer_says_so() -> None:
    trainer = Trainer(NnxMLP(rngs=nnx.Rngs(0)), nnx_loss, optax.sgd(0.1))
    trainer.close()
    with pytest.raises(ConfigError, match="this Trainer was closed"):
        trainer.fit(data(), steps=1, batch_size=8, progress=False)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda model, batch: model(batch[0]), r"metric 'm' has shape \(40, 2\)"),
        (lambda model, batch: None, "metric 'm' returned None; return the mean"),
    ],
)
def test_metric_that_has_no_mean_is_refused_before_the_training(
    metric: Any, message: str
) -> None:
    trainer = nnx_trainer(metrics={"m": metric})
    with pytest.raises(ConfigError, match=message):
        trainer.fit(data(), steps=5, batch_size=8, eval_data=data(), progress=False)
    assert fit(trainer, 1).steps == 1


def test_keys_of_a_batch_that_have_no_order_are_named() -> None:
    x, y = data()
    with pytest.raises(DataError, match="dict with the keys 0, 'y', which have no ord"):
        nnx_trainer().fit({0: x, "y": y}, steps=1, batch_size=8, progress=False)
