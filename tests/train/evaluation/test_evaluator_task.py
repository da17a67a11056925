"""Evaluation on a task of its own, while the others train on."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.client.cluster import Cluster, connect
from jgraph.errors import ConfigError, DataError, TaskLostError
from jgraph.graph.rows.hash_spec import Initial
from jgraph.train.data.source import Source
from jgraph.train.evaluation.evaluations import Evaluation, Evaluations
from jgraph.train.hash_tables.hash_table import HashTable
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.models import (
    NnxMLP,
    NnxNorm,
    cross_entropy,
    data,
    nnx_loss,
)
from tests.support.servers import Servers


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    servers = Servers(ps=2, worker=2, evaluator=1)
    with connect(servers.servers[0].target, timeout_s=20) as cluster:
        yield cluster
    servers.stop()


def fit(trainer: Trainer, steps: int, eval_data: Any, **options: Any) -> Any:
    return trainer.fit(
        data(),
        steps=steps,
        batch_size=8,
        eval_data=eval_data,
        progress=False,
        **options,
    )


def assert_like_here(trainer: Trainer, run: Any, eval_data: Any) -> None:
    """The last evaluation is what this process says about what came out."""
    here = trainer.evaluate(eval_data)
    assert here
    for name, value in here.items():
        found = run.metrics(f"eval_{name}")
        assert found["value"][-1] == pytest.approx(value, rel=1e-5)
        assert found["step"][-1] == run.steps


@pytest.mark.parametrize(
    "strategy",
    [AsyncPS(), pytest.param(SyncPS(), marks=pytest.mark.nightly)],
    ids=["async", "sync"],
)
def test_evaluator_says_what_the_client_would(cluster: Cluster, strategy: Any) -> None:
    metrics = {"mean_x": lambda model, batch: batch[0].mean()}
    trainer = Trainer(
        NnxNorm(rngs=nnx.Rngs(0)),
        nnx_loss,
        optax.adam(1e-2),
        cluster=cluster,
        strategy=strategy,
        metrics=metrics,
    )
    eval_data = data(600, seed=1)  # two whole batches, and one of 88
    run = fit(trainer, 6, eval_data, eval_every=2)
    assert_like_here(trainer, run, eval_data)
    found = run.metrics("eval_mean_x")
    assert found["value"] == pytest.approx(eval_data[0].mean(), abs=1e-5)
    steps = found["step"].tolist()
    assert steps == sorted(set(steps))
    held = {(row.task, row.container) for row in variables(cluster)}
    assert any(t == "/job:evaluator/task:0" and "evaluator" in c for t, c in held)
    trainer.close()


def variables(cluster: Cluster) -> Any:
    from jgraph.rpc._pb import jgraph_pb2 as pb
    from jgraph.rpc.frames import body_of, frame

    query = frame(variable_query=pb.VariableQuery())
    return body_of(cluster.call("Master.Variables", query)).variables


def test_a_second_run_evaluates_other_data(cluster: Cluster) -> None:
    trainer = Trainer(
        NnxMLP(rngs=nnx.Rngs(0)), nnx_loss, optax.sgd(0.1), cluster=cluster
    )
    fit(trainer, 2, data(20, seed=1))
    run = fit(trainer, 2, data(20, seed=2))
    assert_like_here(trainer, run, data(20, seed=2))
    trainer.close()


class Tables(nnx.Module):
    """A table that goes by rows, and a tied one that does not."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.large = nnx.Embed(20_000, 16, rngs=rngs)
        self.small = nnx.Embed(4, 16, rngs=rngs)

    def __call__(self, batch: Any) -> Any:
        return self.small.attend(self.large(batch["user"]) + self.small(batch["item"]))


def table_loss(model: Any, batch: Any) -> Any:
    return cross_entropy(model(batch), batch["y"])


@pytest.mark.parametrize("shards", [pytest.param(0, marks=pytest.mark.nightly), 2])
def test_tables_are_looked_up_by_rows_and_not_copied(
    cluster: Cluster, shards: int
) -> None:
    import jgraph as jg

    cut = jg.fixed_size_partitioner(shards) if shards else None
    trainer = Trainer(
        Tables(rngs=nnx.Rngs(0)),
        table_loss,
        optax.adagrad(0.1),
        cluster=cluster,
        strategy=AsyncPS(variable_partitioner=cut),
    )
    rng = np.random.default_rng(0)
    batch = {
        "user": rng.integers(0, 20_000, 300),
        "item": rng.integers(0, 4, 300),
        "y": rng.integers(0, 4, 300),
    }
    run = trainer.fit(
        batch, steps=4, batch_size=8, eval_data=batch, eval_every=2, progress=False
    )
    assert_like_here(trainer, run, batch)
    copied = [r.name for r in variables(cluster) if r.task.startswith("/job:evaluator")]
    assert "params/small/embedding" in copied
    assert "params/large/embedding" not in copied
    trainer.close()


def square_loss(model: Any, batch: Any) -> Any:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


class Keys(nnx.Module):
    """A hash table whose new rows are far from the mean of new rows."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        initial = Initial("normal", 3.0, seed=1)
        self.ads = HashTable(4, 1 << 20, initializer=initial)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, batch: Any) -> Any:
        return self.out(self.ads(batch["ad"]))[:, 0]


def test_an_evaluation_brings_no_key_into_a_hash_table(cluster: Cluster) -> None:
    def batch(first: int, count: int) -> dict[str, Any]:
        return {"ad": np.arange(first, first + count, dtype=np.int32)}

    trainer = Trainer(
        Keys(rngs=nnx.Rngs(0)),
        lambda model, x: (model(x) ** 2).mean(),
        optax.adagrad(0.1),
        cluster=cluster,
    )
    eval_data = batch(32, 64)  # half of its keys are never trained
    options: dict[str, Any] = {"steps": 4, "batch_size": 16, "eval_data": eval_data}
    run = trainer.fit(batch(0, 64), progress=False, **options)
    assert_like_here(trainer, run, eval_data)
    events = run.events()
    assert sum(event.admitted for event in events) == 64
    trainer.close()


@pytest.mark.parametrize("has_evaluator", [True, False])
def test_source_is_evaluated_where_it_is_read(
    cluster: Cluster, tmp_path: Path, has_evaluator: bool
) -> None:
    x = np.linspace(-1, 1, 300, dtype=np.float32)[:, None]
    np.savez(tmp_path / "data.npz", x=x, y=2 * x)
    source = Source.npz(str(tmp_path / "data.npz"))
    trainer = Trainer(
        nnx.Linear(1, 1, rngs=nnx.Rngs(0)),
        square_loss,
        optax.sgd(0.1),
        cluster=cluster if has_evaluator else None,
    )
    run = trainer.fit(source, steps=3, batch_size=8, eval_data=source, progress=False)
    arrays = {"x": x, "y": 2 * x}
    assert trainer.evaluate(source) == pytest.approx(run.evaluate(source))
    assert run.metrics("eval_loss")["value"][-1] == pytest.approx(
        float(jnp.mean((run.model()(arrays["x"]) - arrays["y"]) ** 2)), rel=1e-5
    )
    trainer.close()


def test_what_cannot_be_evaluated_is_refused_before_training(cluster: Cluster) -> None:
    metrics = {"x": lambda model, batch: batch[0]}
    trainer = Trainer(
        NnxMLP(rngs=nnx.Rngs(0)),
        nnx_loss,
        optax.sgd(0.1),
        cluster=cluster,
        metrics=metrics,
    )
    with pytest.raises(ConfigError, match="metric 'x' has shape"):
        fit(trainer, 1, data())
    with pytest.raises(DataError):
        fit(trainer, 1, data()[0])
    assert trainer.fit(data(), steps=1, batch_size=8, progress=False).steps == 1
    trainer.close()


# ------------------------------------------------------------ when it evaluates


class Slow:
    """An evaluator task that evaluates when it is let."""

    def __init__(self) -> None:
        self.let = threading.Semaphore(0)
        self.made = 0

    def __call__(self) -> Evaluation:
        assert self.let.acquire(timeout=10)
        self.made += 1
        return Evaluation(self.made, {"loss": 0.5})


def failing() -> Evaluation:
    raise TaskLostError("/job:evaluator/task:0 is gone")


def here(step: int = 0) -> Callable[[], Evaluation]:
    return lambda: Evaluation(step, {"loss": 1.0})


def test_asked_twice_while_it_evaluates_it_evaluates_once_more() -> None:
    slow = Slow()
    evaluations = Evaluations(here(), slow)
    for _ in range(3):
        evaluations.begin()
    assert evaluations.take() == []
    for _ in range(3):
        slow.let.release()
    found = evaluations.finish(2)
    assert [e.step for e in found] == [1, 2]


def test_what_is_evaluated_last_is_what_came_out() -> None:
    slow = Slow()
    evaluations = Evaluations(here(), slow)
    evaluations.begin()
    slow.let.release()
    assert [e.step for e in evaluations.finish(1)] == [1]
    assert slow.made == 1
    assert evaluations.finish(1) == []
    assert slow.made == 1


def test_after_an_error_of_the_evaluator_task_the_client_evaluates(caplog: Any) -> None:
    steps = iter((2, 3))
    evaluations = Evaluations(lambda: Evaluation(next(steps), {"loss": 1.0}), failing)
    evaluations.begin()
    assert evaluations.finish(2) == [Evaluation(2, {"loss": 1.0})]
    evaluations.begin()
    assert evaluations.take() == [Evaluation(3, {"loss": 1.0})]
    (record,) = caplog.records
    assert "this client evaluates from now on" in record.getMessage()


def test_where_the_client_cannot_evaluate_either_it_says_so_once(caplog: Any) -> None:
    def nowhere() -> Any:
        raise DataError("no such file here")

    evaluations = Evaluations(nowhere, failing)
    evaluations.begin()
    assert evaluations.finish(2) == []
    evaluations.begin()
    assert evaluations.take() == []
    (record,) = caplog.records
    assert "is not evaluated from now on" in record.getMessage()


def test_a_trainer_made_after_the_evaluator_is_lost_evaluates_here(
    caplog: pytest.LogCaptureFixture,
) -> None:
    servers = Servers(ps=1, worker=1, evaluator=1)
    with connect(servers.servers[0].target, timeout_s=20) as cluster:
        servers.lose("/job:evaluator/task:0")
        trainer = Trainer(
            NnxMLP(rngs=nnx.Rngs(0)), nnx_loss, optax.sgd(0.1), cluster=cluster
        )
        eval_data = data(20, seed=1)
        run = fit(trainer, 3, eval_data)
        assert_like_here(trainer, run, eval_data)
        trainer.close()
    servers.stop()
    assert "this client evaluates from now on: " in caplog.text
    assert "/job:evaluator/task:0" in caplog.text
