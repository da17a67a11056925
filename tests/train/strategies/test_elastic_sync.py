"""Synchronous training whose workers join and leave is that of one process."""

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
from jgraph.server.members.joining import join_cluster
from jgraph.server.server import Server
from jgraph.train.trainer import Trainer
from tests.support.members import two_join_and_one_leaves
from tests.support.servers import Servers

pytestmark = pytest.mark.usefixtures("nothing_is_left")

EXAMPLES, BATCH = 48, 4
X = np.random.default_rng(0).normal(size=(EXAMPLES, 3)).astype(np.float32)
DATA = {"id": np.arange(EXAMPLES), "x": X, "y": X.sum(1, keepdims=True) ** 2}


def loss(model: Any, batch: Any) -> Any:
    error = jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
    return error, {"seen": jax.nn.one_hot(batch["id"], EXAMPLES).sum(0)}


def plain(seen: Any, tx: Any) -> Any:
    """Trains one process on what each update was made of; returns the parameters."""
    graph, params = nnx.split(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any, weights: Any) -> Any:
        def mean(params: Any) -> Any:
            each = (nnx.merge(graph, params)(DATA["x"]) - DATA["y"])[:, 0] ** 2
            return (each * weights).sum() / BATCH

        updates, state = tx.update(jax.grad(mean)(params), state, params)
        return optax.apply_updates(params, updates), state

    for weights in seen:
        params, state = step(params, state, weights)
    return params


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    servers = Servers(ps=2, worker=1)
    with connect(servers.servers[0].target, timeout_s=20) as cluster:
        yield cluster
    servers.stop()


def trained_on(cluster: Cluster, strategy: jg.SyncPS | jg.LocalSGD, tx: Any) -> Trainer:
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    return Trainer(model, loss, tx, cluster=cluster, strategy=strategy)


@pytest.mark.parametrize(
    ("made", "backups"),
    [
        (jg.SyncPS, 0),
        pytest.param(jg.SyncPS, 1, marks=pytest.mark.nightly),
        pytest.param(jg.LocalSGD, 0, marks=pytest.mark.nightly),
    ],
)
def test_each_update_is_that_of_plain_jax_on_the_same_examples(
    cluster: Cluster, made: type[jg.SyncPS | jg.LocalSGD], backups: int
) -> None:
    """Rounds of one step of SGD are such updates, too."""
    tx, joined = optax.sgd(1e-2), list[Server]()
    while len(joined) < backups:  # as many more to begin with
        joined.append(join_cluster(cluster.target, "worker"))
    cluster.refresh()
    elastic = jg.Elastic(workers=(1 + backups, 4))
    strategy = made(elastic=elastic, backup_workers=backups)
    trainer = trained_on(cluster, strategy, tx)
    run = trainer.fit(DATA, steps=10**6, batch_size=BATCH, block=False, progress=False)
    joined += two_join_and_one_leaves(cluster.target, run)
    run.stop()
    run.wait(30)
    assert run.repeated() == 0
    seen = run.metrics("seen")["value"]
    assert np.allclose(seen.sum(1), BATCH)
    for ours, theirs in zip(
        jax.tree.leaves(nnx.state(run.model())),
        jax.tree.leaves(plain(seen, tx)),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    trainer.close()
    for server in joined:
        server.stop(0.0)


@pytest.mark.bad_input_row(27)
def test_compressed_gradients_need_to_know_the_most_workers(cluster: Cluster) -> None:
    strategy = jg.SyncPS(elastic=jg.Elastic(), gradient_dtype="bfloat16")
    trainer = trained_on(cluster, strategy, optax.sgd(0.1))
    with pytest.raises(ConfigError, match=r"JG-124 elastic=.* there are at most"):
        trainer.fit(DATA, steps=1, batch_size=BATCH, progress=False)
    trainer.close()
