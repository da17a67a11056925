"""Workers that compute on an accelerator: ``JAX_PLATFORMS=cuda pytest -m gpu``.

The client has the accelerator, too, unless a test says otherwise; parameter servers
compute on the CPU. All tasks share one device.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.errors import JGError
from jgraph.graph.ir import TaskName
from tests.support.layers import batches, layer, params_of, squares
from tests.support.models import NnxMLP, data, nnx_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.procs,
    pytest.mark.skipif(
        os.environ["JAX_PLATFORMS"] == "cpu" or jax.default_backend() == "cpu",
        reason="needs an accelerator that JAX sees, and JAX_PLATFORMS other than cpu",
    ),
]

STEPS, ROWS = 20, 64
SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
WORKER, SECOND = TaskName("/job:worker/task:0"), TaskName("/job:worker/task:1")


@pytest.fixture(scope="module")
def cluster() -> Iterator[jg.LocalCluster]:
    with jg.LocalCluster(ps=2, workers=2, env=SHARED) as cluster:
        yield cluster


class Items(nnx.Module):
    """A table of which rows are looked up, and a layer over them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(ROWS, 4, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        return self.out(self.table(ids).mean(1))[:, 0]


def items_loss(model: Any, batch: Any) -> Any:
    ids, wanted = batch
    return ((model(ids) - wanted) ** 2).mean()


def clicks() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, ROWS, (128, 3)).astype(np.int32)
    return ids, (ids.sum(1) % 5).astype(np.float32)


def leaves_of(model: Any) -> list[np.ndarray[Any, Any]]:
    state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def assert_close(model: Any, other: Any) -> None:
    for found, wanted in zip(leaves_of(model), leaves_of(other), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-4)


def trained(cluster: Any, strategy: Any, model: Any, loss: Any, examples: Any) -> Any:
    trainer = jg.Trainer(
        model, loss, optax.adam(1e-2), cluster=cluster, strategy=strategy, seed=1
    )
    with trainer:
        run = trainer.fit(examples, steps=STEPS, batch_size=8, progress=False)
        assert np.isfinite(run.metrics("loss")["value"]).all()
        return run.model()


def test_the_status_names_the_device_of_each_task(cluster: jg.LocalCluster) -> None:
    platforms = {s.task: s.platform for s in cluster.status().tasks}
    kind = jax.export.default_export_platform()
    assert platforms == {
        "/job:ps/task:0": "cpu",
        "/job:ps/task:1": "cpu",
        "/job:worker/task:0": kind,
        "/job:worker/task:1": kind,
    }


@pytest.mark.parametrize("dense", ["ps", "workers"])
def test_synchronous_workers_learn(cluster: jg.LocalCluster, dense: Any) -> None:
    model = NnxMLP(rngs=nnx.Rngs(0))
    after = trained(cluster, jg.SyncPS(dense=dense), model, nnx_loss, data())
    x, y = data()
    before = nnx_loss(NnxMLP(rngs=nnx.Rngs(0)), (x, y))
    assert nnx_loss(after, (x, y)) < 0.9 * before


def test_one_worker_equals_the_strategy_of_one_process(
    cluster: jg.LocalCluster,
) -> None:
    with jg.LocalCluster(ps=1, workers=1, env=SHARED) as alone:
        there = trained(alone, jg.AsyncPS(), NnxMLP(rngs=nnx.Rngs(0)), nnx_loss, data())
    here = trained(None, None, NnxMLP(rngs=nnx.Rngs(0)), nnx_loss, data())
    assert_close(there, here)


@pytest.mark.parametrize("kind", [jg.AsyncPS, jg.SyncPS])
def test_rows_of_tables_are_looked_up_and_updated(
    cluster: jg.LocalCluster, kind: Any
) -> None:
    before = Items(nnx.Rngs(0))
    after = trained(cluster, kind(), before, items_loss, clicks())
    assert not np.allclose(leaves_of(after)[-1], leaves_of(Items(nnx.Rngs(0)))[-1])


def test_rows_of_tables_equal_those_of_one_process() -> None:
    with jg.LocalCluster(ps=1, workers=1, env=SHARED) as alone:
        there = trained(alone, jg.AsyncPS(), Items(nnx.Rngs(0)), items_loss, clicks())
    here = trained(None, None, Items(nnx.Rngs(0)), items_loss, clicks())
    assert_close(there, here)


def test_variables_of_a_worker_lie_on_its_device(cluster: jg.LocalCluster) -> None:
    counter = jg.Variable("counter", jnp.arange(6.0), device=WORKER)

    @jg.function
    def add(x: Any) -> Any:
        with jg.device(f"{WORKER}/gpu:0"):
            counter[...] = counter[...] + x * jnp.ones(6)
            return counter[...]

    with cluster.session() as session:
        session.initialize([counter])
        for step in range(3):
            session.run(add, np.float32(step))
        value = session.read([counter])["counter"]
    np.testing.assert_allclose(value, np.arange(6) + 3)


def test_a_task_on_the_cpu_refuses_the_device_and_soft_placement_takes_it(
    cluster: jg.LocalCluster,
) -> None:
    def sine(x: Any) -> Any:
        with jg.device("/job:ps/task:0/gpu:0"):
            return jnp.sin(x)

    with pytest.raises(JGError, match="soft_placement=True"):
        cluster.session().run(sine, 1.0)
    assert cluster.session(soft_placement=True).run(sine, 0.0) == 0.0


def test_values_of_every_dtype_travel_between_device_and_host(
    cluster: jg.LocalCluster,
) -> None:
    def through(x: Any) -> Any:
        with jg.device("/job:worker/task:0"):
            x = x + x
        with jg.device("/job:ps/task:0"):
            x = x + x
        with jg.device("/job:worker/task:1"):
            return x + x

    with cluster.session() as session:
        for dtype in ("float32", "float16", "bfloat16", "int8", "int32", "complex64"):
            value = jnp.arange(5).astype(dtype)
            found = session.run(through, value)
            assert found.dtype == value.dtype
            np.testing.assert_array_equal(np.asarray(found, complex), 8 * np.arange(5))


def test_a_pipeline_over_two_workers_equals_plain_jax(
    cluster: jg.LocalCluster,
) -> None:
    pipe = jg.Pipeline([layer] * 2, squares, microbatches=4, tasks=2)
    step = pipe.step(params_of(2), optax.sgd(0.1))

    @jax.jit
    def plain(params: Any, x: Any, t: Any) -> Any:
        def loss(params: Any) -> Any:
            h = x
            for one in params:
                h = layer(one, h)
            return squares(h, t)

        return jax.value_and_grad(loss)(params)

    params = params_of(2)
    with cluster.session() as session:
        session.initialize(step.variables)
        for x, t in batches(3):
            found = session.run(step.train, x, t)
            loss, grads = plain(params, x, t)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
            np.testing.assert_allclose(float(found), float(loss), rtol=2e-3)


def test_a_client_without_accelerator_drives_workers_that_have_one(
    cluster: jg.LocalCluster,
) -> None:
    program = f"""
import jax, jax.numpy as jnp, jgraph as jg
assert jax.default_backend() == "cpu"
def product(x):
    with jg.device("/job:worker/task:0"):
        return (x @ x).sum()
with jg.connect({cluster.target!r}) as cluster, cluster.session() as session:
    print(float(session.run(product, jnp.ones((8, 8)))))
"""
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=env,
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.strip() == "512.0", done.stderr


def test_a_model_is_served_on_the_device(tmp_path: Path) -> None:
    x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
    model = NnxMLP(rngs=nnx.Rngs(0))
    jg.export(model, x, tmp_path / "mlp")
    with jg.serve(tmp_path, http_port=None) as server:
        found = jg.ExportedModel(tmp_path / "mlp").predict(x)
        assert server is not None
    np.testing.assert_allclose(
        np.asarray(jax.tree.leaves(found)[0]), model(x), rtol=2e-3, atol=2e-3
    )


def test_a_worker_told_cuda_alone_looks_up_rows_that_it_holds() -> None:
    """``JAX_PLATFORMS=cuda``, without the CPU, is how many hosts are set up."""
    env = SHARED | {"JAX_PLATFORMS": jax.export.default_export_platform()}
    with jg.LocalCluster(ps=1, workers=1, env=env) as alone:
        assert {s.platform for s in alone.status().tasks} == {env["JAX_PLATFORMS"]}
        there = trained(alone, jg.AsyncPS(), Items(nnx.Rngs(0)), items_loss, clicks())
    here = trained(None, None, Items(nnx.Rngs(0)), items_loss, clicks())
    assert_close(there, here)


@pytest.mark.parametrize("kind", [jg.AsyncPS, jg.SyncPS])
def test_workers_with_and_without_accelerator_share_a_run(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with jg.LocalCluster(ps=1, workers=1, env=SHARED, elastic=True) as cluster:
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        cluster.scale(workers=2)
        platforms = {s.task: s.platform for s in cluster.status().tasks}
        assert platforms[WORKER] != platforms[SECOND] == "cpu"
        trainer = jg.Trainer(
            Items(nnx.Rngs(0)),
            items_loss,
            optax.adam(1e-2),
            cluster=cluster,
            strategy=kind(),
        )
        with trainer:
            run = trainer.fit(clicks(), steps=STEPS, batch_size=8, progress=False)
            shares = {m.task: m.share for m in run.members()}
            assert set(shares) == {WORKER, SECOND}
            assert min(shares.values()) > 0
