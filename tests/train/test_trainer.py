"""A Trainer gives what a plain JAX and optax loop gives, and says what is wrong."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.errors import (
    ClusterBusyError,
    ConfigError,
    DataError,
    DeadlineError,
)
from jgraph.train.run.report import Report
from jgraph.train.run.run import Run
from jgraph.train.trainer import Trainer
from tests.support.models import (
    BATCH,
    LinenMLP,
    LinenNorm,
    NnxMLP,
    NnxNorm,
    batches_of,
    by_hand,
    cross_entropy,
    data,
    linen_loss,
    linen_norm_loss,
    nnx_loss,
)

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(1e-2),
    "adamw with schedule": optax.adamw(optax.cosine_decay_schedule(1e-2, 20)),
    "clip and adam": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
    "two at once": optax.multi_transform(
        {"w": optax.adam(1e-2), "b": optax.sgd(0.1)},
        lambda params: jax.tree.map(lambda p: "b" if p.ndim == 1 else "w", params),
    ),
    "plateau": optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=2, cooldown=0)
    ),
    "noise": optax.chain(optax.sgd(0.1), optax.add_noise(0.1, 0.5, 0)),
}
SIMPLE = [name for name in OPTIMIZERS if name != "plateau"]


def nnx_trainer(
    tx: Any = OPTIMIZERS["sgd"], loss: Any = nnx_loss, **kw: Any
) -> Trainer:
    return Trainer(NnxMLP(rngs=nnx.Rngs(0)), loss, tx, **kw)


def fit(trainer: Trainer, steps: int = 20, **kw: Any) -> Run:
    return trainer.fit(data(), steps=steps, batch_size=BATCH, progress=False, **kw)


def assert_close(a: Any, b: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-6, 1e-6), a, b)


# ------------------------------------------------------------ equal to a plain loop


@pytest.mark.parametrize("name", SIMPLE)
def test_nnx_training_equals_a_plain_loop(name: str) -> None:
    tx = OPTIMIZERS[name]
    graphdef, params = nnx.split(NnxMLP(rngs=nnx.Rngs(0)))
    loss = lambda p, batch: nnx_loss(nnx.merge(graphdef, p), batch)
    wanted, losses = by_hand(params, loss, tx, steps=20)
    run = fit(nnx_trainer(tx))
    assert_close(nnx.state(run.model(), nnx.Param), wanted)
    assert_close(run.metrics("loss")["value"].tolist(), losses)


@pytest.mark.parametrize("name", ["momentum", "clip and adam"])
def test_linen_training_equals_a_plain_loop(name: str) -> None:
    tx = OPTIMIZERS[name]
    variables = LinenMLP().init(jax.random.key(3), data()[0][:1])
    wanted, losses = by_hand(variables["params"], linen_loss, tx, steps=20)
    run = fit(Trainer(LinenMLP(), linen_loss, tx, variables=variables))
    assert_close(run.model(), wanted)
    assert_close(run.metrics("loss")["value"].tolist(), losses)


def test_optimizer_that_wants_the_loss_gets_it() -> None:
    trainer = nnx_trainer(OPTIMIZERS["plateau"])
    fit(trainer, steps=3)
    assert trainer.model() is not None


def test_optimizer_that_takes_no_loss_is_not_given_it() -> None:
    tx = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01), reset_state=False)
    run = Trainer(NnxMLP(rngs=nnx.Rngs(0)), nnx_loss, tx).fit(
        data(), steps=200, batch_size=8, progress=False
    )
    loss = run.metrics("loss")["value"]
    assert loss[-20:].mean() < loss[:20].mean()


def test_two_fits_are_one_longer_fit() -> None:
    once, twice = nnx_trainer(), nnx_trainer()
    fit(once, 20)
    fit(twice, 12)
    run = fit(twice, 8)
    assert_close(nnx.state(once.model()), nnx.state(twice.model()))
    assert run.metrics("loss")["step"].tolist() == list(range(13, 21))


def test_the_users_model_is_not_changed_by_training() -> None:
    model = NnxMLP(rngs=nnx.Rngs(0))
    before = jax.tree.map(np.array, nnx.state(model))
    fit(Trainer(model, nnx_loss, optax.sgd(0.1)))
    assert_close(nnx.state(model), before)


def test_linen_parameters_are_initialised_from_the_first_field() -> None:
    trainers = [Trainer(LinenMLP(), linen_loss, optax.sgd(0.1)) for _ in range(2)]
    first, second = (fit(trainer, 2).model() for trainer in trainers)
    assert set(first) == {"Dense_0", "Dense_1"}
    assert_close(first, second)


# ------------------------------------------------------------ state and randomness


def test_nnx_batch_norm_statistics_are_those_of_a_plain_loop() -> None:
    def loss(model: Any, batch: Any) -> Any:
        return cross_entropy(model.last(model.norm(model.first(batch[0]))), batch[1])

    model = NnxNorm(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    trained = fit(Trainer(model, loss, optax.sgd(0.1)), 10).model()

    x, y = data()
    stream = batches_of({"x": x, "y": y}, BATCH, seed=0)
    for _ in range(10):
        batch = next(stream)
        grads = nnx.grad(loss)(model, (batch["x"], batch["y"]))
        optimizer.update(model, grads)
    assert_close(nnx.state(trained, nnx.BatchStat), nnx.state(model, nnx.BatchStat))
    assert_close(nnx.state(trained, nnx.Param), nnx.state(model, nnx.Param))


def test_linen_collections_come_back_from_the_loss() -> None:
    trainer = Trainer(LinenNorm(), linen_norm_loss, optax.sgd(0.1))
    run = fit(trainer, 10)
    variables = run.model()
    assert set(variables) == {"params", "batch_stats"}
    assert not np.allclose(variables["batch_stats"]["BatchNorm_0"]["mean"], 0)
    assert run.metrics("accuracy")["value"].shape == (10,)
    assert run.metric_names == ["accuracy", "loss"]


@pytest.mark.parametrize(
    "kind", ["nnx", pytest.param("linen", marks=pytest.mark.nightly)]
)
def test_dropout_differs_between_steps_and_repeats_with_the_seed(kind: str) -> None:
    def trainer(seed: int) -> Trainer:
        if kind == "nnx":
            model = NnxNorm(rngs=nnx.Rngs(0))
            return Trainer(model, nnx_loss, optax.sgd(0.0), seed=seed)
        variables = LinenNorm().init(jax.random.key(0), data()[0][:1])
        return Trainer(
            LinenNorm(), linen_norm_loss, optax.sgd(0.0), seed=seed, variables=variables
        )

    x, y = data(BATCH)  # every batch has the same examples
    losses = [
        trainer(seed).fit((x, y), steps=4, batch_size=BATCH, progress=False)
        for seed in (0, 0, 1)
    ]
    first, again, other = (run.metrics("loss")["value"] for run in losses)
    assert len(set(first.tolist())) == 4
    assert first.tolist() == again.tolist()
    assert not set(first.tolist()) & set(other.tolist())


def test_evaluation_uses_neither_dropout_nor_batch_statistics() -> None:
    trainer = Trainer(NnxNorm(rngs=nnx.Rngs(0)), nnx_loss, optax.sgd(0.1))
    run = fit(trainer, 5)
    model = run.model()
    model.eval()
    x, y = data()
    wanted = float(cross_entropy(model(x), y))
    assert trainer.evaluate((x, y), batch_size=7)["loss"] == pytest.approx(wanted)
    np.testing.assert_allclose(
        trainer.predict(x, batch_size=7), model(x), rtol=1e-4, atol=1e-6
    )


def test_inputs_that_the_model_cannot_take_are_told_beside_those_known() -> None:
    def wrong(model: Any, x: Any) -> Any:
        return model(x, x, x)

    trainer = Trainer(NnxMLP(rngs=nnx.Rngs(0)), nnx_loss, optax.sgd(0.1))
    x, y = data()
    text = (
        r"from x float32\[40,2\]: .*trainer\.predict\(x\) examples as the model takes"
    )
    with pytest.raises(DataError, match=text):
        trainer.predict(np.ones((40, 2), np.float32))
    fit(trainer, 5)
    text = rf"[^.]\. It was trained on .*float32\[…,{x.shape[1]}\].*fn=…"
    with pytest.raises(DataError, match=text):
        trainer.predict(np.ones((40, 2), np.float32))
    with pytest.raises(DataError, match=r"TypeError: .*positional arguments"):
        trainer.predict(x, fn=wrong)
    assert len(trainer.predict(x)) == len(y)


def test_linen_training_loss_is_not_evaluated_but_metrics_are() -> None:
    def accuracy(variables: Any, batch: Any) -> Any:
        logits: Any = LinenNorm().apply(variables, batch[0])
        return jnp.mean(logits.argmax(-1) == batch[1])

    def make(metrics: dict[str, Any]) -> Trainer:
        return Trainer(LinenNorm(), linen_norm_loss, optax.sgd(0.1), metrics=metrics)

    trainer = make({"accuracy": accuracy})
    run = fit(trainer, 5, eval_data=data())
    assert list(run.evaluate(data())) == ["accuracy"]
    assert trainer.predict(data()[0]).shape == (40, 2)
    with pytest.raises(ConfigError, match="nothing to evaluate"):
        make({}).evaluate(data())


# ------------------------------------------------------------ metrics and evaluation


def loss_with_metrics(model: Any, batch: Any) -> Any:
    logits = model(batch[0])
    accuracy = jnp.mean(logits.argmax(-1) == batch[1])
    return cross_entropy(logits, batch[1]), {"accuracy": accuracy, "logits": logits}


def test_metrics_of_the_loss_are_kept_for_every_step() -> None:
    run = fit(nnx_trainer(loss=loss_with_metrics), 6, eval_data=data(), eval_every=2)
    loss = run.metrics("loss")
    assert loss["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert loss["replica"].tolist() == [0] * 6
    assert (np.diff(loss["seconds"]) >= 0).all()
    assert run.metrics("logits")["value"].shape == (6, BATCH, 2)
    evaluated = run.metrics("eval_accuracy")
    assert evaluated["step"].tolist() == [2, 4, 6]
    assert evaluated["value"][-1] == run.evaluate(data())["accuracy"]
    with pytest.raises(ConfigError, match="no metric 'acc'; it has accuracy, logits"):
        run.metrics("acc")


def test_evaluation_counts_every_example_once() -> None:
    trainer = nnx_trainer(metrics={"mean_x": lambda model, batch: batch[0].mean()})
    fit(trainer, 1)
    x, y = data(11)
    for batch_size in (3, 11, 100):
        found = trainer.evaluate((x, y), batch_size=batch_size)
        assert found["mean_x"] == pytest.approx(x.mean(), abs=1e-6)


def test_callbacks_see_reports_and_can_stop_the_run() -> None:
    seen: list[Report] = []

    def callback(run: Run, report: Report) -> None:
        seen.append(report)
        run.stop()

    run = fit(nnx_trainer(), 1000, eval_data=data(), eval_every=5, callbacks=[callback])
    assert run.state == "stopped"
    assert seen[0].step == 5
    assert run.steps < 1000
    assert run.model() is not None


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Hears SIGINT, which a shell has its background processes ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("heard_by", ["the process", "another thread"])
def test_interrupt_ends_a_blocking_run_after_the_current_step(heard_by: str) -> None:
    interrupts = iter([signal.SIGINT])

    def callback(run: Run, report: Report) -> None:
        for interrupt in interrupts:
            if heard_by == "the process":
                os.kill(os.getpid(), interrupt)
            else:  # nothing wakes the main thread
                signal.pthread_kill(threading.get_ident(), interrupt)

    trainer = nnx_trainer()
    run = fit(trainer, 1_000_000, eval_data=data(), eval_every=5, callbacks=[callback])
    assert run.state == "stopped"
    assert run.steps == trainer.current_values()[0] > 0


def test_error_in_a_callback_ends_the_run_and_is_raised() -> None:
    def callback(run: Run, report: Report) -> None:
        raise ZeroDivisionError

    trainer = nnx_trainer()
    with pytest.raises(ZeroDivisionError):
        fit(trainer, 10, callbacks=[callback])
    assert fit(trainer, 1).state == "done"


def test_background_run_can_be_watched_and_stopped() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def callback(run: Run, report: Report) -> None:
        entered.set()
        assert go_on.wait(30)

    trainer = nnx_trainer()
    run = fit(
        trainer, 1000, eval_data=data(), eval_every=5, callbacks=[callback], block=False
    )
    assert entered.wait(30)
    assert run.state == "running"
    assert "running" in repr(run)
    assert "5/1000" in run._repr_html_()
    assert run.model() is not None
    with pytest.raises(ClusterBusyError, match="already training"):
        fit(trainer, 1)
    with pytest.raises(DeadlineError, match="still going on after 0 s"):
        run.wait(0)
    run.stop()
    go_on.set()
    assert run.wait(30).state == "stopped"


def test_run_keeps_what_came_out_when_the_trainer_goes_on() -> None:
    trainer = nnx_trainer()
    first = fit(trainer, 5)
    before = jax.tree.map(np.array, nnx.state(first.model()))
    fit(trainer, 5)
    assert_close(nnx.state(first.model()), before)


def test_curves_are_a_picture_in_a_file_and_in_a_notebook(tmp_path: Any) -> None:
    run = fit(nnx_trainer(loss=loss_with_metrics), 6, eval_data=data())
    path = run.curves(tmp_path / "new" / "curves.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert run.plot()._repr_png_().startswith(b"\x89PNG")
    assert len(run.plot("loss", "eval_loss").figure.axes) == 2
    with pytest.raises(ConfigError, match="no metric 'los'; it has"):
        run.plot("los")
    with pytest.raises(ConfigError, match=r"cannot write the plot to .*curves\.doc"):
        run.curves(tmp_path / "curves.doc")


def test_other_data_of_the_same_sizes_begins_an_epoch_of_its_own() -> None:
    def loss(model: Any, batch: Any) -> Any:
        return nnx_loss(model, batch[:2]), {"number": batch[2]}

    x, y = data()
    numbers = np.arange(len(x), dtype=np.int32)
    there = Trainer(NnxMLP(rngs=nnx.Rngs(0)), loss, optax.sgd(0.1))
    options: dict[str, Any] = {"batch_size": BATCH, "progress": False}
    there.fit((x, y, numbers), steps=2, **options)
    same = there.fit((x, y, numbers), steps=1, **options)  # goes on in that epoch
    assert there.current_position()["epoch"] == 0  # type: ignore[index]
    other = there.fit((x, y, numbers + 100), steps=5, **options)  # an epoch
    found = np.sort(other.metrics("number")["value"].ravel())
    assert found.tolist() == (numbers + 100).tolist()
    assert same.steps == 3


def test_a_run_has_64_bit_types_if_they_are_on_where_it_was_begun() -> None:
    with jax.enable_x64(True):
        model = nnx.Linear(2, 1, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        x = np.linspace(-1.0, 1.0, 16).reshape(8, 2)
        trainer = Trainer(
            model, lambda model, x: jnp.mean(model(x) ** 2), optax.adam(0.1)
        )
        run = trainer.fit(x, steps=3, batch_size=8, eval_data=x, progress=False)
        assert run.model().kernel.dtype == np.float64
        assert run.steps == 3
