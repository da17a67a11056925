"""Hash tables of a run whose parameter servers join and leave: a shard moves whole."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

import jgraph as jg
from jgraph.client.cluster import Cluster, connect
from jgraph.graph.ir import TaskName
from jgraph.graph.rows.hash_keys import shard_of
from jgraph.train.model.adapters import adapt
from jgraph.train.step.arrange import Arrangement, ElasticPs
from jgraph.train.step.train_step import TrainStep
from tests.support.hash_counting import BATCH, DATA, NUMBER, check_counts, trainer
from tests.support.hash_eviction import Counts, counts_in, loss
from tests.support.ledger import examples_due
from tests.support.rescaled import Rescaled, begun
from tests.support.servers import Servers
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("nothing_is_left")

ELASTIC = jg.Elastic(ps=(1, 3), workers=(1, 2), vshards_per_ps=2)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    servers = Servers(ps=1, worker=2)
    with connect(servers.servers[0].target, timeout_s=20) as cluster:
        yield cluster
    servers.stop()


@pytest.mark.row(45)
@pytest.mark.parametrize(
    "strategy", [pytest.param(jg.AsyncPS, marks=pytest.mark.nightly), jg.SyncPS]
)
def test_each_batch_counts_once_in_a_hash_table_that_moves(
    cluster: Cluster, strategy: Any
) -> None:
    there = trainer(cluster, strategy(elastic=ELASTIC))
    run = begun(cluster, there, DATA, BATCH)
    rescaled = Rescaled(cluster, run)
    for ps in (2, 1):
        rescaled.to(ps)
        assert {e.task for e in run.events()} == set(cluster.tasks("ps"))
    rescaled.end()
    moved = [rescale for rescale in run.rescales() if not rescale.why]
    assert moved[-1].ps == 1
    assert all(rescale.nbytes > 0 for rescale in moved)
    check_counts(there, run, together=strategy is jg.SyncPS)
    there.close()
    rescaled.stop()


@pytest.mark.nightly  # smaller: test_elastic_ps.py, test_sync_hash.py
def test_checkpoints_of_a_hash_table_are_the_same_whatever_ps_there_are(
    cluster: Cluster, tmp_path: Path
) -> None:
    there = trainer(cluster, jg.SyncPS(elastic=ELASTIC))
    saves = jg.Checkpoints(tmp_path, every=20)
    run = begun(cluster, there, DATA, BATCH, checkpoint=saves)
    rescaled = Rescaled(cluster, run)
    rescaled.to(3)
    until = run.steps + 45
    wait_until(lambda: run.steps >= until)
    rescaled.end()
    there.close()
    for elastic in (None, ELASTIC):
        other = trainer(cluster, jg.SyncPS(elastic=elastic))
        other.restore(tmp_path)
        run = other.fit(DATA, steps=10, batch_size=BATCH, progress=False)
        assert run.steps > 50
        due = examples_due(other.current_position())
        assert counts_in(run.model())[0] == due[NUMBER == 0].sum() / 2
        other.close()
    rescaled.stop()


def test_one_ps_more_takes_its_share_of_the_rows_of_a_hash_table() -> None:
    ps = ElasticPs(1, 4, 4)
    adapter = adapt(Counts(capacity_bytes=1 << 24), loss, seed=0)

    def owners(count: int) -> list[TaskName]:
        """The ps of each of a thousand keys."""
        arrangement = Arrangement(elastic=ps).on(count)
        step = TrainStep(adapter, optax.adagrad(0.1), arrangement=arrangement)
        (table,) = step.tables
        homes = shard_of(np.arange(1000), len(table.ps))
        return [table.ps[home] for home in homes.tolist()]

    for count in (1, 2, 3):
        before, after = owners(count), owners(count + 1)
        moved = [new for old, new in zip(before, after, strict=True) if old != new]
        assert set(moved) == {ps.tasks[count]}
        assert len(moved) < 1000 / (count + 1) + 1000 / 16
        assert len(moved) > 1000 / (count + 1) - 1000 / 8
