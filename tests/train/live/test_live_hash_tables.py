"""Answers from rows of hash tables in training; requests change no table."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import jgraph as jg
from jgraph.client.cluster import Cluster, connect
from jgraph.client.state.table_calls import report_of_shard, state_of_shard
from jgraph.errors import ArtifactError
from tests.support.live_models import batch, fit, score, trained
from tests.support.servers import Servers


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    servers = Servers(ps=2, worker=1)
    yield servers
    servers.stop()


@pytest.fixture(scope="module")
def cluster(servers: Servers) -> Iterator[Cluster]:
    with connect(servers.server("/job:worker/task:0").target, timeout_s=20) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def trainer(cluster: Cluster) -> Iterator[jg.Trainer]:
    with trained(cluster) as trainer:
        yield trainer


def served(trainer: jg.Trainer, fn: Any = score, **options: Any) -> Any:
    options = {"refresh_s": 3600, "max_rows": 4, "http_port": None} | options
    return trainer.serve("ctr", batch(2), fn=fn, **options)


def tables(trainer: jg.Trainer, cluster: Cluster) -> list[dict[str, Any]]:
    """What every shard of every table has, what it is counted for, and how young."""
    shards = []
    for table in trainer._parts.build()[0].tables:
        for task, spec in table.shards:
            at = (cluster, task, table.container, spec)
            state = {name: one.tolist() for name, one in state_of_shard(*at).items()}
            shards.append({"state": state, "report": report_of_shard(*at)})
    return shards


def test_answers_are_those_of_the_trained_model_and_change_no_table(
    trainer: jg.Trainer, cluster: Cluster
) -> None:
    known, unknown = batch(11, seed=1), batch(5, seed=2, first_key=10**9)
    expected = [trainer.predict(x, fn=score)["score"] for x in (known, unknown)]
    before = tables(trainer, cluster)
    with served(trainer) as live:
        for _ in range(3):  # a second look would admit a key
            for x, answer in zip((known, unknown), expected, strict=True):
                found = live.predict(x)["score"]
                np.testing.assert_allclose(found, answer, rtol=1e-5)
        assert tables(trainer, cluster) == before


def test_a_trained_row_is_in_the_next_answer(trainer: jg.Trainer) -> None:
    x = batch(4, seed=3)
    with served(trainer) as live:
        before = live.predict(x)["score"]
        fit(trainer)
        expected = trainer.predict(x, fn=score)["score"]
        found = live.refresh().predict(x)["score"]
        assert not np.allclose(before, found)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_rows_that_were_looked_up_are_known_without_their_ps() -> None:
    servers, x = Servers(ps=2, worker=1), batch(6, seed=4)
    target = servers.server("/job:worker/task:0").target
    with (
        connect(target, timeout_s=20) as cluster,
        trained(cluster) as trainer,
        served(trainer, max_share=1.0) as live,
    ):
        before = live.predict(x)["score"]
        servers.lose("/job:ps/task:1")
        assert live.predict(x)["score"].tolist() == before.tolist()
        assert live.freshness().lost == ("/job:ps/task:1",)
    servers.stop()


def test_a_table_may_be_left_out_and_not_be_used_but_by_its_keys(
    trainer: jg.Trainer,
) -> None:
    def of_places(model: Any, x: Any) -> Any:
        return {"sum": model.places(x["place"]).sum(1)}

    def as_a_whole(model: Any, x: Any) -> Any:
        return {"sum": model.places(x["place"]).sum(1) + model.ads.rows[...].sum()}

    x = batch(3, seed=5)
    with served(trainer, of_places) as live:
        expected = trainer.predict(x, fn=of_places)["sum"]
        np.testing.assert_allclose(live.predict(x)["sum"], expected, rtol=1e-6)
    with pytest.raises(ArtifactError, match=r"params/ads/rows is a hash table"):
        served(trainer, as_a_whole)
