"""What a Trainer has made on a cluster goes when the Trainer goes, or its client."""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster, connect
from tests.support.servers import Servers
from tests.support.straight_line import X, Y, loss

_WAIT_S = 60.0


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    servers = Servers(ps=1, worker=1)
    yield servers
    servers.stop()


@pytest.fixture
def client(servers: Servers) -> Iterator[Cluster]:
    with connect(servers.servers[0].target, timeout_s=20) as cluster:
        yield cluster


def trainer(cluster: Cluster) -> jg.Trainer:
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    return jg.Trainer(model, loss, optax.sgd(0.1), cluster=cluster)


def fit(cluster: Cluster, **options: Any) -> Any:
    given = trainer(cluster)
    return given, given.fit((X, Y), steps=3, batch_size=8, progress=False, **options)


def held(servers: Servers) -> int:
    """Variables and data sets on all tasks."""
    count = 0
    for server in servers.servers:
        inner = server._server
        assert inner is not None
        count += len(inner.service.runtime.store.table())
        count += len(inner.service.loops._data)
    return count


def wait_until_free(servers: Servers) -> None:
    over = threading.Event()
    for _ in range(int(_WAIT_S / 0.05)):
        if not held(servers):
            return
        over.wait(0.05)
    raise AssertionError(f"{held(servers)} are held after {_WAIT_S} s")


def test_end_of_a_block_frees_the_cluster_and_the_run_keeps_its_values(
    servers: Servers, client: Cluster
) -> None:
    with trainer(client) as given:
        run = given.fit((X, Y), steps=3, batch_size=8, progress=False)
        assert held(servers)
    assert not held(servers)
    assert np.isfinite(run.model().kernel[...]).all()
    with pytest.raises(jg.errors.ConfigError, match="was closed"):
        given.fit((X, Y), steps=1, batch_size=8)
    with pytest.raises(jg.errors.ConfigError, match=r"was closed, and .* run\.model"):
        given.predict(X)


def test_closed_trainer_makes_nothing_on_its_cluster(
    servers: Servers, client: Cluster
) -> None:
    given = trainer(client)
    given.close()
    with pytest.raises(jg.errors.ConfigError, match="this Trainer was closed"):
        given.predict(X)
    assert not held(servers)


def test_block_that_is_left_ends_its_run(servers: Servers, client: Cluster) -> None:
    with trainer(client) as given:
        run = given.fit((X, Y), steps=10**7, batch_size=8, progress=False, block=False)
    assert run.state == "stopped"
    assert not held(servers)


def test_trainer_that_nobody_knows_frees_the_cluster_when_its_run_goes(
    servers: Servers, client: Cluster
) -> None:
    given, run = fit(client)
    gc.disable()  # no circle holds them
    try:
        del given
        assert run.evaluate((X, Y))
        assert held(servers)
        del run
        wait_until_free(servers)
    finally:
        gc.enable()


def test_end_of_the_client_frees_the_cluster(servers: Servers) -> None:
    with connect(servers.servers[0].target, timeout_s=20) as cluster:
        given, _ = fit(cluster)
        assert held(servers)
    assert not held(servers)
    given.close()


def test_detached_run_keeps_what_it_needs(servers: Servers) -> None:
    with connect(servers.servers[0].target, timeout_s=20) as cluster:
        _, run = fit(cluster, detached=True, block=False)
        run.wait(_WAIT_S)
    assert held(servers)
    with connect(servers.servers[0].target, timeout_s=20) as cluster:
        assert trainer(cluster).attach(cluster.runs()[-1].name).wait(_WAIT_S).steps == 3
    assert held(servers)
    with connect(servers.servers[0].target, timeout_s=20) as cluster:
        cluster.reset()
