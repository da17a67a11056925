"""Training on data that the workers read themselves."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.client.cluster import Cluster
from jgraph.errors import ConfigError, DataError, ForbiddenSourceError, SourceError
from jgraph.train.data.source import Source
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.data_files import FUNCTIONS, write_parquet
from tests.support.servers import connected

pytest.importorskip("pyarrow", reason="needs jgraph[data]")
pytest.importorskip("grain", reason="needs jgraph[data]")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with connected(allow_sources=[f"{FUNCTIONS}:squares"], ps=1, worker=2) as cluster:
        yield cluster


def loss(model: Any, batch: Any) -> Any:
    return jnp.mean(model(batch["x"]) ** 2), {"y": batch["y"]}


def fit(source: Any, cluster: Cluster | None, steps: int = 6, **options: Any) -> Any:
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    there = Trainer(model, loss, optax.sgd(1e-3), cluster=cluster)
    run = there.fit(source, steps=steps, batch_size=2, progress=False, **options)
    return np.sort(run.metrics("y")["value"].ravel()).tolist()


@pytest.mark.parametrize("place", ["here", "there"])
def test_every_example_of_every_file_comes_once_per_epoch(
    cluster: Cluster, tmp_path: Path, place: str
) -> None:
    """Also of files that do not fill a batch."""
    write_parquet(tmp_path / "a.parquet", 0, 7)
    write_parquet(tmp_path / "b.parquet", 7, 1)
    write_parquet(tmp_path / "c.parquet", 8, 1)
    write_parquet(tmp_path / "d.parquet", 9, 3)
    source = Source.parquet(str(tmp_path / "*.parquet"), columns=["x", "y"])
    found = fit(source, cluster if place == "there" else None, steps=12)
    assert found == sorted(2 * list(range(12)))


@pytest.mark.parametrize("wide", [False, True])
def test_types_of_64_bits_are_those_of_the_program_and_not_of_the_workers(
    cluster: Cluster, tmp_path: Path, wide: bool
) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=np.ones((4, 2)), y=np.arange(4))
    with jax.enable_x64(wide):
        found = Source.npz(str(path)).open(cluster)
    assert found.facts is not None
    x, y = (str(found.facts.fields[name].dtype) for name in "xy")
    assert (x, y) == (("float64", "int64") if wide else ("float32", "int32"))


def test_grain_source_is_read_by_the_workers(cluster: Cluster) -> None:
    source = Source.grain(f"{FUNCTIONS}:squares", count=12)
    assert fit(source, cluster) == list(range(12))


def test_source_that_cannot_be_used_is_refused_before_anything_changes(
    cluster: Cluster, tmp_path: Path
) -> None:
    with pytest.raises(ForbiddenSourceError, match="may not call"):
        fit(Source.grain(f"{FUNCTIONS}:ragged"), cluster)
    with pytest.raises(SourceError, match=r"task:0: there is no file .*none\.npz"):
        fit(Source.npz(str(tmp_path / "none.npz")), cluster)
    with pytest.raises(
        SourceError, match=r"no worker, and \{task\} stands for the num"
    ):
        Source.npz(str(tmp_path / "{task}.npz")).open(None)
    source = Source.grain(f"{FUNCTIONS}:squares", count=1)
    with pytest.raises(DataError, match="only 1 example;"):
        fit(source, cluster)
    with pytest.raises(ConfigError, match="texts and numbers"):
        Source.grain("a:b", x=object())


def test_workers_in_step_read_a_source_and_every_example_comes_once_per_epoch(
    cluster: Cluster, tmp_path: Path
) -> None:
    write_parquet(tmp_path / "a.parquet", 0, 8)
    write_parquet(tmp_path / "b.parquet", 8, 4)
    source = Source.parquet(str(tmp_path / "*.parquet"), columns=["x", "y"])

    def counts(model: Any, batch: Any) -> Any:
        seen = jax.nn.one_hot(batch["y"], 12).sum(0)
        return jnp.mean(model(batch["x"]) ** 2), {"seen": seen}

    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    there = Trainer(model, counts, optax.sgd(1e-3), cluster=cluster, strategy=SyncPS())
    run = there.fit(source, steps=6, batch_size=2, progress=False)
    # An epoch is 6 batches, of 2 workers.
    seen = 2 * run.metrics("seen")["value"]
    assert seen[:3].sum(0).tolist() == seen[3:].sum(0).tolist() == [1] * 12
