"""Metrics of any shape of tree and any numeric type, alike on every strategy."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, strategies as st

from jgraph.client.cluster import Cluster
from jgraph.coordination.step.step_metrics import from_pieces
from jgraph.errors import ConfigError, GraphError
from jgraph.train.model.metrics import named_metrics, pieces
from jgraph.train.run.report import Report
from jgraph.train.run.run import Run
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.local import Local
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.models import BATCH, NnxMLP, data, nnx_loss

INT32 = np.iinfo(np.int32)
TREE: dict[str, Any] = {
    "lr": 0.1,
    "count": 7,
    "flag": True,
    "nested": {"a": {"b": jnp.float32(1 / 3)}, "list": [1.5, (2, jnp.int8(-3))]},
    "odd": jnp.int32(2**24 + 1),
    "ends": jnp.array([INT32.min, INT32.max, -(2**24) - 3], jnp.int32),
    "large": jnp.uint32(2**32 - 1),
    "small": [jnp.uint8(255), jnp.int16(-(2**15)), jnp.uint16(2**16 - 1)],
    "half": [jnp.bfloat16(1.171875), jnp.float16(0.333)],
    "complex": jnp.complex64(1 + 2j),
    "matrix": jnp.arange(6).reshape(2, 3),
    "none": None,
}


def loss(model: Any, batch: Any) -> Any:
    return nnx_loss(model, batch), TREE


def run_of(cluster: Cluster, strategy: Strategy, loss: Any, **options: Any) -> Run:
    options = {"steps": 2, "batch_size": BATCH, "progress": False, **options}
    there = Trainer(
        NnxMLP(rngs=nnx.Rngs(0)),
        loss,
        optax.sgd(0.1),
        strategy=strategy,
        cluster=None if isinstance(strategy, Local) else cluster,
    )
    try:
        return there.fit(data(), **options)
    finally:
        there.close()


@pytest.mark.parametrize(
    "strategy",
    [Local(), AsyncPS(), pytest.param(SyncPS(), marks=pytest.mark.nightly)],
    ids=repr,
)
def test_every_number_that_a_loss_returns_beside_its_value_is_a_metric(
    cluster: Cluster, strategy: Strategy
) -> None:
    reports: list[Report] = []
    keep = [lambda run, report: reports.append(report)]
    run = run_of(cluster, strategy, loss, callbacks=keep)
    due = named_metrics(TREE)
    assert {"nested/a/b", "nested/list/1/0", "half/0"} < due.keys()
    assert due.keys() < {*run.metric_names}
    for name, value in due.items():
        found = run.metrics(name)["value"]
        assert found.shape == (2, *value.shape)
        wide: Any = np.complex128 if np.iscomplexobj(value) else np.float64
        np.testing.assert_array_equal(
            found.astype(wide), [np.asarray(value).astype(wide)] * 2, name
        )
    assert reports[-1].metrics["odd"] == 2**24 + 1
    assert reports[-1].metrics["half/0"] == 1.171875
    assert "complex" not in reports[-1].metrics


def test_mean_of_whole_numbers_over_workers_is_exact(cluster: Cluster) -> None:
    first = {"least": 2**30 + 1, "least but one": -(2**31)}

    def counted(model: Any, batch: Any) -> Any:
        low = batch[1].min()  # 0 in every batch
        metrics = {name: low + jnp.int32(value) for name, value in first.items()}
        return nnx_loss(model, batch), {**metrics, "labels": batch[1].sum()}

    run = run_of(cluster, SyncPS(), counted, steps=5)
    for name, value in first.items():
        assert run.metrics(name)["value"].tolist() == [value] * 5
    labels = run.metrics("labels")["value"]
    assert (2 * labels == np.rint(2 * labels)).all()
    assert labels.sum() * 2 == data()[1].sum() * 2  # an epoch is 5 batches of 8


@given(
    st.sampled_from([np.int32, np.uint32]),
    st.integers(1, 64),
    st.integers(0, 2**32 - 1),
)
def test_pieces_give_the_exact_mean_of_any_whole_numbers(
    dtype: Any, workers: int, seed: int
) -> None:
    limits = np.iinfo(dtype)
    rng = np.random.default_rng(seed)
    values = rng.integers(limits.min, limits.max, (workers, 3), endpoint=True)
    values[0] = limits.min, limits.max, values[0, 2]
    sent = [np.asarray(pieces(jnp.asarray(v, dtype))) for v in values]
    total = np.zeros_like(sent[0])
    for one in sent:
        total += one
    mean = (total / np.float32(workers)).astype(np.float32)
    found = from_pieces(mean[None], np.array([workers]))
    assert (found == values.sum(axis=0) / workers).all()


@pytest.mark.parametrize(
    "strategy",
    [Local(), SyncPS(), pytest.param(AsyncPS(), marks=pytest.mark.nightly)],
    ids=repr,
)
def test_loss_and_metrics_in_bfloat16_are_evaluated_and_drawn(
    cluster: Cluster, strategy: Strategy, tmp_path: Path
) -> None:
    def half(model: Any, batch: Any) -> Any:
        value = nnx_loss(model, batch).astype(jnp.bfloat16)
        return value, {"one": jnp.ones((), jnp.bfloat16)}

    run = run_of(
        cluster, strategy, half, steps=4, eval_data=data(24, seed=1), eval_every=2
    )
    found = run.evaluate(data(300, seed=1))  # two batches
    assert found["one"] == 1.0
    assert 0 < found["loss"] < 2
    assert run.metrics("eval_one")["value"].tolist()[-1] == 1.0
    assert run.plot().save(tmp_path / "curves.png").exists()


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("text", r"metric 'bad' is 'text' \(str\).*return numbers"),
        (2**40, r"metric 'bad' is 1099511627776 \(int\)"),
        (jax.random.key(0), "metric 'bad' has dtype key<fry>; return numbers"),
    ],
)
def test_what_is_no_number_is_refused_by_name(metric: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        named_metrics({"bad": metric})
    with pytest.raises(GraphError, match="two metrics are called 'a/b'"):
        named_metrics({"a/b": 1, "a": {"b": 2}})


def test_complex_metric_cannot_be_evaluated() -> None:
    def complex_loss(model: Any, batch: Any) -> Any:
        return nnx_loss(model, batch), {"phase": jnp.complex64(1j)}

    there = Trainer(NnxMLP(rngs=nnx.Rngs(0)), complex_loss, optax.sgd(0.1))
    with pytest.raises(ConfigError, match="'phase' is complex64; return a real number"):
        there.evaluate(data())
