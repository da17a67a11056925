"""A ps and workers, as processes: the same numbers as a plain JAX loop."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.client.cluster import Cluster, connect
from jgraph.clock import SystemClock
from jgraph.errors import DataSlotError, JGError
from jgraph.launch.local.cluster import LocalCluster
from jgraph.runtime.files.step_files import steps_in
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.data.source import Source
from jgraph.train.run.report import Report
from jgraph.train.run.run import Run
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.counting import after
from tests.support.ledger import examples_counted, examples_due, loss_that_counts
from tests.support.models import (
    NnxMLP,
    batches_of,
    data,
    nnx_loss,
)
from tests.support.stopping import once

pytestmark = [pytest.mark.usefixtures("nothing_is_left"), pytest.mark.procs]

STEPS, BATCH, SEED = 50, 8, 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(ps=1, workers=1) as cluster:
        yield cluster


def plain_loop(
    tx: optax.GradientTransformation, batches: Iterator[Any], steps: int = STEPS
) -> dict[str, np.ndarray[Any, Any]]:
    """What a user writes without jgraph."""
    graph, params = nnx.split(NnxMLP(rngs=nnx.Rngs(0)))

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            value = nnx_loss(nnx.merge(graph, params), (x, y))
            return value[0] if isinstance(value, tuple) else value

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(steps):
        batch = next(batches)
        params, state = step(params, state, batch["x"], batch["y"])
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(params))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_same(model: Any, expected: dict[str, np.ndarray[Any, Any]]) -> None:
    trained = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    found = jax.tree_util.tree_leaves_with_path(trained)
    assert len(found) == len(expected)
    for path, leaf in found:
        wanted = expected[jax.tree_util.keystr(path)]
        error = np.abs(np.asarray(leaf) - wanted).max() / np.abs(wanted).max()
        assert error <= 1e-6, f"{path}: {error}"


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1),
        optax.sgd(0.1, momentum=0.9),
        optax.adam(1e-2),
        optax.adamw(optax.cosine_decay_schedule(1e-2, STEPS)),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    ],
    ids=["sgd", "momentum", "adam", "adamw with schedule", "clip + adam"],
)
def test_fifty_steps_equal_a_plain_jax_loop(
    cluster: LocalCluster, tx: optax.GradientTransformation
) -> None:
    trainer = Trainer(
        NnxMLP(rngs=nnx.Rngs(0)), nnx_loss, tx, cluster=cluster, seed=SEED
    )
    run = trainer.fit(data(), steps=STEPS, batch_size=BATCH, progress=False)
    x, y = data()
    batches = batches_of({"x": x, "y": y}, BATCH, SEED)
    assert_same(run.model(), plain_loop(tx, batches))
    trainer.close()


@pytest.mark.parametrize(
    "lost",
    [
        "/job:ps/task:0",
        pytest.param("/job:worker/task:0", marks=pytest.mark.nightly),
    ],
)
def test_fit_on_a_cluster_that_misses_a_task_fails_and_names_it(lost: str) -> None:
    clock = SystemClock()
    with LocalCluster(ps=1, workers=1) as cluster:
        trainer = Trainer(
            NnxMLP(rngs=nnx.Rngs(0)), nnx_loss, optax.sgd(0.1), cluster=cluster
        )
        trainer.fit(data(), steps=2, batch_size=8, progress=False)
        cluster.kill(lost)
        began = clock.now()
        with pytest.raises(JGError, match=lost) as caught:
            trainer.fit(data(), steps=2, batch_size=8, progress=False)
        assert clock.now() - began < 30
        advice = f"{lost} ended by SIGKILL; start it again: cluster.restart('{lost}')"
        assert caught.value.message.count(advice) == 1


def is_alone(run: Run) -> bool:
    """Whether one worker does the steps."""
    return bool(run.metrics("contributions")["value"][-1] == 1)


# Smaller: tests/train/strategies/test_sync_runner.py, tests/faults/test_rows_sync.py.
@pytest.mark.nightly
def test_sync_workers_equal_one_process_and_a_killed_one_costs_no_example() -> None:
    tx = optax.sgd(0.1)
    x, y = data()
    everything, loss = (x, y, np.arange(len(x))), loss_that_counts(len(x))
    with LocalCluster(ps=2, workers=2) as cluster:
        there = Trainer(
            NnxMLP(rngs=nnx.Rngs(0)), loss, tx, cluster=cluster, strategy=SyncPS()
        )
        fit = partial(there.fit, everything, batch_size=BATCH, progress=False)
        run = fit(steps=10)
        stream = batches_of({"x": x, "y": y}, BATCH, seed=0)
        pairs = zip(stream, stream, strict=True)
        both = ({k: np.concatenate([a[k], b[k]]) for k in a} for a, b in pairs)
        assert_same(run.model(), plain_loop(tx, both, 10))
        assert examples_counted(run).tolist() == [4] * len(x)  # 20 batches of 5

        kill = after(11, lambda: cluster.kill("/job:worker/task:1"))
        more = fit(steps=10**6, callbacks=[kill, once(is_alone)])
        counts = more.metrics("contributions")["value"]
        assert more.steps == 10 + len(counts)
        assert (counts[0], counts[-1]) == (2, 1)
        # Whatever the lost one held was done by the other, and nothing twice.
        position = there.current_position()
        assert position is not None
        assert position["done"] == 20 + counts.sum()
        total = examples_counted(run) + examples_counted(more)
        np.testing.assert_array_equal(total, examples_due(position))
        assert total.max() - total.min() <= 2


@pytest.mark.nightly
def test_training_goes_on_when_the_evaluator_is_killed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    evaluator = "/job:evaluator/task:0"
    with LocalCluster(ps=1, workers=1, evaluators=1) as cluster:
        trainer = Trainer(
            NnxMLP(rngs=nnx.Rngs(0)), nnx_loss, optax.sgd(0.1), cluster=cluster
        )
        beside: list[int] = []

        def warnings() -> list[str]:
            return [r.getMessage() for r in caplog.records if "evaluat" in r.name]

        def kill_after_the_first_and_stop_after_another(
            run: Run, report: Report
        ) -> None:
            if report.evaluation is not None and not beside:
                beside.append(report.step)
                cluster.kill(evaluator)
            elif report.evaluation is not None and warnings():
                run.stop()

        run = trainer.fit(
            data(),
            steps=10**6,
            batch_size=8,
            eval_data=data(300, seed=1),
            eval_every=100,
            callbacks=[kill_after_the_first_and_stop_after_another],
            progress=False,
        )
        assert run.state == "stopped"
        found = run.metrics("eval_loss")
        # The first one is of an earlier moment than when it was told.
        assert found["step"][0] <= beside[0] < run.steps
        assert found["step"][-1] == run.steps
        assert found["value"][-1] == run.evaluate(data(300, seed=1))["loss"]
        (warned,) = warnings()
        assert "this client evaluates from now on" in warned
        assert evaluator in warned
        trainer.close()


DEADLY = "tests.support.source_functions:deadly"


def at_ps(local: LocalCluster) -> str:
    """Returns where a client has a ps for its master: that outlives any worker."""
    return local.target.replace(local.address, local.spec.address("/job:ps/task:0"))


def trainer_of_files(cluster: Cluster, strategy: Strategy) -> Trainer:
    return Trainer(
        NnxMLP(rngs=nnx.Rngs(0)),
        lambda model, batch: nnx_loss(model, (batch["x"], batch["y"])),
        optax.sgd(0.1),
        cluster=cluster,
        strategy=strategy,
    )


def ended_by_example(there: Trainer, at: int, **options: Any) -> DataSlotError:
    """Trains until an example has killed three workers; returns the error."""
    with pytest.raises(DataSlotError, match="ended 3 workers") as caught:
        there.fit(
            Source.grain(DEADLY, count=2000, at=at),
            steps=300,  # the epoch has 250 batches
            batch_size=BATCH,
            progress=False,
            **options,
        )
    assert at in caught.value.details["examples"]
    return caught.value


@pytest.mark.row(10)
@pytest.mark.nightly
@pytest.mark.parametrize("strategy", [AsyncPS(), SyncPS()], ids=["async", "sync"])
@pytest.mark.parametrize("detached", [False, True], ids=["", "detached"])
def test_example_that_kills_three_workers_ends_the_run_and_is_named(
    strategy: Strategy, detached: bool
) -> None:
    at = 77
    with (
        LocalCluster(ps=1, workers=4, allow_sources=[DEADLY]) as local,
        connect(at_ps(local)) as cluster,
    ):
        there = trainer_of_files(cluster, strategy)
        error = ended_by_example(there, at, detached=detached)
        assert len(error.details["examples"]) == BATCH
        assert len(cluster.status().tasks) == 2
        assert [run.state for run in cluster.runs()] == ["failed"]


@pytest.mark.row(10)
@pytest.mark.chaos
@pytest.mark.parametrize("strategy", [AsyncPS(), SyncPS()], ids=["async", "sync"])
def test_example_that_kills_one_worker_thrice_ends_the_run_with_a_checkpoint(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, strategy: Strategy
) -> None:
    at, worker = 77, "/job:worker/task:0"
    with (
        LocalCluster(ps=1, workers=1, restarts=3, allow_sources=[DEADLY]) as local,
        connect(at_ps(local)) as cluster,
    ):
        there = trainer_of_files(cluster, strategy)
        saves = Checkpoints(tmp_path, every=10**6)
        error = ended_by_example(there, at, checkpoint=saves)
        assert re.search(r"batch \d+ of data slot", error.message)
        values = dict(zip(there.names, there.current_values(), strict=True))
        assert steps_in(tmp_path) == [int(values["global_step"])]
    told = [record.getMessage() for record in caplog.records]
    assert sum(f"{worker} died (SIGKILL); starting it" in line for line in told) == 3
    last_words = [t for t in told if t.startswith(f"the log of {worker} ended with:")]
    assert len(last_words) == 3
    assert all(text.endswith(f"\nexample {at} is too large") for text in last_words)
