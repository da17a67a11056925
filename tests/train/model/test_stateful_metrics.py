"""Metrics of Flax that are updated batch by batch."""

from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.errors import ConfigError
from jgraph.train.trainer import Trainer
from tests.support.models import (
    LinenMLP,
    NnxMLP,
    cross_entropy,
    data,
    linen_loss,
    nnx_loss,
)


def seen(model: Any, batch: Any) -> dict[str, Any]:
    x, y = batch
    logits = model(x)
    return {"logits": logits, "labels": y, "values": cross_entropy(logits, y)}


def metrics() -> nnx.MultiMetric:
    return nnx.MultiMetric(
        accuracy=nnx.metrics.Accuracy(),
        mean=nnx.metrics.Average(),
        spread=nnx.metrics.Welford("logits"),
    )


@pytest.mark.parametrize("batch_size", [7, 40])
def test_they_are_what_a_plain_loop_finds(batch_size: int) -> None:
    x, y = data()
    given = metrics()
    model = NnxMLP(rngs=nnx.Rngs(0))
    trainer = Trainer(model, nnx_loss, optax.sgd(0.1), metrics=(given, seen))
    run = trainer.fit((x, y), steps=10, batch_size=8, progress=False, eval_data=(x, y))
    found = run.evaluate((x, y), batch_size=batch_size)
    trained, wanted = run.model(), metrics()
    for at in range(0, len(x), batch_size):
        wanted.update(
            **seen(trained, (x[at : at + batch_size], y[at : at + batch_size]))
        )
    by_hand: Any = wanted.compute()
    assert found["accuracy"] == pytest.approx(float(by_hand["accuracy"]))
    assert found["mean"] == pytest.approx(float(by_hand["mean"]))
    spread = float(by_hand["spread"].standard_deviation)
    assert found["spread_standard_deviation"] == pytest.approx(spread, rel=1e-4)
    assert "loss" in found
    assert run.metrics("eval_accuracy")["value"].shape == (1,)
    untouched: Any = given.compute()
    assert np.isnan(untouched["accuracy"])


def test_a_linen_model_has_them_too() -> None:
    x, y = data()

    def logits_of(params: Any, batch: Any) -> dict[str, Any]:
        logits = LinenMLP().apply({"params": params}, batch[0])
        return {"logits": logits, "labels": batch[1]}

    trainer = Trainer(
        LinenMLP(),
        linen_loss,
        optax.sgd(0.1),
        metrics=(nnx.MultiMetric(accuracy=nnx.metrics.Accuracy()), logits_of),
    )
    trainer.fit((x, y), steps=5, batch_size=8, progress=False)
    assert 0.0 <= trainer.evaluate((x, y))["accuracy"] <= 1.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"accuracy": 3}, "give functions by name"),
        (nnx.metrics.Accuracy(), r"\(nnx.MultiMetric"),
        ((metrics(), "logits"), r"\(nnx.MultiMetric"),
        ([seen], "give functions by name"),
    ],
)
def test_what_are_no_metrics_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Trainer(NnxMLP(rngs=nnx.Rngs(0)), nnx_loss, optax.sgd(0.1), metrics=given)


@pytest.mark.parametrize("fn", [lambda m, batch: m(batch[0]), lambda m, batch: None])
def test_a_function_that_gives_no_dict_is_named(fn: Any) -> None:
    trainer = Trainer(
        NnxMLP(rngs=nnx.Rngs(0)),
        nnx_loss,
        optax.sgd(0.1),
        metrics=(metrics(), fn),
    )
    trainer.fit(data(), steps=1, batch_size=8, progress=False)
    with pytest.raises(ConfigError, match="return what update takes"):
        trainer.evaluate(data())
