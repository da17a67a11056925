"""Answers from rows of hash tables in training; requests change no table."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster, connect
from jgraph.errors import ArtifactError
from tests.support.servers import Servers

KEYS = np.random.default_rng(0).integers(-(2**62), 2**62, 40)
KEYS[:3] = -1, 0, 1
UNKNOWN = np.array([5, -7, 2**61 + 3])
INITIAL = jg.Initial("normal", 0.5, seed=3)


class Model(nnx.Module):
    """A table of ads, whose keys are admitted at a second sight, and one of users."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.ads = jg.HashTable(
            3,
            1 << 20,
            initializer=INITIAL,
            admission=jg.Admission(sightings=2),
            eviction="lfu",
        )
        self.users = jg.HashTable(2, 1 << 20, initializer=0.25)
        self.places = nnx.Embed(10, 2, rngs=rngs)
        self.out = nnx.Linear(7, 1, rngs=rngs)

    def __call__(self, batch: Any) -> Any:
        bags = self.ads(batch["ads"])
        there = (batch["ads"] != jg.split_keys([jg.NO_KEY])).any(-1)
        ads = jnp.where(there[..., None], bags, 0).sum(1)
        rows = [ads, self.users(batch["user"]), self.places(batch["place"])]
        return self.out(jnp.concatenate(rows, -1))[:, 0]


def loss(model: Any, batch: Any) -> Any:
    return jnp.mean((model(batch) - batch["place"]) ** 2)


def score(model: Any, batch: Any) -> Any:
    return {"score": model(batch)}


def batch(rows: int, seed: int = 0, keys: Any = KEYS) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    ads = rng.choice(keys, (rows, 4))
    ads[:, 3] = jg.NO_KEY
    return {
        "ads": jg.split_keys(ads),
        "user": rng.choice(keys, rows).astype(np.int32),
        "place": rng.integers(0, 10, rows).astype(np.int32),
    }


@pytest.fixture
def servers() -> Iterator[Servers]:
    servers = Servers(ps=2, worker=1)
    yield servers
    servers.stop()


@pytest.fixture
def cluster(servers: Servers) -> Iterator[Cluster]:
    with connect(servers.server("/job:worker/task:0").target, timeout_s=20) as cluster:
        yield cluster


@pytest.fixture
def trainer(cluster: Cluster) -> Iterator[jg.Trainer]:
    trainer = jg.Trainer(Model(nnx.Rngs(0)), loss, optax.adagrad(0.1), cluster=cluster)
    with trainer:
        fit(trainer)
        yield trainer


def fit(trainer: jg.Trainer) -> None:
    trainer.fit(batch(64), steps=8, batch_size=16, progress=False)


def served(trainer: jg.Trainer, fn: Any = score, **options: Any) -> Any:
    options = {"refresh_s": 3600, "max_rows": 4, "http_port": None} | options
    return trainer.serve("ctr", batch(2), fn=fn, **options)


def tables(trainer: jg.Trainer, cluster: Cluster) -> list[dict[str, Any]]:
    """What every shard of every table has, what it is counted for, and how young."""
    from jgraph.client.state.table_calls import report_of_shard, state_of_shard

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
    known, unknown = batch(11, seed=1), batch(5, seed=2, keys=UNKNOWN)
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


def test_rows_that_were_looked_up_are_known_without_their_ps(
    trainer: jg.Trainer, servers: Servers
) -> None:
    x = batch(6, seed=4)
    with served(trainer, max_share=1.0) as live:
        before = live.predict(x)["score"]
        servers.lose("/job:ps/task:1")
        assert live.predict(x)["score"].tolist() == before.tolist()
        assert live.freshness().lost == ("/job:ps/task:1",)


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
