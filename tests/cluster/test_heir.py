"""A run whose client and master are both gone goes on with the master's heir."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from jgraph.cluster.client import Cluster, connect
from jgraph.train.async_ps import AsyncPS
from jgraph.train.progress import Report
from jgraph.train.run import Run
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
    # What the lost worker had told of, but not as done, comes again; what it had done
    # and not told of is counted by the ps alone.
    assert run.steps >= info.step >= 300
    if isinstance(strategy, SyncPS):
        assert run.steps == 300
        position = there.current_position()
        np.testing.assert_array_equal(examples_counted(run), examples_due(position))
    else:
        ledger = Ledger()
        ledger.add(run)
        ledger.check(there, lost=1)


def test_client_that_attached_follows_the_run_to_the_heir(
    own_servers: Servers, client: Cluster
) -> None:
    """It is connected to the master that is lost, as the client that began the run."""
    there = trainer(client, AsyncPS())
    begun, found, lost = threading.Event(), threading.Event(), list[int]()

    def lose_and_stop(run: Run, report: Report) -> None:
        begun.set()
        if found.is_set() and not lost:
            lost.append(report.step)
            own_servers.lose(MASTER)
        if lost and report.step > lost[0] + 200:
            run.stop()

    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=[lose_and_stop],
        progress=False,
        detached=True,
        block=False,
    )
    assert begun.wait(20)
    with connect(own_servers.server(MASTER).target, timeout_s=20) as other:
        watching = trainer(other, AsyncPS())
        watched = watching.attach()
        found.set()
        watched.wait(40)
        run.wait(40)
        assert other.master == PS
        (info,) = client.runs()
        for one in (run, watched):
            assert one.state == "stopped"
            assert one.steps >= info.step  # the ps counts what nobody was told of
        assert watched.steps == run.steps
        seen = [one.metrics("seen")["value"].sum(0) for one in (run, watched)]
        np.testing.assert_array_equal(*seen)
        assert watching.current_position() == there.current_position()
