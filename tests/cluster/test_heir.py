"""A run whose client and master are both gone goes on with the master's heir."""

from collections.abc import Iterator

import numpy as np
import pytest

from jgraph.cluster.client import Cluster, connect
from jgraph.train.async_ps import AsyncPS
from jgraph.train.strategies import Strategy
from jgraph.train.sync_ps import SyncPS
from tests.cluster.conftest import Servers
from tests.faults.counting import BATCH, IDS, Ledger, after, trainer
from tests.train.ledger import examples_counted, examples_due

MASTER, PS = "/job:worker/task:1", "/job:ps/task:0"


@pytest.fixture
def own_servers() -> Iterator[Servers]:
    servers = Servers(ps=2, worker=2)
    yield servers
    servers.stop()


@pytest.fixture
def client(own_servers: Servers) -> Iterator[Cluster]:
    with connect(own_servers.server(MASTER).target, timeout_s=20) as cluster:
        yield cluster


@pytest.mark.parametrize("strategy", [AsyncPS(), SyncPS()], ids=["async", "sync"])
def test_client_of_a_detached_run_follows_it_to_the_heir_of_its_master(
    own_servers: Servers, client: Cluster, strategy: Strategy
) -> None:
    there = trainer(client, strategy)
    run = there.fit(
        IDS,
        steps=300,
        batch_size=BATCH,
        callbacks=[after(100, lambda: own_servers.lose(MASTER))],
        progress=False,
        detached=True,
    )
    assert run.state == "done"
    (info,) = client.runs()
    assert (info.master, info.epoch, info.state) == (PS, 2, "done")
    assert client.master == PS
    # What the lost worker had told of, but not as done, comes again.
    assert run.steps == info.step >= 300
    if isinstance(strategy, SyncPS):
        assert run.steps == 300
        position = there.current_position()
        np.testing.assert_array_equal(examples_counted(run), examples_due(position))
    else:
        ledger = Ledger()
        ledger.add(run)
        ledger.check(there, lost=1)
