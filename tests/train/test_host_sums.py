"""Gradients that are summed on each host before they leave it."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.graph.ir import TaskName
from jgraph.plan.auto.cost_model import CostModel, Link, TaskSpeed
from jgraph.train.step.host_parts import least_on_host
from jgraph.train.strategies.sync_runner import SyncPS, SyncRunner
from jgraph.train.trainer import Trainer
from tests.support.counting import (
    BATCH as COUNTED_BATCH,
    IDS,
    after,
    check_recovered,
    check_together,
    trainer as counting,
)
from tests.support.loopback_hosts import workers_on
from tests.support.models import NnxNorm, NnxWide, data, nnx_loss
from tests.support.servers import bytes_between_hosts, connected
from tests.support.stopping import once

pytestmark = pytest.mark.usefixtures("nothing_is_left")

WORKERS, HOSTS, WIDTH, STEPS, BATCH = 4, 2, 512, 8, 8
KERNEL_BYTES = WIDTH * WIDTH * 4
Wide = partial(NnxWide, width=WIDTH)  # each worker owns a quarter of its kernel


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two workers on each of two hosts, and a ps."""
    with connected(ps=1, worker=WORKERS, hosts=HOSTS) as cluster:
        yield cluster


def trainer(cluster: Cluster, strategy: Any, model: Any = Wide) -> Trainer:
    made = model(rngs=nnx.Rngs(0))
    tx = optax.sgd(0.1, momentum=0.9)
    return Trainer(made, nnx_loss, tx, cluster=cluster, strategy=strategy)


def fit(there: Trainer, steps: int = STEPS) -> Any:
    return there.fit(data(), steps=steps, batch_size=BATCH, progress=False)


def trained(cluster: Cluster, strategy: Any, model: Any = Wide) -> list[Any]:
    """Returns the losses, and all values after training."""
    there = trainer(cluster, strategy, model)
    losses = fit(there).metrics("loss")["value"]
    values = there.current_values()
    there.close()
    return [losses, *jax.tree.leaves(values)]


def assert_close(one: Any, other: Any) -> None:
    for mine, its in zip(one, other, strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-6, atol=1e-6)


def test_one_sum_of_each_host_leaves_it_in_place_of_each_gradient(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Parameters come to each worker as before: of two hosts, half of them.

    A sum is in the order of batches, and not in that in which they came: the same
    updates have the same bits again.
    """
    there, found = trainer(cluster, SyncPS(dense="workers")), list[Any]()

    def train() -> None:
        losses = fit(there).metrics("loss")["value"]
        found.append([losses, *jax.tree.leaves(there.current_values())])

    saved = fit(there).save(tmp_path / "saved")
    before = bytes_between_hosts(cluster)
    fit(there)
    sent = (bytes_between_hosts(cluster) - before) / STEPS
    parameters = WORKERS * KERNEL_BYTES / HOSTS
    sums = HOSTS * KERNEL_BYTES / HOSTS
    assert parameters + sums < sent < parameters + 1.2 * sums
    text = str(there.plan())
    assert "gradients of 4 workers are summed on each of 2 hosts before they" in text
    assert "1.0 MiB a step, in place of what each of them would send" in text
    for _ in range(2):
        there.restore(saved)
        train()
    for mine, its in zip(*found, strict=True):
        np.testing.assert_array_equal(mine, its)
    there.close()


def test_sums_of_hosts_make_the_mean_that_ps_make(cluster: Cluster) -> None:
    assert_close(
        trained(cluster, SyncPS(dense="workers")), trained(cluster, SyncPS(dense="ps"))
    )


@pytest.mark.parametrize(
    "strategy",
    [
        (SyncPS, {"batch_share": "measured"}),
        (jg.LocalSGD, {"sync_every": 2}),
    ],
    ids=["shares of a batch", "apart"],
)
@pytest.mark.nightly
def test_weighted_contributions_are_summed_likewise(
    cluster: Cluster, strategy: Any
) -> None:
    make, options = strategy
    assert_close(
        trained(cluster, make(dense="workers", **options)),
        trained(cluster, make(dense="ps", **options)),
    )


@pytest.mark.nightly  # smaller: tests/train/test_dense_workers.py
def test_state_of_the_model_travels_as_before(cluster: Cluster) -> None:
    assert_close(
        trained(cluster, SyncPS(dense="workers"), NnxNorm),
        trained(cluster, SyncPS(dense="ps"), NnxNorm),
    )


@pytest.mark.nightly  # smaller: tests/simulation/test_sync.py
def test_late_contributions_are_in_no_sum(cluster: Cluster) -> None:
    """One of the second host is late, so its host sends what the other one gave."""
    quarter = jg.fixed_size_partitioner(4)
    strategy = SyncPS(dense="workers", backup_workers=1, variable_partitioner=quarter)
    there = counting(cluster, strategy)
    there.plan(IDS, COUNTED_BATCH)
    runner = there._build()[1]
    assert isinstance(runner, SyncRunner)
    runner.compute_wait_s = {3: 0.05}
    run = there.fit(IDS, steps=60, batch_size=COUNTED_BATCH, progress=False)
    assert "summed on each of 2 hosts" in str(there.plan())
    assert run.metrics("contributions")["value"].tolist() == [3] * 60
    check_together(there, run)
    there.close()


@pytest.mark.nightly  # smaller: the next one
def test_fewer_bits_travel_as_they_are_where_a_sum_would_have_more(
    cluster: Cluster,
) -> None:
    strategy = SyncPS(dense="workers", gradient_dtype="bfloat16")
    there = trainer(cluster, strategy)
    assert "before they leave it" not in str(there.plan(data(), BATCH))
    there.close()


def test_a_sum_has_to_take_the_place_of_more_bits_than_it_has() -> None:
    assert [least_on_host(dtype) for dtype in (None, "bfloat16", "int8")] == [2, 3, 5]


def test_workers_of_one_host_alone_sum_nothing_first() -> None:
    with connected(worker=2) as together:
        there = trainer(together, SyncPS(dense="workers"))
        assert "before they leave it" not in str(there.plan(data(), BATCH))
        there.close()


@pytest.mark.nightly
def test_fewer_bits_of_three_workers_of_a_host_are_summed() -> None:
    strategy = SyncPS(dense="workers", gradient_dtype="bfloat16")
    with connected(ps=1, worker=6, hosts=2) as wide:
        there = trainer(wide, strategy)
        losses = fit(there).metrics("loss")["value"]
        assert "gradients of 6 workers are summed on each of 2" in str(there.plan())
        values = [losses, *jax.tree.leaves(there.current_values())]
        there.close()
        assert_close(values, trained(wide, SyncPS(gradient_dtype="bfloat16")))


def model_of(cluster: Cluster) -> CostModel:
    """Two hosts whose links are slow, and one with a ps whose link is better."""
    speed = {
        task: TaskSpeed("ps" if "ps" in task else host, 1e10, 1e9, 1e8, 1e10)
        for task, host in cluster.spec.hosts.items()
    }

    def link(a: TaskName, b: TaskName) -> Link:
        one, other = speed[a].host, speed[b].host
        between = 3e6 if "ps" in (one, other) else 1e6
        return Link(1e-4, 1e10 if one == other else between)

    links = {(a, b): link(a, b) for a in speed for b in speed if a != b}
    return CostModel(speed, links, Link(1e-4, 1e9), {})


@pytest.mark.nightly  # smaller: the next one
@pytest.mark.parametrize(("latency_s", "there"), [(0.0, "workers"), (1e-3, "ps")])
def test_auto_counts_the_messages_of_tasks_of_one_host(
    cluster: Cluster, latency_s: float, there: str
) -> None:
    """4 workers send each other 24, and with a ps 8; of the bytes they send fewer."""
    tasks = cluster.tasks()
    speed = TaskSpeed("host", 1e10, 1e9, 1e8, 1e10)
    links = {(a, b): Link(latency_s, 1e9) for a in tasks for b in tasks if a != b}
    model = CostModel(dict.fromkeys(tasks, speed), links, Link(1e-4, 1e9), {})
    one = trainer(cluster, SyncPS(dense="auto", cost_model=model))
    assert f"on {there}, as" in str(one.plan(data(), BATCH))
    one.close()


def test_auto_counts_the_bytes_of_sums(cluster: Cluster) -> None:
    """With sums 1.5 times the model passes each link between workers, else twice.

    The ps has a link that is three times as fast, which 4 workers use both ways.
    """
    model = model_of(cluster)
    ps, workers = cluster.tasks("ps"), cluster.tasks("worker")
    assert model.exchange_s(1e6, workers, workers) == pytest.approx(2.0)
    assert model.exchange_s(1e6, workers, workers, 2) == pytest.approx(1.5)
    assert model.exchange_s(1e6, ps, workers, 2) == pytest.approx(8 / 3)
    there = trainer(cluster, SyncPS(dense="auto", cost_model=model))
    text = str(there.plan(data(), BATCH))
    assert "on workers, as the busiest link is busy" in text
    assert "summed on each of 2 hosts" in text
    there.close()


@pytest.mark.row(60)
@pytest.mark.nightly  # smaller: tests/simulation/test_sync.py
@pytest.mark.procs
@pytest.mark.parametrize(
    "lost",
    [2, pytest.param(1, marks=pytest.mark.chaos)],
    ids=["on the other host", "beside the arbiter"],
)
def test_a_lost_collector_is_stood_in_for_and_nothing_counts_twice(
    tmp_path: Path, lost: int
) -> None:
    """It had gradients of its neighbour, for owners on the other host."""
    quarter = jg.fixed_size_partitioner(4)
    strategy = SyncPS(
        dense="workers", durability="replica", variable_partitioner=quarter
    )
    with workers_on(HOSTS, WORKERS // HOSTS, tmp_path) as (client, servers):
        there = counting(client, strategy)
        run = there.fit(
            IDS,
            steps=10**6,
            batch_size=COUNTED_BATCH,
            callbacks=[
                after(60, servers[lost].kill),
                once(lambda run: bool(run.recoveries()), 60),
            ],
            progress=False,
        )
        assert "summed on each of 2 hosts" in str(there.plan())
        (recovery,) = run.recoveries()
        assert (recovery.again, recovery.lost) == (0, (f"/job:worker/task:{lost}",))
        check_recovered(there, run, share=WORKERS)
        there.close()
