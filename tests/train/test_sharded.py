"""Training with sharded variables, on servers of this process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.errors import ConfigError, ShardingError
from jgraph.graph.ir import TaskName
from jgraph.plan.placement.spread import spread
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.trainer import Trainer
from tests.support.models import NnxMLP, data, nnx_loss
from tests.support.servers import connected

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
HALVES = jg.fixed_size_partitioner(2)
KERNEL = "params/layers/0/kernel"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with connected(ps=2, worker=1) as cluster:
        yield cluster


def trainer(cluster: Cluster | None = None, **options: Any) -> Trainer:
    strategy = AsyncPS(**options) if cluster is not None else None
    model = NnxMLP(rngs=nnx.Rngs(0))
    return Trainer(model, nnx_loss, TX, cluster=cluster, strategy=strategy)


def fit(trainer: Trainer, steps: int = 6) -> Any:
    return trainer.fit(data(), steps=steps, batch_size=8, progress=False)


def assert_close(got: Any, wanted: Any) -> None:
    for have, want in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


def test_training_with_shards_is_training_and_saves_whole_arrays(
    cluster: Cluster, tmp_path: Path
) -> None:
    alone = fit(trainer())
    sharded = trainer(cluster, variable_partitioner=HALVES)
    run = fit(sharded)
    assert_close(run.metrics("loss")["value"], alone.metrics("loss")["value"])
    assert_close(nnx.state(run.model()), nnx.state(alone.model()))
    run.save(tmp_path / "saved")
    thirds = jg.variable_axis_size_partitioner(40)
    again = trainer(cluster, variable_partitioner=thirds, partition_strategy="mod")
    again.restore(tmp_path / "saved")
    assert_close(again.current_values(), sharded.current_values())
    assert_close(fit(again, 2).metrics("loss")["step"][-1], 8)


def test_a_shard_and_its_moments_are_cut_alike_and_on_one_ps(cluster: Cluster) -> None:
    planned = trainer(cluster, variable_partitioner=HALVES).plan(data(), 8)
    homes = {name: task for (_, name), task in planned.variable_tasks.items()}
    for part in ("part_0", "part_1"):
        names = [f"{KERNEL}/{part}"]
        names += [n for n in homes if n.endswith(f"/layers/0/kernel/{part}")]
        assert len(names) == 4
        assert len({homes[n] for n in names}) == 1
    assert len({homes[f"{KERNEL}/part_0"], homes[f"{KERNEL}/part_1"]}) == 2
    assert not planned.graph.gathered
    assert f"{KERNEL}" in str(planned).split("sharded variables")[1]


def test_a_placement_may_be_any_function(cluster: Cluster) -> None:
    def last(sizes: Any, tasks: Any) -> Any:
        return dict.fromkeys(sizes, tasks[-1])

    for placement, used in ((last, {1}), (jg.RoundRobin(), {0, 1})):
        planned = trainer(cluster, placement=placement).plan(data(), 8)
        tasks = set(planned.variable_tasks.values())
        assert tasks == {f"/job:ps/task:{n}" for n in used}


def test_greedy_balancing_and_round_robin_go_by_order() -> None:
    sizes = {"a": 1, "b": 5, "c": 1, "d": 1}
    tasks = [TaskName("x"), TaskName("y")]
    assert [*spread(sizes, tasks).values()] == ["x", "y", "y", "y"]
    assert [*jg.GreedyLoadBalancing()(sizes, tasks).values()] == ["x", "y", "x", "x"]
    squared = jg.GreedyLoadBalancing(lambda nbytes: 1)
    assert [*squared(sizes, tasks).values()] == ["x", "y", "x", "y"]
    assert [*jg.RoundRobin()(sizes, tasks).values()] == ["x", "y", "x", "y"]


def test_a_placement_that_misses_a_name_is_refused(cluster: Cluster) -> None:
    with pytest.raises(
        ConfigError, match="placement gives 'global_step' the task None"
    ):
        trainer(cluster, placement=lambda sizes, tasks: {}).plan(data(), 8)


def test_a_partitioner_that_cannot_be_is_refused(cluster: Cluster) -> None:
    many = trainer(cluster, variable_partitioner=lambda shape, dtype: [99] * len(shape))
    with pytest.raises(ShardingError, match="cannot have 99 shards along axis 0"):
        many.plan(data(), 8)
    with pytest.raises(ConfigError, match="variable_partitioner is 2"):
        trainer(cluster, variable_partitioner=2).plan(data(), 8)


def test_a_session_sees_sharded_variables_whole(cluster: Cluster) -> None:
    value = np.arange(10, dtype=np.float32).reshape(5, 2)
    for strategy in ("div", "mod"):
        w = jg.Variable(
            f"w-{strategy}",
            ((5, 2), np.float32, lambda shape, dtype: value),
            partitioner=jg.fixed_size_partitioner(2),
            partition_strategy=strategy,
            device="/job:ps",
        )

        @jg.function
        def double(w: jg.Variable = w) -> Any:
            w[...] = 2 * w[...]
            return w[...].sum()

        with cluster.session() as session:
            assert session.run(double) == 2 * value.sum()
            assert np.array_equal(session.read([w])[w.name], 2 * value)
            session.write({w: value + 1})
            assert session.run(double) == 2 * (value + 1).sum()
            tasks = session.variable_tasks([w])
        assert set(tasks) == {
            ("", f"w-{strategy}/part_0"),
            ("", f"w-{strategy}/part_1"),
        }
        assert len(set(tasks.values())) == 2


class Bag(nnx.Module):
    """A table whose rows are looked up, and a layer."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(200, 4, rngs=rngs)
        self.last = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        return self.last(self.table(ids).mean(axis=1))[:, 0]


def bag_loss(model: Any, batch: Any) -> Any:
    ids, y = batch
    return ((model(ids) - y) ** 2).mean()


@pytest.mark.parametrize("strategy", ["div", "mod"])
def test_a_sharded_table_is_trained_by_its_rows(
    cluster: Cluster, strategy: str
) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 200, (40, 2)).astype(np.int32)
    batches = ids, rng.normal(size=40).astype(np.float32)

    def train(**options: Any) -> tuple[Trainer, Any]:
        model = Bag(rngs=nnx.Rngs(0))
        made = Trainer(model, bag_loss, optax.adagrad(0.1), **options)
        return made, made.fit(batches, steps=5, batch_size=8, progress=False)

    _, alone = train()
    sharding = AsyncPS(
        variable_partitioner=jg.fixed_size_partitioner(3), partition_strategy=strategy
    )
    sharded, run = train(cluster=cluster, strategy=sharding)
    assert_close(nnx.state(run.model()), nnx.state(alone.model()))
    assert sharded.plan().nbytes_per_step < 200 * 4 * 4
