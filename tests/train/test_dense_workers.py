"""Dense parameters owned by the workers, on servers of this process."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.errors import ConfigError
from jgraph.graph.device import is_ps, is_worker
from jgraph.plan.auto.cost_model import CostModel, Link, TaskSpeed
from jgraph.rpc.shared_memory.joining import Joins
from jgraph.train.step.compress import GradientDtype
from jgraph.train.strategies.options import Dense
from jgraph.train.strategies.sync_runner import SyncPS, SyncRunner
from jgraph.train.trainer import Trainer
from tests.support.models import NnxNorm, NnxWide, data, nnx_loss
from tests.support.servers import connected

STEPS, BATCH, WORKERS, WIDTH = 8, 8, 2, 256
KERNEL = "params/dense/kernel"
rng = np.random.default_rng(0)
LOOKED_UP = {
    "ids": rng.integers(2900, 3000, (64, 3)).astype(np.int32),
    "y": rng.normal(size=64).astype(np.float32),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with connected(ps=1, worker=WORKERS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def without_ps() -> Iterator[Cluster]:
    with connected(worker=WORKERS) as cluster:
        yield cluster


class Deep(nnx.Module):
    """A table of which rows travel, and a dense part."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(3000, 4, rngs=rngs)
        self.dense = nnx.Linear(4, WIDTH, rngs=rngs)
        self.last = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        hidden = nnx.relu(self.dense(self.table(ids).mean(1)))
        return self.last(hidden)[:, 0]


class Keyed(nnx.Module):
    """A hash table, and a dense part."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = jg.HashTable(4, capacity_bytes=1 << 20)
        self.dense = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        return self.dense(self.table(ids).mean(1))[:, 0]


def squares(model: Any, batch: Any) -> Any:
    return jnp.mean((model(batch["ids"]) - batch["y"]) ** 2)


def trainer(
    cluster: Cluster,
    dense: Dense,
    tx: Any = None,
    model: Any = NnxWide,
    loss: Any = nnx_loss,
    **options: Any,
) -> Trainer:
    tx = optax.adam(1e-2) if tx is None else tx
    strategy = SyncPS(dense=dense, step_timeout_s=20, **options)
    made = model(rngs=nnx.Rngs(0))
    return Trainer(made, loss, tx, cluster=cluster, strategy=strategy)


def fit(there: Trainer, of: Any = None, steps: int = STEPS) -> Any:
    given = data() if of is None else of
    return there.fit(given, steps=steps, batch_size=BATCH, progress=False)


def trained(cluster: Cluster, dense: Dense, of: Any = None, **options: Any) -> Any:
    """Returns all values after training, and the losses."""
    there = trainer(cluster, dense, **options)
    losses = fit(there, of).metrics("loss")["value"]
    values = there.current_values()
    there.close()
    return [losses, *jax.tree.leaves(values)]


def homes_of(there: Trainer) -> dict[str, str]:
    """Returns the task of each variable of the training state, or of its shards."""
    step = there._build()[0]
    return {s.spec.name: str(s.device) for v in step.variables for s in v.shards}


def assert_same_bits(one: Any, other: Any) -> None:
    for mine, its in zip(one, other, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(its))


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1, momentum=0.9),
        pytest.param(optax.adamw(1e-2), marks=pytest.mark.nightly),
    ],
    ids=["momentum", "adamw"],
)
def test_workers_compute_the_same_bits_as_ps_do(
    cluster: Cluster, without_ps: Cluster, tx: Any
) -> None:
    wanted = trained(cluster, "ps", tx=tx)
    assert_same_bits(trained(cluster, "workers", tx=tx), wanted)
    assert_same_bits(trained(without_ps, "workers", tx=tx), wanted)


@pytest.mark.parametrize(
    "by", ["mapping", pytest.param("a copy", marks=pytest.mark.nightly)]
)
def test_large_parameters_are_joined_and_have_the_same_bits(
    cluster: Cluster, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = list[bool]()

    async def join(joins: Joins, parts: Any) -> Any:
        joined.append(True)
        whole = await really(joins, parts) if by == "mapping" else None
        joined[-1] = whole is not None
        return whole

    really = Joins.join
    monkeypatch.setattr(Joins, "join", join)
    large = partial(NnxWide, width=1024)
    wanted = trained(cluster, "ps", model=large)
    assert not joined
    assert_same_bits(trained(cluster, "workers", model=large), wanted)
    assert len(joined) >= WORKERS * STEPS
    assert set(joined) == {by == "mapping"}


def test_a_norm_of_all_gradients_crosses_the_workers(
    cluster: Cluster, without_ps: Cluster
) -> None:
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    wanted = trained(cluster, "ps", tx=tx)
    there = trainer(without_ps, "workers", tx)
    fit(there)
    # Its parts are summed in another order.
    for value, due in zip(there.current_values(), wanted[1:], strict=True):
        np.testing.assert_allclose(value, due, rtol=2e-5, atol=2e-6)
    assert not there.plan().graph.gathered
    there.close()


def test_each_worker_has_its_part_of_what_a_checkpoint_has_whole(
    cluster: Cluster, tmp_path: Path
) -> None:
    there = trainer(cluster, "workers")
    planned = there.plan(data(), BATCH)
    homes = homes_of(there)
    assert all(map(is_worker, homes.values()))
    names = [KERNEL, "opt/0/mu/dense/kernel", "opt/0/nu/dense/kernel"]
    for number in range(WORKERS):
        tasks = {homes[f"{name}/part_{number}"] for name in names}
        assert tasks == {f"/job:worker/task:{number}"}
    # Its own part takes no message: half of the parameters come, half of them go.
    step = there._build()[0]
    nbytes = sum(v.spec.aval.size * 4 for v in step.variables if "params" in v.name)
    assert planned.nbytes_per_step < 1.2 * nbytes
    assert f"in {WORKERS} parts" in str(planned)
    # A checkpoint of workers is one of ps.
    fit(there).save(tmp_path / "saved")
    values = there.current_values()
    again = trainer(cluster, "ps")
    again.restore(tmp_path / "saved")
    assert_same_bits(again.current_values(), values)
    back = trainer(cluster, "workers")
    back.plan(data(), BATCH)  # shows which parameters are tables
    back.restore(tmp_path / "saved")
    assert_same_bits(
        [fit(back, steps=3).metrics("loss")["value"]],
        [fit(again, steps=3).metrics("loss")["value"]],
    )
    for each in (there, again, back):
        each.close()


def test_a_table_stays_on_the_ps_in_the_same_step(cluster: Cluster) -> None:
    given = {"model": Deep, "loss": squares, "tx": optax.adagrad(0.1)}
    there = trainer(cluster, "workers", **given)
    planned = there.plan(LOOKED_UP, BATCH)
    homes = homes_of(there)
    on_ps = {name for name, task in homes.items() if is_ps(task)}
    assert on_ps == {name for name in homes if "table" in name}
    assert "params/table/embedding travels by rows" in str(planned)
    there.close()
    wanted = trained(cluster, "ps", LOOKED_UP, **given)
    assert_same_bits(trained(cluster, "workers", LOOKED_UP, **given), wanted)


@pytest.mark.nightly  # smaller: test_a_table_stays_on_the_ps, test_sync_hash.py
def test_a_hash_table_stays_on_the_ps(cluster: Cluster) -> None:
    given = {"model": Keyed, "loss": squares, "tx": optax.sgd(0.1)}
    keys = jg.split_keys(LOOKED_UP["ids"].astype(np.int64))
    keyed = {**LOOKED_UP, "ids": keys}
    there = trainer(cluster, "workers", **given)
    losses = fit(there, keyed).metrics("loss")["value"]
    dense = {name: task for name, task in homes_of(there).items() if "dense" in name}
    assert all(map(is_worker, dense.values()))
    there.close()
    there = trainer(cluster, "ps", **given)
    assert_same_bits([losses], [fit(there, keyed).metrics("loss")["value"]])
    there.close()


@pytest.mark.parametrize(
    "dtype", [pytest.param("bfloat16", marks=pytest.mark.nightly), "int8"]
)
def test_fewer_bits_leave_over_the_same_on_each_worker(
    cluster: Cluster, dtype: GradientDtype
) -> None:
    wanted = trained(cluster, "ps", gradient_dtype=dtype)
    assert_same_bits(trained(cluster, "workers", gradient_dtype=dtype), wanted)


def test_model_state_is_averaged_on_a_worker(cluster: Cluster) -> None:
    wanted = trained(cluster, "ps", model=NnxNorm)
    assert_same_bits(trained(cluster, "workers", model=NnxNorm), wanted)


def test_a_late_contribution_is_dropped_by_owners_too(without_ps: Cluster) -> None:
    there = trainer(without_ps, "workers", backup_workers=1)
    there.plan(data(), BATCH)
    runner = there._build()[1]
    assert isinstance(runner, SyncRunner)
    runner.compute_wait_s = {1: 0.2}
    run = fit(there, steps=40)
    assert run.metrics("contributions")["value"].tolist() == [1] * 40
    assert set(run.dropped()) <= {"/job:worker/task:1"}
    position = there.current_position()
    assert position is not None
    assert position["again"] == 0
    assert {str(member.task) for member in run.members()} <= {
        f"/job:worker/task:{n}" for n in range(WORKERS)
    }
    there.close()


def model_of(cluster: Cluster, fast: str) -> CostModel:
    """Tasks on hosts of their own; the links of one job are fast."""
    tasks = cluster.tasks()
    speed = {t: TaskSpeed(f"host of {t}", 1e10, 1e9, 1e8, 1e10) for t in tasks}
    links = {
        (a, b): Link(1e-4, 1e9 if f"/job:{fast}/" in a + b else 1e6)
        for a in tasks
        for b in tasks
        if a != b
    }
    return CostModel(speed, links, Link(1e-4, 1e9), {})


@pytest.mark.parametrize(("fast", "there"), [("worker", "workers"), ("ps", "ps")])
def test_auto_chooses_by_the_busiest_link_and_says_why(
    cluster: Cluster, fast: str, there: str
) -> None:
    there_now = trainer(cluster, "auto", cost_model=model_of(cluster, fast))
    text = str(there_now.plan(data(), BATCH))
    assert f"on {there}, as the busiest link is busy" in text
    assert all(f"/job:{fast}/" in home for home in homes_of(there_now).values())
    there_now.close()


def test_auto_needs_no_measure_where_nothing_is_to_be_decided(
    cluster: Cluster, without_ps: Cluster
) -> None:
    there = trainer(without_ps, "auto")
    assert "on the workers, as there is no ps" in str(there.plan(data(), BATCH))
    there.close()
    there = trainer(cluster, "auto", elastic=jg.Elastic())
    assert "workers join and leave" in str(there.plan(data(), BATCH))
    assert all(map(is_ps, homes_of(there).values()))
    there.close()


def test_another_client_finds_what_the_workers_hold(cluster: Cluster) -> None:
    """Which parameters are tables shows on data, which that client does not have."""
    given = {"model": Deep, "loss": squares, "tx": optax.adagrad(0.1)}
    there = trainer(cluster, "workers", **given)
    there.fit(LOOKED_UP, steps=STEPS, batch_size=BATCH, progress=False, detached=True)
    found = trainer(cluster, "workers", **given)
    found.attach(cluster.runs()[-1].name).wait(30)
    assert homes_of(found) == homes_of(there)
    assert_same_bits(found.current_values(), there.current_values())
    there.close()


@pytest.mark.bad_input_row(28)
def test_what_cannot_be_is_refused_in_words(
    cluster: Cluster, without_ps: Cluster
) -> None:
    wrong: Any = "worker"
    wrong_model: Any = "fast"
    with pytest.raises(
        ConfigError, match=r"dense is 'worker'; .*'ps', 'workers', 'xla' or 'auto'"
    ):
        SyncPS(dense=wrong)
    with pytest.raises(ConfigError, match="none may join or leave"):
        SyncPS(dense="workers", elastic=jg.Elastic())
    with pytest.raises(ConfigError, match=r"cost_model is 'fast'; .*CostModel.load"):
        SyncPS(dense="auto", cost_model=wrong_model)
    asynchronous: Any = jg.AsyncPS
    with pytest.raises(ConfigError, match=r"dense.*write SyncPS\(dense='workers'\)"):
        asynchronous(dense="workers")
    with pytest.raises(ConfigError, match=r"params/table/embedding: .*needs a ps"):
        fit(trainer(without_ps, "workers", model=Deep, loss=squares), LOOKED_UP)
    with pytest.raises(ConfigError, match=r"call trainer.plan\(data\) first"):
        trainer(cluster, "workers", model=Deep, loss=squares).restore("nowhere")
    with pytest.raises(ConfigError, match="needs tasks of job 'ps'"):
        fit(trainer(without_ps, "ps"))
