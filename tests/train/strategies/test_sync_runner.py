"""Synchronous training on servers of this process, over real gRPC on loopback."""

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
from jgraph.client.cluster import Cluster, connect
from jgraph.errors import ConfigError, NonFiniteError
from jgraph.plan.program.nodes import ContributeNode
from jgraph.plan.program.program import Program
from jgraph.runtime import loaded
from jgraph.train.strategies.sync_runner import SyncPS, SyncRunner
from jgraph.train.trainer import Trainer
from tests.support.counting import after
from tests.support.ledger import examples_counted, examples_due, loss_that_counts
from tests.support.models import (
    NnxMLP,
    NnxNorm,
    batches_of,
    cross_entropy,
    data,
    nnx_loss,
)
from tests.support.servers import Servers
from tests.support.stopping import once

pytestmark = pytest.mark.usefixtures("nothing_is_left")

STEPS, BATCH, WORKERS = 30, 8, 2
CLIP_ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))


def trainer(
    cluster: Cluster, tx: Any = CLIP_ADAM, model: Any = NnxMLP, **options: Any
) -> Trainer:
    options.setdefault("strategy", SyncPS(step_timeout_s=20))
    options.setdefault("loss", nnx_loss)
    loss = options.pop("loss")
    return Trainer(model(rngs=nnx.Rngs(0)), loss, tx, cluster=cluster, **options)


def fit(trainer: Trainer, steps: int = STEPS, **options: Any) -> Any:
    return trainer.fit(data(), steps=steps, batch_size=BATCH, progress=False, **options)


def slow_down(trainer: Trainer, replica: int, seconds: float) -> None:
    """Makes the steps of a worker take that much longer, without computing."""
    runner = trainer._build()[1]
    assert isinstance(runner, SyncRunner)
    runner.compute_wait_s = {replica: seconds}


def plain_loop(tx: Any, workers: int = WORKERS) -> dict[str, Any]:
    """One process that takes the batches of all workers together."""
    graph, params = nnx.split(NnxMLP(rngs=nnx.Rngs(0)))

    @jax.jit
    def step(params: Any, opt: Any, x: Any, y: Any) -> Any:
        loss = lambda params: cross_entropy(nnx.merge(graph, params)(x), y)
        updates, opt = tx.update(jax.grad(loss)(params), opt, params)
        return optax.apply_updates(params, updates), opt

    x, y = data()
    stream = batches_of({"x": x, "y": y}, BATCH, 0)
    opt = tx.init(params)
    for _ in range(STEPS):
        batches = [next(stream) for _ in range(workers)]
        both = {k: np.concatenate([b[k] for b in batches]) for k in ("x", "y")}
        params, opt = step(params, opt, both["x"], both["y"])
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(params))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_same(model: Any, wanted: dict[str, Any]) -> None:
    trained = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    for path, leaf in jax.tree_util.tree_leaves_with_path(trained):
        due = wanted[jax.tree_util.keystr(path)]
        error = np.abs(np.asarray(leaf) - due).max() / np.abs(due).max()
        assert error <= 1e-6, f"{path}: {error}"


def contributed(program: Program, task: str = "") -> set[str]:
    """Returns the names of what workers contribute, to one task or to all."""
    return {
        partition.variables[v].name
        for partition in program.partitions
        if task in ("", partition.task)
        for node in partition.nodes
        if isinstance(node, ContributeNode)
        for v in node.variables
    }


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1),
        pytest.param(optax.sgd(0.1, momentum=0.9), marks=pytest.mark.nightly),
        pytest.param(optax.adam(1e-2), marks=pytest.mark.nightly),
        CLIP_ADAM,
    ],
    ids=["sgd", "momentum", "adam", "clip + adam"],
)
def test_workers_together_do_what_one_process_does_on_all_their_batches(
    cluster: Cluster, tx: Any
) -> None:
    there = trainer(cluster, tx)
    run = fit(there)
    assert_same(run.model(), plain_loop(tx))
    assert run.metrics("contributions")["value"].tolist() == [WORKERS] * STEPS
    assert run.metrics("loss")["step"].tolist() == list(range(1, STEPS + 1))
    assert run.dropped() == {}
    there.close()


@pytest.mark.parametrize(
    "kind", ["div", pytest.param("mod", marks=pytest.mark.nightly)]
)
def test_shards_are_contributed_to_and_updated_one_by_one(
    cluster: Cluster, kind: str
) -> None:
    strategy = SyncPS(
        step_timeout_s=20,
        variable_partitioner=jg.fixed_size_partitioner(2),
        partition_strategy=kind,
        placement=jg.RoundRobin(),
    )
    there = trainer(cluster, CLIP_ADAM, strategy=strategy)
    run = fit(there)
    assert_same(run.model(), plain_loop(CLIP_ADAM))
    planned = there.plan()
    assert not planned.graph.gathered
    kernel = "mean/params/layers/0/kernel"
    for number in range(2):
        part = f"{kernel}/part_{number}"
        assert part in contributed(planned.program, f"/job:ps/task:{number}")
    there.close()


def test_the_same_run_has_the_same_bits_and_so_it_has_if_workers_read_in_turn(
    cluster: Cluster,
) -> None:
    runs = []
    for readers in (None, None, 1):
        strategy = SyncPS(max_readers=readers, step_timeout_s=20)
        there = trainer(cluster, model=NnxNorm, strategy=strategy)
        runs.append(fit(there, 8).metrics("loss")["value"].tolist())
        noted = "max_readers: at most 1 worker at a time" in str(there.plan())
        assert noted == (readers == 1)
        there.close()
    assert runs[0] == runs[1] == runs[2]


class Many(nnx.Module):
    """So many small parameters that they travel, and are updated, as one array."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        sizes = zip([4, *[3] * 9], [3] * 10, strict=True)
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in sizes])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = nnx.tanh(layer(x))
        return x


def test_small_gradients_are_averaged_as_one_array_to_the_same_bits(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat: list[int] = []
    found = loaded._averaged_flat

    def note(*args: Any) -> Any:
        runs = found(*args)
        flat.extend(map(len, runs))
        return runs

    def alone(*args: Any) -> Any:
        return []

    values = []
    for how in (note, alone):
        monkeypatch.setattr(loaded, "_averaged_flat", how)
        there = trainer(cluster, optax.adam(1e-2), Many)
        run = fit(there, 8)
        values.append([run.metrics("loss")["value"], *there.current_values()])
        there.close()
    assert sum(flat) >= 20
    for a, b in zip(*values, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_model_state_is_averaged(cluster: Cluster) -> None:
    def loss(model: Any, batch: Any) -> Any:
        model(batch[0])
        return jnp.sum(model.last.kernel[...] ** 2), {"mean": model.norm.mean[...]}

    there = trainer(cluster, optax.sgd(0.0), NnxNorm, loss=loss)
    run = fit(there, 1)
    # The metric is that of each worker after the step, and so is what is averaged.
    averaged = run.metrics("mean")["value"][0]
    np.testing.assert_allclose(run.model().norm.mean[...], averaged, rtol=1e-6)
    assert np.abs(averaged).max() > 0
    there.close()


@pytest.mark.nightly  # smaller: test_sync_rows.py, and tests/simulation/test_sync.py
@pytest.mark.row(11)
def test_late_contributions_of_a_slow_worker_are_dropped_and_counted(
    cluster: Cluster,
) -> None:
    x, y = data()
    there = trainer(
        cluster,
        strategy=SyncPS(backup_workers=1, step_timeout_s=20),
        loss=loss_that_counts(len(x)),
    )
    reports: list[Any] = []
    fit = partial(there.fit, (x, y, np.arange(len(x))), batch_size=BATCH)
    first = fit(steps=1, progress=False)
    slow, late = "/job:worker/task:1", 0
    slow_down(there, 1, 1.0)

    def stop_after_two(run: Any, report: Any) -> None:
        nonlocal late
        late = run.dropped().get(slow, 0)
        reports.append(report)
        if late >= 2:
            run.stop()

    run: Any = fit(steps=10**6, progress=False, callbacks=[stop_after_two])
    assert set(run.metrics("contributions")["value"]) == {1}
    assert f"{slow} late {late}" in str(reports[-1])
    # Five updates or more for each step of its own: if it were ten times slower than
    # the other, each took twice as long as usual at most.
    late = run.dropped()[slow]
    assert run.steps - 1 >= 5 * late
    # What came too late was dealt again, and counted once.
    position = there.current_position()
    assert position is not None
    assert position["done"] == run.steps
    total = examples_counted(first) + examples_counted(run)
    np.testing.assert_array_equal(total, examples_due(position))
    there.close()


def test_without_backup_the_slow_worker_is_waited_for(cluster: Cluster) -> None:
    there = trainer(cluster)
    fit(there, 1)
    slow_down(there, 1, 0.05)
    run = fit(there, 4)
    assert run.metrics("loss")["seconds"][-1] >= 4 * 0.05
    assert run.dropped() == {}
    there.close()


def test_stopped_run_resumes_where_it_was(cluster: Cluster, tmp_path: Path) -> None:
    there = trainer(cluster)
    run = fit(there, 100_000, callbacks=[lambda run, report: run.stop()])
    assert run.state == "stopped"
    values = dict(zip(there.names, there.current_values(), strict=True))
    assert values["global_step"] == values["opt/1/0/count"] == run.steps
    again = trainer(cluster).restore(run.save(tmp_path / "checkpoint"))
    more = fit(again, 3, eval_data=data(), eval_every=2)
    assert more.metrics("loss")["step"].tolist() == [run.steps + i for i in (1, 2, 3)]
    assert more.metrics("eval_loss")["step"][-1] == run.steps + 3
    there.close()


def test_frozen_parameters_are_neither_sent_nor_changed(cluster: Cluster) -> None:
    labels = lambda params: {"layers": {"0": "frozen", "1": "trained"}}
    tx = optax.multi_transform(
        {"frozen": optax.set_to_zero(), "trained": optax.sgd(0.1)}, labels
    )
    there = trainer(cluster, tx)
    before = there.model().layers[0].kernel[...]
    model = fit(there, 3).model()
    np.testing.assert_array_equal(model.layers[0].kernel[...], before)
    written = contributed(there.plan().program)
    assert "mean/params/layers/1/kernel" in written
    assert "mean/params/layers/0/kernel" not in written
    there.close()


def test_step_that_is_not_finite_is_named_and_not_applied(cluster: Cluster) -> None:
    def loss(model: Any, batch: Any) -> Any:
        return cross_entropy(model(batch[0]), batch[1]) / (batch[1].min() * 0.0)

    there = trainer(cluster, loss=loss, check_finite=True)
    before = there.current_values()
    with pytest.raises(NonFiniteError, match="at step 0"):
        fit(there, 50)
    changed = [
        name
        for name, old, new in zip(
            there.names, before, there.current_values(), strict=True
        )
        if not np.array_equal(old, new)
    ]
    assert changed == []
    there.close()


def test_plan_shows_what_is_contributed(cluster: Cluster) -> None:
    there = trainer(cluster)
    plan = there.plan(data(), batch_size=BATCH)
    assert "contribute" in plan.show().svg
    there.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas_to_aggregate": 3}, "average 3 workers with 0 backup workers"),
        ({"backup_workers": 2}, "the cluster has 2 workers"),
        ({"replicas_to_aggregate": 2, "backup_workers": 1}, "start more, or ask"),
        ({"replicas_to_aggregate": 0}, "replicas_to_aggregate is 0"),
        ({"backup_workers": -1}, "backup_workers is -1"),
        ({"max_readers": 0}, "max_readers is 0; at least 1 worker reads at a time"),
        ({"max_readers": 0.5}, "max_readers is 0.5"),
        ({"max_readers": 2, "dense": "workers"}, "dense='workers'.*max_readers=2: "),
        ({"max_readers": 2, "dense": "auto"}, "dense='auto'.*max_readers=2: "),
        ({"backup_workers": 0.5}, "backup_workers is 0.5; give a whole number"),
        ({"replicas_to_aggregate": 1.5}, "replicas_to_aggregate is 1.5"),
        ({"step_timeout_s": 0}, "step_timeout_s is 0"),
    ],
)
def test_more_workers_than_there_are_is_refused(
    cluster: Cluster, options: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(trainer(cluster, strategy=SyncPS(**options)), 1)


@pytest.mark.nightly  # smaller: tests/train/data/test_feeding.py
@pytest.mark.parametrize("readers", [None, 1])
def test_worker_that_leaves_does_not_stop_the_run(readers: int | None) -> None:
    servers = Servers(ps=2, worker=3)
    lost = "/job:worker/task:2"

    def leave() -> None:
        servers.server(lost).stop(grace_s=0)

    def it_left(run: Any) -> bool:
        return bool(run.metrics("contributions")["value"][-1] == 2)

    with connect(servers.server("/job:ps/task:0").target, timeout_s=20) as cluster:
        strategy = SyncPS(max_readers=readers, step_timeout_s=20)
        there = trainer(cluster, strategy=strategy)
        run = fit(there, 10**6, callbacks=[after(11, leave), once(it_left)])
        counts = run.metrics("contributions")["value"]
        assert run.steps == len(counts)
        assert counts[0] == 3
        assert counts[-1] == 2
    servers.stop()
