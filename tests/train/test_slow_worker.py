"""A worker that is many times slower than the other, in asynchronous training."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.client.cluster import Cluster
from jgraph.cluster.loop_messages import LoopRequest
from jgraph.graph.ir import TaskName
from jgraph.train.run.run import Run
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.workers import Workers
from jgraph.train.trainer import Trainer
from tests.support.models import NnxMLP, data, nnx_loss

pytestmark = pytest.mark.usefixtures("nothing_is_left")

SLOW, SLOW_S = TaskName("/job:worker/task:1"), 0.5


@pytest.fixture(autouse=True)
def slow_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the steps of one worker take that much longer, without computing."""
    requests = Workers.requests

    def slower(self: Workers, *args: Any, **options: Any) -> list[LoopRequest]:
        fast, slow = requests(self, *args, **options)
        return [fast, replace(slow, compute_wait_s=SLOW_S)]

    monkeypatch.setattr(Workers, "requests", slower)


DETACHED = pytest.mark.parametrize(
    "detached",
    [False, pytest.param(True, marks=pytest.mark.nightly)],
    ids=["", "detached"],
)


def trained(
    cluster: Cluster, steps: int, max_staleness: int | None, detached: bool
) -> Run:
    there = Trainer(
        NnxMLP(rngs=nnx.Rngs(0)),
        nnx_loss,
        optax.sgd(0.01),
        cluster=cluster,
        strategy=AsyncPS(max_staleness=max_staleness),
    )
    fit = partial(there.fit, data(), batch_size=8, progress=False)
    run = fit(steps=steps, detached=detached)
    assert (run.state, run.steps) == ("done", steps)
    return run


def oldest(run: Run) -> int:
    """Returns how many updates of the other one of the slow worker came after."""
    return max(max(counts) for counts in run.staleness()[SLOW].values())


def steps_of_each(run: Run) -> Any:
    return np.bincount(run.metrics("loss")["replica"].astype(int), minlength=2)


@pytest.mark.row(11)
@DETACHED
def test_without_a_bound_a_slow_worker_costs_its_own_steps_only(
    cluster: Cluster, detached: bool
) -> None:
    run = trained(cluster, 200, max_staleness=None, detached=detached)
    fast, slow = steps_of_each(run)
    assert 0 < slow <= fast / 5
    assert oldest(run) > 5


@pytest.mark.row(11)
@DETACHED
def test_with_a_bound_the_others_wait_for_a_slow_worker(
    cluster: Cluster, detached: bool
) -> None:
    run = trained(cluster, 12, max_staleness=1, detached=detached)
    fast, slow = steps_of_each(run)
    # One at a time passes it: all but those between two of its steps.
    assert slow >= fast / 3
    assert oldest(run) <= 1
