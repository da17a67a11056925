"""Workers that share the batch of an update train as one process does on all of it."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster, connect
from jgraph.errors import ConfigError
from jgraph.server.server import Server
from jgraph.train.strategies.batch_share import cut_for
from jgraph.train.strategies.sync_runner import SyncRunner
from jgraph.train.trainer import Trainer
from tests.support.members import two_join_and_one_leaves
from tests.support.servers import Servers

pytestmark = pytest.mark.usefixtures("nothing_is_left")

EXAMPLES, BATCH, WORKERS = 96, 8, 2
X = np.random.default_rng(0).normal(size=(EXAMPLES, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True) ** 2
DATA = {"id": np.arange(EXAMPLES), "x": X, "y": Y}
MEASURED = jg.SyncPS(batch_share="measured", step_timeout_s=20)


class Model(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(3, 8, rngs=rngs)])
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(nnx.tanh(self.layers[0](x)))


def loss(model: Any, batch: Any) -> Any:
    error = (model(batch["x"]) - batch["y"]) ** 2
    metrics = {
        "seen": jax.nn.one_hot(batch["id"], EXAMPLES).sum(0),
        "large": (error > 1).sum(),
        "all": jnp.all(error >= 0),
    }
    return error.mean(), metrics


def plain(seen: Any, tx: Any) -> Any:
    """Trains one process on what each update was made of; returns the parameters."""
    graph, params = nnx.split(Model())
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any, weights: Any) -> Any:
        def mean(params: Any) -> Any:
            each = (nnx.merge(graph, params)(X) - Y)[:, 0] ** 2
            return (each * weights).sum() / weights.sum()

        updates, state = tx.update(jax.grad(mean)(params), state, params)
        return optax.apply_updates(params, updates), state

    for weights in seen:
        params, state = step(params, state, weights)
    return params


def assert_equal(run: Any, tx: Any, examples: int) -> None:
    """Checks a run against one process, and what each update was made of."""
    seen = run.metrics("seen")["value"].astype(np.float64)
    counts = seen * examples / seen.sum(1, keepdims=True)
    np.testing.assert_allclose(counts, counts.round(), atol=1e-3)
    np.testing.assert_array_equal(counts.round().sum(1), examples)
    ours, theirs = jax.tree.leaves(nnx.state(run.model())), plain(counts.round(), tx)
    for a, b in zip(ours, jax.tree.leaves(theirs), strict=True):
        assert np.abs(a - b).max() <= 1e-6 * max(1.0, float(np.abs(b).max()))


def trained_on(cluster: Cluster, strategy: jg.SyncPS, tx: Any, **more: Any) -> Trainer:
    return Trainer(Model(), loss, tx, cluster=cluster, strategy=strategy, **more)


def slow_down(trainer: Trainer, replica: int, seconds: float) -> None:
    """Makes a worker take that much longer for each piece, without computing."""
    runner = trainer._build()[1]
    assert isinstance(runner, SyncRunner)
    runner.compute_wait_s = {replica: seconds}


def no(word: str) -> Any:
    """A word that no option has."""
    return word


def share(run: Any, worker: int) -> float:
    (found,) = [m for m in run.members() if m.task.endswith(f"worker/task:{worker}")]
    return float(found.share)


def test_shares_by_speed_make_the_update_of_one_process(cluster: Cluster) -> None:
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
    trainer = trained_on(cluster, MEASURED, tx)
    slow_down(trainer, 1, 0.02)
    run = trainer.fit(DATA, steps=40, batch_size=BATCH, progress=False)
    assert set(run.metrics("contributions")["value"]) == {WORKERS}
    assert share(run, 1) < 0.4
    assert_equal(run, tx, WORKERS * BATCH)
    # In the order of the epoch, and none is left out.
    assert run.metrics("seen")["value"][:6].sum(0).std() <= 1e-6
    assert run.repeated() == 0
    trainer.close()


def test_without_a_slow_worker_shares_are_even_and_counts_are_those_of_a_batch(
    cluster: Cluster,
) -> None:
    totals = []
    for strategy in (jg.SyncPS(), MEASURED):
        trainer = trained_on(cluster, strategy, optax.sgd(0.1))
        run = trainer.fit(DATA, steps=4, batch_size=BATCH, progress=False)
        totals.append(run.metrics("large")["value"])
        assert run.metrics("all")["value"].tolist() == [1.0] * 4
        trainer.close()
    np.testing.assert_allclose(totals[0], totals[1])
    assert totals[0].max() > 1  # of a batch, not of a piece


@pytest.mark.nightly  # smaller: the two before, test_dense_workers.py
@pytest.mark.parametrize("dense", ["ps", "workers"])
def test_compressed_and_owned_gradients_may_be_of_shares(
    cluster: Cluster, dense: Any
) -> None:
    losses = []
    for share in ("even", "measured"):
        strategy = jg.SyncPS(gradient_dtype="bfloat16", dense=dense, batch_share=share)
        trainer = trained_on(cluster, strategy, optax.sgd(0.05))
        trainer.plan(DATA, batch_size=BATCH)
        slow_down(trainer, 1, 0.01)
        run = trainer.fit(DATA, steps=12, batch_size=BATCH, progress=False)
        losses.append(run.metrics("loss")["value"])
        trainer.close()
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-2)


def test_a_run_goes_on_where_a_shared_batch_ended(cluster: Cluster) -> None:
    trainer = trained_on(cluster, MEASURED, optax.sgd(0.1))
    seen = np.zeros(EXAMPLES)
    for _ in range(3):
        run = trainer.fit(DATA, steps=2, batch_size=BATCH, progress=False)
        seen += run.metrics("seen")["value"].sum(0)
    assert seen.std() <= 1e-6 < seen.min()
    trainer.close()


@pytest.fixture
def elastic() -> Iterator[Cluster]:
    servers = Servers(ps=2, worker=1)
    with connect(servers.servers[0].target, timeout_s=20) as cluster:
        yield cluster
    servers.stop()


@pytest.mark.parametrize(
    "batch_share", ["even", pytest.param("measured", marks=pytest.mark.nightly)]
)
def test_the_batch_of_an_update_stays_while_workers_join_and_leave(
    elastic: Cluster, batch_share: Any
) -> None:
    tx, joined = optax.sgd(1e-2), list[Server]()
    kept = jg.Elastic(workers=(1, 3), batch="global")
    strategy = jg.SyncPS(elastic=kept, batch_share=batch_share, step_timeout_s=20)
    trainer = trained_on(elastic, strategy, tx)
    run = trainer.fit(DATA, steps=10**6, batch_size=24, block=False, progress=False)
    joined += two_join_and_one_leaves(elastic.target, run)
    run.stop()
    run.wait(30)
    assert run.repeated() == 0
    assert set(run.metrics("contributions")["value"]) >= {1, 2, 3}
    assert_equal(run, tx, 24)
    trainer.close()
    for server in joined:
        server.stop(0.0)


@pytest.mark.bad_input_row(27)
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: jg.SyncPS(batch_share=no("fast")), "write batch_share='measured'"),
        (
            lambda: jg.SyncPS(batch_share="measured", backup_workers=1),
            "leave out backup_workers=",
        ),
        (
            lambda: jg.SyncPS(
                elastic=jg.Elastic(workers=(2, 3), batch="global"),
                replicas_to_aggregate=2,
            ),
            r"batch='global'\), replicas_to_aggregate=2\).*leave out repl",
        ),
        (lambda: jg.Elastic(batch=no("all")), "batch='each' for the batch of a worker"),
        (lambda: jg.Elastic(batch="global"), r"workers=\(1, 16\)"),
        (
            lambda: jg.AsyncPS(elastic=jg.Elastic(workers=(1, 2), batch="global")),
            "the batch of one worker",
        ),
        (lambda: cut_for("measured", None, 13, 2), "choose a multiple of 8"),
        (
            lambda: cut_for("even", jg.Elastic(workers=(1, 9), batch="global"), 4, 2),
            r"of 2 batches of 4 examples, which cannot be cut for 9 .*=\(1, 8\)",
        ),
    ],
)
def test_shares_that_cannot_be_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.bad_input_row(27)
def test_data_of_this_process_and_tables_by_rows_are_refused(cluster: Cluster) -> None:
    trainer = trained_on(cluster, MEASURED, optax.sgd(0.1))
    stream = ({"id": DATA["id"][:8], "x": X[:8], "y": Y[:8]} for _ in range(9))
    with pytest.raises(ConfigError, match=r"arrays, or a jg\.Source"):
        trainer.fit(stream, steps=1, progress=False)
    trainer.close()

    class Table(nnx.Module):
        def __init__(self) -> None:
            self.rows = nnx.Embed(50_000, 8, rngs=nnx.Rngs(0))

        def __call__(self, ids: Any) -> Any:
            return self.rows(ids).sum(-1)

    def of_rows(model: Any, batch: Any) -> Any:
        return (model(batch) ** 2).mean()

    trainer = Trainer(
        Table(), of_rows, optax.sgd(0.1), cluster=cluster, strategy=MEASURED
    )
    with pytest.raises(ConfigError, match=r"only rows travel.*sparse='off'"):
        trainer.fit(np.arange(64), steps=1, batch_size=8, progress=False)
    trainer.close()
