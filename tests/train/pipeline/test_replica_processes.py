"""Replicas of a pipeline, of which some workers are lost and come back."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgraph as jg
from jgraph.client.cluster import Cluster, connect
from jgraph.errors import ClusterError
from jgraph.launch.local.cluster import LocalCluster
from jgraph.train.pipeline.step import PipelineStep
from tests.support.layers import squares
from tests.support.plans import assert_same
from tests.support.servers import Servers

pytestmark = pytest.mark.usefixtures("nothing_is_left")

ROWS, WIDTH, BATCH = 50, 4, 8
TX = optax.sgd(0.1, momentum=0.9)
SOON_S = 30


def below(w: Any, x: Any) -> Any:
    return jnp.tanh(x["ids"] @ w)


def above(w: Any, h: Any) -> Any:
    return h @ w


def start() -> dict[str, Any]:
    random = np.random.default_rng(0)
    shapes = (WIDTH, WIDTH), (WIDTH, WIDTH), (ROWS, WIDTH)
    *stages, table = (random.normal(size=s).astype(np.float32) for s in shapes)
    return {"stages": stages, "tables": {"ids": table}}


def batches() -> Iterator[tuple[dict[str, Any], Any]]:
    random = np.random.default_rng(1)
    while True:
        ids = random.permutation(BATCH).astype(np.int32)  # all rows that are ever used
        yield {"ids": ids}, random.normal(size=(BATCH, WIDTH)).astype(np.float32)


@jax.jit
def alone(params: Any, opt: Any, x: Any, t: Any) -> tuple[Any, Any, Any]:
    def loss(params: Any) -> Any:
        rows = {"ids": params["tables"]["ids"][x["ids"]]}
        return squares(above(params["stages"][1], below(params["stages"][0], rows)), t)

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt = TX.update(grads, opt, params)
    return value, optax.apply_updates(params, updates), opt


def make_step() -> PipelineStep:
    begun = start()
    pipe = jg.Pipeline([below, above], squares, microbatches=2, replicas=2)
    return pipe.step(begun["stages"], TX, tables=begun["tables"])


class Killed:
    """A cluster of processes, of which one is killed and started again."""

    def __init__(self, stack: ExitStack) -> None:
        self._local = stack.enter_context(LocalCluster(ps=1, workers=4))
        self.cluster: Cluster = self._local
        self.lose, self.start_again = self._local.kill, self._local.restart


class CutOff:
    """Servers of this process, of which one is cut off and begins again."""

    def __init__(self, stack: ExitStack) -> None:
        servers = Servers(ps=1, worker=4)
        stack.callback(servers.stop)
        target = servers.server("/job:ps/task:0").target
        self.cluster = stack.enter_context(connect(target, timeout_s=20))
        self.lose, self.start_again = servers.lose, servers.start_again


@pytest.mark.row(59)
@pytest.mark.parametrize(
    "made",
    [CutOff, pytest.param(Killed, marks=[pytest.mark.nightly, pytest.mark.procs])],
)
def test_a_killed_worker_ends_the_step_and_the_session_goes_on_when_it_is_back(
    tmp_path: Path, made: type[Killed | CutOff]
) -> None:
    """Of the second replica nothing is lost; of the first one a checkpoint has it."""
    step, params, stream = make_step(), start(), batches()
    opt = TX.init(params)
    with ExitStack() as stack:
        there = made(stack)
        cluster = there.cluster
        session = cluster.session()

        def train(steps: int) -> None:
            nonlocal params, opt
            for _ in range(steps):
                x, t = next(stream)
                loss = session.run(step.train, x, t, timeout_s=SOON_S)
                wanted, params, opt = alone(params, opt, x, t)
                assert loss == pytest.approx(float(wanted), rel=1e-5)

        train(2)
        path = step.save(session, tmp_path / "two")
        for number, lost in enumerate(("/job:worker/task:3", "/job:worker/task:1")):
            x, t = next(batches())
            there.lose(lost)
            with pytest.raises(ClusterError, match=lost) as raised:
                session.run(step.train, x, t, timeout_s=SOON_S)
            assert raised.value.code in {"JG-101", "JG-132"}
            there.start_again(lost)
            assert cluster.wait_for_tasks(SOON_S)
            if number:
                step.restore(session, path)
            train(1)
            if not number:
                path = step.save(session, tmp_path / "three")
        wanted = jax.tree.map(np.asarray, params)
        assert_same(step.params(session), wanted["stages"], exact=False)
        assert_same(step.tables(session), wanted["tables"], exact=False)
        session.close()
