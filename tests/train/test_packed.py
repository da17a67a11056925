"""Many small variables are packed, and training gives what a plain loop gives."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.graph.ir import TaskName
from jgraph.plan.program.nodes import SegmentNode, UnpackNode
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.models import BATCH, NnxDeep, by_hand, data, nnx_loss
from tests.support.servers import connected

pytestmark = pytest.mark.usefixtures("nothing_is_left")

OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "clip and momentum": optax.chain(
        optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)
    ),
}


def deep() -> NnxDeep:
    return NnxDeep(rngs=nnx.Rngs(0))


def plain_loop(tx: optax.GradientTransformation, steps: int) -> tuple[Any, list[float]]:
    graphdef, params = nnx.split(deep())
    return by_hand(params, lambda p, b: nnx_loss(nnx.merge(graphdef, p), b), tx, steps)


def assert_close(a: Any, b: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 1e-6), a, b)


def fit(trainer: Trainer, steps: int) -> Any:
    run = trainer.fit(data(), steps=steps, batch_size=BATCH, progress=False)
    return nnx.state(run.model(), nnx.Param)


@pytest.mark.parametrize(
    "name", ["clip and momentum", pytest.param("adam", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize(
    "strategy",
    [pytest.param(AsyncPS(), marks=pytest.mark.nightly), SyncPS()],  # by day below
    ids=["async", "sync"],
)
def test_training_on_a_cluster_equals_a_plain_loop(
    name: str, strategy: Strategy
) -> None:
    wanted, _ = plain_loop(OPTIMIZERS[name], 20)
    with (
        connected(ps=2, worker=1) as cluster,
        Trainer(
            deep(), nnx_loss, OPTIMIZERS[name], cluster=cluster, strategy=strategy
        ) as trainer,
    ):
        assert_close(fit(trainer, 20), wanted)


def test_a_checkpoint_has_each_variable_and_training_goes_on(tmp_path: Path) -> None:
    tx = OPTIMIZERS["adam"]
    wanted, _ = plain_loop(tx, 20)
    with connected(ps=2, worker=1) as cluster:
        with Trainer(deep(), nnx_loss, tx, cluster=cluster, strategy=AsyncPS()) as one:
            half = fit(one, 10)
            one.save(tmp_path / "saved")
        with Trainer(deep(), nnx_loss, tx, cluster=cluster, strategy=AsyncPS()) as two:
            two.restore(tmp_path / "saved")
            assert_close(nnx.state(two.model(), nnx.Param), half)
            assert_close(fit(two, 10), wanted)


def test_the_plan_packs_what_travels_and_what_is_updated() -> None:
    with (
        connected(ps=2, worker=1) as cluster,
        Trainer(
            deep(), nnx_loss, OPTIMIZERS["adam"], cluster=cluster, strategy=AsyncPS()
        ) as trainer,
    ):
        program = trainer.plan(data(), BATCH).program
    for task in ("/job:ps/task:0", "/job:ps/task:1"):
        nodes = program.partition(TaskName(task)).nodes
        (update,) = [node for node in nodes if isinstance(node, SegmentNode)]
        assert len(update.packs) == 3
        assert len(update.updates) > 50
        assert len(update.inputs) <= 2
    nodes = program.partition(TaskName("/job:worker/task:0")).nodes
    cuts = [node for node in nodes if isinstance(node, UnpackNode)]
    assert sum(len(node.outs) for node in cuts) == 40
