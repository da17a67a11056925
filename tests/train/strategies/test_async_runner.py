"""Asynchronous training on servers of this process, over real gRPC on loopback."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.client.cluster import Cluster, connect
from jgraph.client.session import Session
from jgraph.errors import ConfigError, JGError, NonFiniteError
from jgraph.graph.ir import TaskName
from jgraph.runtime.files.manifest import read_manifest
from jgraph.runtime.files.step_files import steps_in
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.data.data import as_dataset
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.local import Local
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.ledger import examples_due
from tests.support.models import (
    LinenNorm,
    NnxMLP,
    NnxNorm,
    cross_entropy,
    data,
    linen_norm_loss,
    nnx_loss,
)
from tests.support.servers import Servers, connected
from tests.support.stopping import once, once_both_took_part

pytestmark = pytest.mark.usefixtures("nothing_is_left")

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


@pytest.fixture(scope="module")
def one_worker() -> Iterator[Cluster]:
    with connected(ps=2, worker=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def two_by_two() -> Iterator[Cluster]:
    with connected(ps=2, worker=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def two_workers() -> Iterator[Cluster]:
    with connected(ps=1, worker=2) as cluster:
        yield cluster


def trainer(model: Any = NnxMLP, loss: Any = nnx_loss, **options: Any) -> Trainer:
    return Trainer(model(rngs=nnx.Rngs(0)), loss, TX, **options)


def fit(trainer: Trainer, steps: int, batch_size: int = 8, **options: Any) -> Any:
    return trainer.fit(
        data(), steps=steps, batch_size=batch_size, progress=False, **options
    )


def assert_close(a: Any, b: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 1e-6), a, b)


@pytest.mark.parametrize(
    "model", [pytest.param(NnxMLP, marks=pytest.mark.nightly), NnxNorm]
)
def test_one_worker_trains_as_if_there_were_no_cluster(
    one_worker: Cluster, model: Any
) -> None:
    here, there = trainer(model), trainer(model, cluster=one_worker)
    runs = [fit(each, 20) for each in (here, there)]
    assert_close(here.current_values(), there.current_values())
    assert_close(*(run.metrics("loss")["value"] for run in runs))
    there.close()


def test_linen_collections_live_on_the_servers(one_worker: Cluster) -> None:
    variables = LinenNorm().init(jax.random.key(0), data()[0][:1])
    here, there = (
        Trainer(LinenNorm(), linen_norm_loss, TX, cluster=c, variables=variables)
        for c in (None, one_worker)
    )
    fit(here, 5)
    run = fit(there, 5)
    assert_close(here.model(), run.model())
    assert run.metric_names == ["accuracy", "loss"]
    there.close()


def test_two_workers_share_the_steps_and_one_model(two_workers: Cluster) -> None:
    there = trainer(cluster=two_workers)
    stop = once_both_took_part(steps=41)
    run = fit(there, 10**6, eval_data=data(), eval_every=20, callbacks=[stop])
    loss, last = run.metrics("loss"), run.steps
    assert set(loss["replica"].tolist()) == {0, 1}
    assert loss["step"].tolist() == list(range(1, last + 1))
    assert loss["value"][-10:].mean() < loss["value"][:10].mean()
    values = dict(zip(there.names, there.current_values(), strict=True))
    assert values["global_step"] == last
    assert values["opt/1/0/count"] == last
    assert run.metrics("eval_loss")["step"][-1] == last
    assert run.metrics("eval_loss")["value"][-1] == run.evaluate(data())["loss"]
    there.close()


def test_variables_made_anew_take_nothing_that_was_meant_for_those_before(
    two_workers: Cluster,
) -> None:
    first, second = trainer(cluster=two_workers), trainer(cluster=two_workers)
    for there, steps in ((first, 3), (second, 2), (first, 1)):
        fit(there, steps)
    counts = [
        dict(zip(t.names, t.current_values(), strict=True)) for t in (first, second)
    ]
    assert [count["global_step"] for count in counts] == [4, 2]
    for there in (first, second):
        there.close()


def test_a_run_on_a_cluster_saves_while_it_trains(
    two_workers: Cluster, tmp_path: Path
) -> None:
    there, here = trainer(cluster=two_workers), trainer()
    where = Checkpoints(tmp_path, every=10, keep=100)
    there.fit(data(), steps=60, batch_size=8, progress=False, checkpoint=where)
    steps = steps_in(tmp_path)
    assert steps[-1] == 60
    for step in steps:
        values = dict(
            zip(
                here.names,
                here.restore(tmp_path / f"{step}").current_values(),
                strict=True,
            )
        )
        assert values["global_step"] == values["opt/1/0/count"] == step
    there.close()


def with_ids(model: Any, batch: Any) -> Any:
    x, ids = batch
    return jnp.sum(model(x)) * 0.0, {"ids": ids}


def test_workers_together_see_every_example_once_per_epoch(
    two_workers: Cluster,
) -> None:
    there = trainer(loss=with_ids, cluster=two_workers)
    run = there.fit(
        (data(24)[0], np.arange(24)), steps=18, batch_size=4, progress=False
    )
    found = run.metrics("ids")["value"]
    assert sorted(found.ravel().tolist()) == sorted(3 * list(range(24)))
    there.close()


def test_resumed_run_goes_on_where_the_data_was(
    one_worker: Cluster, tmp_path: Path
) -> None:
    ids = np.arange(24)

    def train(trainer: Trainer, steps: int) -> list[list[int]]:
        run = trainer.fit((data(24)[0], ids), steps=steps, batch_size=4, progress=False)
        run.save(tmp_path / f"{steps}", overwrite=True)
        rows: list[list[int]] = run.metrics("ids")["value"].tolist()
        return rows

    whole = trainer(loss=with_ids)
    here, there = trainer(loss=with_ids), trainer(loss=with_ids, cluster=one_worker)
    expected = train(whole, 17)
    begun = train(there, 8)
    here.restore(tmp_path / "8")
    assert begun + train(here, 9) == expected
    position = read_manifest(tmp_path / "8").position
    assert len(json.dumps(position)) < 1000
    there.close()


def test_run_goes_on_without_a_worker_that_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    servers = Servers(ps=1, worker=2)
    master, lost = servers.server("/job:worker/task:0"), "/job:worker/task:1"
    x, _ = data(64)

    def lose(run: Any, report: Any) -> None:
        if 1 in run.metrics("loss")["replica"]:
            servers.lose(lost)

    with connect(master.target, timeout_s=20) as cluster:
        there = trainer(loss=with_ids, cluster=cluster)
        run = there.fit(
            (x, np.arange(64)),
            steps=10**6,
            batch_size=8,
            progress=False,
            callbacks=[lose, once(lambda run: f"{lost} was lost" in caplog.text)],
        )
        found = run.metrics("ids")
        position = there.current_position()
    servers.stop()
    assert run.state == "stopped"
    assert position is not None
    # Also those that the lost worker could not tell of.
    assert run.steps >= position["done"]
    assert set(found["replica"]) == {0, 1}
    # What the lost worker held was dealt again.
    more = np.bincount(found["value"].ravel(), minlength=64) - examples_due(position)
    assert more.min() >= 0
    assert more.sum() <= 8 * position["again"]
    assert run.repeated() == position["again"]
    assert ("batches dealt again" in repr(run)) == bool(run.repeated())


def test_synchronous_run_goes_on_without_its_master_and_repeats_nothing() -> None:
    servers = Servers(ps=1, worker=2)
    master, lost_after = servers.server("/job:worker/task:0"), list[int]()
    x, _ = data(64)

    def lose(run: Any, report: Any) -> None:
        if not lost_after:
            lost_after.append(run.steps)
            servers.lose(master.task)

    with connect(master.target, timeout_s=20) as cluster:
        there = trainer(loss=with_ids, cluster=cluster, strategy=SyncPS())
        run = there.fit(
            (x, np.arange(64)),
            steps=10**6,
            batch_size=8,
            progress=False,
            callbacks=[lose, once(lambda run: cluster.master != master.task)],
        )
        position = there.current_position()
    servers.stop()
    assert run.state == "stopped"
    assert lost_after[0] < run.steps
    assert position is not None
    assert position["again"] == 0


def test_variables_are_spread_with_their_optimizer_state(one_worker: Cluster) -> None:
    there = trainer(cluster=one_worker)
    plan = there.plan(data(), batch_size=8)
    tasks = {name: task for (_, name), task in plan.variable_tasks.items()}
    assert set(tasks.values()) == {"/job:ps/task:0", "/job:ps/task:1"}
    for name in there.names:
        if name.startswith("params/"):
            leaf = name.removeprefix("params/")
            assert tasks[f"opt/1/0/mu/{leaf}"] == tasks[name]
            assert tasks[f"opt/1/0/nu/{leaf}"] == tasks[name]


def test_checkpoint_goes_to_another_number_of_servers(
    one_worker: Cluster, two_workers: Cluster, tmp_path: Path
) -> None:
    first, second, local = (
        trainer(cluster=one_worker),
        trainer(cluster=two_workers),
        trainer(),
    )
    path = fit(first, 5).save(tmp_path / "checkpoint")
    for other in (second, local):
        other.restore(path)
        assert_close(first.current_values(), other.current_values())
    assert fit(second, 2).metrics("loss")["step"].tolist() == [6, 7]


def test_stopped_run_has_what_was_trained(two_workers: Cluster) -> None:
    there = trainer(cluster=two_workers)
    run = fit(there, 100_000, callbacks=[lambda run, report: run.stop()])
    assert run.state == "stopped"
    assert 0 < run.steps < 100_000
    values = dict(zip(there.names, there.current_values(), strict=True))
    assert values["global_step"] == run.steps
    there.close()


def test_step_that_is_not_finite_is_named_and_not_applied(one_worker: Cluster) -> None:
    def loss(model: Any, batch: Any) -> Any:
        return cross_entropy(model(batch[0]), batch[1]) / (batch[1].min() * 0.0)

    there = trainer(loss=loss, cluster=one_worker, check_finite=True)
    before = there.current_values()
    with pytest.raises(NonFiniteError, match="at step 0 of replica 0"):
        fit(there, 50)
    assert_close(there.current_values(), before)
    there.close()


def test_error_in_a_callback_stops_the_workers(two_workers: Cluster) -> None:
    def callback(run: Any, report: Any) -> None:
        raise ZeroDivisionError

    there = trainer(cluster=two_workers)
    with pytest.raises(ZeroDivisionError):
        fit(there, 100_000, callbacks=[callback])
    steps = there.current_values()[there.names.index("global_step")]
    again = there.current_values()[there.names.index("global_step")]
    assert 0 < steps == again


def test_model_stays_when_the_cluster_is_closed() -> None:
    servers = Servers(ps=1, worker=1)
    with connect(servers.servers[-1].target, timeout_s=20) as cluster:
        there = trainer(cluster=cluster)
        run = fit(there, 3)
    servers.stop()
    assert run.model().layers[0].kernel.shape == (4, 8)
    assert run.evaluate(data())["loss"] > 0
    with pytest.raises(JGError):
        fit(there, 1)


@pytest.mark.row(11)
@pytest.mark.parametrize("bound", [0, pytest.param(1, marks=pytest.mark.nightly), None])
def test_no_gradient_is_older_than_the_bound(
    two_by_two: Cluster, bound: int | None
) -> None:
    there = trainer(cluster=two_by_two, strategy=AsyncPS(max_staleness=bound))
    run = fit(there, 10**6, callbacks=[once_both_took_part(steps=60)])
    staleness = run.staleness()
    assert set(staleness) == set(two_by_two.tasks("worker"))
    for shard in two_by_two.tasks("ps"):
        ages = [staleness[worker][shard] for worker in staleness]
        assert sum(sum(counts.values()) for counts in ages) == run.steps
        most = run.steps if bound is None else bound
        assert max(max(counts) for counts in ages) <= most
    there.close()


def test_options_outside_what_is_possible_are_refused() -> None:
    for bound in (-1, 1.5):
        with pytest.raises(ConfigError, match=f"max_staleness is {bound};"):
            AsyncPS(max_staleness=bound)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="step_timeout_s is 0"):
        AsyncPS(step_timeout_s=0)


def test_cluster_without_the_jobs_it_needs_is_refused(two_workers: Cluster) -> None:
    servers = Servers(worker=1)
    with connect(servers.servers[0].target, timeout_s=20) as cluster:
        for strategy in (AsyncPS(), SyncPS()):
            name = type(strategy).__name__
            with pytest.raises(ConfigError, match=f"{name} needs tasks of job 'ps'"):
                fit(trainer(cluster=cluster, strategy=strategy), 1)
    servers.stop()
    with pytest.raises(ConfigError, match="would not use the cluster"):
        trainer(cluster=two_workers, strategy=Local())


def test_same_data_is_sent_to_the_workers_once(
    two_workers: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[TaskName] = []
    put_data = Session.put_data

    def put_and_note(self: Session, task: TaskName, *rest: Any) -> None:
        sent.append(task)
        put_data(self, task, *rest)

    monkeypatch.setattr(Session, "put_data", put_and_note)
    there = trainer(cluster=two_workers)
    x, y = data()
    for _ in range(2):
        there.fit((x, y), steps=4, batch_size=4, progress=False)
    assert sent == two_workers.tasks("worker")
    x[0] += 1  # other values in the same array are other data
    there.fit((x, y), steps=4, batch_size=4, progress=False)
    assert len(sent) == 4
    there.close()


def test_digest_of_data_depends_on_names_types_and_values() -> None:
    x = np.arange(6, dtype=np.float32)
    others: list[dict[str, Any]] = [
        {"a": x},
        {"b": x},
        {"a": x.reshape(6, 1)},
        {"a": x.astype(np.int32)},
        {"a": x + 1},
        {"a": x[::-1]},
    ]
    digests = {as_dataset(given).digest() for given in others}
    assert len(digests) == 6
    assert as_dataset({"a": x.copy()}).digest() in digests
