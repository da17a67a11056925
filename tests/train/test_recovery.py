"""Runs that lose tasks and go on from their newest checkpoint."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.clock import SystemClock
from jgraph.errors import (
    ClusterError,
    ConfigError,
    InternalError,
    JGError,
    TaskLostError,
    TaskMissingError,
)
from jgraph.launch.local.cluster import LocalCluster
from jgraph.runtime.files.step_files import steps_in
from jgraph.train.checkpoint.checkpoint import restore_position
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.run.history import History
from jgraph.train.run.report import Report
from jgraph.train.run.run import Run
from jgraph.train.state.runner import Chunk
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.models import NnxMLP, data, nnx_loss
from tests.support.saved_steps import damage

pytestmark = pytest.mark.usefixtures("nothing_is_left")

PS, WORKER = "/job:ps/task:1", "/job:worker/task:1"


def chunk(replica: int, *seconds: float) -> Chunk:
    """Steps done at these times, whose loss is that time."""
    at = np.asarray(seconds)
    steps = np.arange(len(at))
    return Chunk(replica, steps, at, {"loss": at}, {"pull": 2.0 * len(at)})


def test_history_has_each_step_once_after_going_back() -> None:
    history = History(first_step=100)
    history.add(chunk(0, 1, 3, 5))
    history.add(chunk(1, 2, 4, 6))
    history.add_evaluation(102, 1.0, {"loss": 7.0})
    history.add_evaluation(106, 1.0, {"loss": 8.0})
    history.go_back(104)
    assert history.steps == 104
    history.add(chunk(1, 11, 12))
    found = history.metrics("loss")
    assert found["step"].tolist() == [101, 102, 103, 104, 105, 106]
    assert found["value"].tolist() == [1, 2, 3, 4, 11, 12]
    assert found["seconds"].tolist() == [1, 2, 3, 4, 11, 12]
    assert found["replica"].tolist() == [0, 1, 0, 1, 1, 1]
    assert history.metrics("eval_loss")["step"].tolist() == [102]
    assert [r.steps for r in history.profile().replicas] == [2, 4]
    assert [r.seconds["pull"] for r in history.profile().replicas] == [4, 8]
    history.go_back(102)
    assert history.metrics("loss")["step"].tolist() == [101, 102]


def test_history_knows_of_steps_that_nobody_told_before_the_loss() -> None:
    history = History()
    history.add(chunk(0, 1, 2))
    history.go_back(5)  # steps 3 to 5 are in the checkpoint
    history.add(chunk(0, 1))
    assert history.steps == 6
    assert history.metrics("loss")["step"].tolist() == [1, 2, 6]
    history.go_back(0)
    assert history.steps == 0
    with pytest.raises(ConfigError, match="no metric"):
        history.metrics("loss")


def test_history_counts_the_steps_that_a_lost_worker_did_not_tell_of() -> None:
    history = History(first_step=100)
    history.add(chunk(0, 1, 2))
    history.ended(105)
    assert history.steps == 105
    history.go_back(103)
    history.add(chunk(0, 1))
    history.ended(104)
    assert history.steps == 104


def test_history_ends_with_the_updates_that_were_applied_not_with_those_told_of() -> (
    None
):
    history = History(first_step=100)
    history.add(chunk(0, 1, 2))
    history.add(chunk(1, 1.5, 3))  # the ps was lost before it had applied the last one
    history.ended(103)
    assert history.steps == 103
    assert history.metrics("loss")["seconds"].tolist() == [1, 1.5, 2, 3]
    history.ended(104)  # read again, of a copy that has it
    assert history.steps == 104
    history.ended(99)
    assert history.steps == 99


def trainer_on(cluster: LocalCluster, strategy: Strategy) -> Trainer:
    model, tx = NnxMLP(rngs=nnx.Rngs(0)), optax.adam(1e-2)
    return Trainer(model, nnx_loss, tx, cluster=cluster, strategy=strategy)


def killing(
    cluster: LocalCluster, directory: Path, *tasks: str, saved: int = 1
) -> Callable[[Run, Report], None]:
    """Kills tasks when there are so many checkpoints.

    Once: more reports may come before the loss is known.
    """
    killed: list[str] = []

    def kill(run: Run, report: Report) -> None:
        if len(steps_in(directory)) >= saved and not killed:
            for task in tasks:
                cluster.kill(task)
                killed.append(task)

    return kill


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(ps=2, workers=2, restarts=50) as cluster:
        yield cluster


@pytest.mark.row(12)
@pytest.mark.procs
@pytest.mark.parametrize(
    ("strategy", "steps", "lost"),
    [
        (AsyncPS(), 400, (PS,)),
        pytest.param(SyncPS(), 400, (PS,), marks=pytest.mark.nightly),
    ],
    ids=["async", "sync"],
)
def test_run_goes_on_from_its_newest_checkpoint_by_itself(
    cluster: LocalCluster,
    tmp_path: Path,
    strategy: Strategy,
    steps: int,
    lost: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = trainer_on(cluster, strategy)
    where = Checkpoints(tmp_path, every=50, keep=1000)
    fit = partial(trainer.fit, data(), batch_size=8, checkpoint=where, progress=False)
    fit(steps=10)
    run = fit(steps=steps, callbacks=[killing(cluster, tmp_path, *lost)])
    last = 10 + steps
    assert (run.state, run.steps, steps_in(tmp_path)[-1]) == ("done", last, last)
    (recovery,) = run.recoveries()
    assert recovery.lost == lost
    # All shards are of that one step, and so is the place in the data.
    back = recovery.back_to
    began, end = restore_position(tmp_path / str(back)), trainer.current_position()
    assert began is not None
    assert end is not None
    batches = last - back
    if "contributions" in run.metric_names:
        counts = run.metrics("contributions")
        batches = counts["value"][counts["step"] > back].sum()
    assert end["done"] == began["done"] + batches
    loss = run.metrics("loss")
    assert len(np.unique(loss["step"])) == len(loss["step"])
    assert loss["step"][loss["step"] > back].tolist() == [*range(back + 1, last + 1)]
    assert loss["value"][-50:].mean() < loss["value"][:20].mean()
    params = jax.tree.leaves(nnx.state(run.model(), nnx.Param))
    assert all(np.isfinite(leaf).all() for leaf in params)
    told = [r.getMessage() for r in caplog.records if r.name == "jgraph.recover"]
    assert len(told) == 1
    assert told[0].startswith(f"{lost[0]} was lost at step {recovery.step}; after ")
    assert f"the run goes on from step {back}: {recovery.again} steps" in told[0]
    warned = [r.name for r in caplog.records if r.levelno >= logging.WARNING]
    assert run.last_report is not None
    assert run.last_report.step == run.steps
    assert sorted(warned) == ["jgraph.events", "jgraph.recover"]
    assert "recovered=1" in repr(run)
    trainer.close()


# Smaller: tests/server/runs/test_rollback.py.
@pytest.mark.nightly
@pytest.mark.row(27)
@pytest.mark.procs
def test_run_whose_newest_checkpoint_is_damaged_takes_the_one_before(
    cluster: LocalCluster,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = trainer_on(cluster, AsyncPS())
    saved: list[int] = []

    def stop_at_last(run: Run, report: Report) -> None:
        if run.recoveries() and report.step >= saved[-1] + 100:
            run.stop()

    def damage_once() -> None:
        """Asked while the run waits for the ps: no save is under way by then."""
        if not saved:
            saved.extend(steps_in(tmp_path)[-2:])
            damage(tmp_path / str(saved[-1]))

    monkeypatch.setattr(cluster, "check_startable", damage_once)
    run = trainer.fit(
        data(),
        steps=10**6,
        batch_size=8,
        checkpoint=Checkpoints(tmp_path, every=50, keep=1000),
        callbacks=[killing(cluster, tmp_path, PS, saved=2), stop_at_last],
        progress=False,
    )
    good, damaged = saved
    assert run.state == "stopped"
    (recovery,) = run.recoveries()
    assert (recovery.lost, recovery.back_to) == ((PS,), good)
    assert (tmp_path / f"{damaged}.corrupt").is_dir()
    (said,) = [r.getMessage() for r in caplog.records if "JG-302" in r.getMessage()]
    assert str(tmp_path / str(damaged)) in said
    assert "layers/0/kernel" in said
    assert "the step before is used" in said
    loss = run.metrics("loss")["step"]
    assert loss[loss > good].tolist() == [*range(good + 1, run.steps + 1)]
    trainer.close()


@pytest.mark.procs
@pytest.mark.parametrize(
    "stops",
    [
        "before",
        *(
            pytest.param(s, marks=pytest.mark.nightly)
            for s in ("after", "while it waits")
        ),
    ],
)
@pytest.mark.parametrize(
    "strategy",
    [AsyncPS(), pytest.param(SyncPS(), marks=pytest.mark.nightly)],
    ids=["async", "sync"],
)
def test_run_that_was_to_end_as_it_lost_a_ps_ends_with_what_it_goes_back_to(
    cluster: LocalCluster,
    tmp_path: Path,
    strategy: Strategy,
    stops: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever the master hears of first: the stop, or the loss."""
    trainer, kill = trainer_on(cluster, strategy), killing(cluster, tmp_path, PS)

    def kill_and_stop(run: Run, report: Report) -> None:
        is_due = bool(steps_in(tmp_path))
        if is_due and stops == "before":
            run.stop()
        kill(run, report)
        if is_due and stops == "after":
            run.stop()

    run = trainer.fit(
        data(),
        steps=10**6,
        batch_size=8,
        checkpoint=Checkpoints(tmp_path, every=50),
        callbacks=[kill_and_stop],
        progress=False,
        block=False,
    )
    with monkeypatch.context() as patch:
        if stops == "while it waits":  # this is asked then
            patch.setattr(cluster, "check_startable", run.stop)
        run.wait(60)
    assert run.state == "stopped"
    (recovery,) = run.recoveries()
    assert recovery.lost == (PS,)
    assert run.steps >= recovery.back_to
    assert steps_in(tmp_path)[-1] == run.steps
    values = dict(zip(trainer.names, trainer.current_values(), strict=True))
    assert int(values["global_step"]) == run.steps
    trainer.close()


@pytest.mark.procs
def test_run_without_a_checkpoint_ends_and_says_so(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    trainer = trainer_on(cluster, AsyncPS())
    late = Checkpoints(tmp_path, every=10**6)
    with pytest.raises(ClusterError, match=PS) as caught:
        trainer.fit(
            data(),
            steps=10**6,
            batch_size=8,
            checkpoint=late,
            callbacks=[killing(cluster, tmp_path, PS, saved=0)],
            progress=False,
        )
    assert (
        f"no checkpoint of this run is there yet; there is no checkpoint in {tmp_path}"
        in str(caught.value)
    )
    assert trainer.run is not None
    took_part = {member.task for member in trainer.run.members()}
    assert took_part == set(cluster.tasks("worker"))
    assert cluster.wait_for_tasks(30)


@pytest.mark.procs
@pytest.mark.parametrize(
    "kind", [ConfigError, pytest.param(InternalError, marks=pytest.mark.nightly)]
)
def test_error_that_is_no_loss_ends_a_run_that_has_checkpoints(
    cluster: LocalCluster, tmp_path: Path, kind: type[JGError]
) -> None:
    trainer, runs = trainer_on(cluster, AsyncPS()), []

    def refuse(run: Run, report: Report) -> None:
        runs.append(run)
        raise kind("enough of this")

    where = Checkpoints(tmp_path, every=1)
    fit = partial(trainer.fit, data(), batch_size=8, checkpoint=where, progress=False)
    fit(steps=2)
    with pytest.raises(kind, match=r"enough of this$"):
        fit(steps=2, callbacks=[refuse])
    assert len(runs) == 1
    assert runs[0].recoveries() == []
    assert fit(steps=2).state == "done"
    trainer.close()


@pytest.mark.nightly
@pytest.mark.procs
def test_trainer_goes_on_after_a_worker_and_not_after_a_ps_was_started_again(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    trainer = trainer_on(cluster, SyncPS())
    fit = partial(trainer.fit, data(), steps=5, batch_size=8, progress=False)
    fit(checkpoint=Checkpoints(tmp_path))
    cluster.kill(WORKER)
    assert cluster.wait_for_tasks(30)
    assert fit().steps == 10
    position = trainer.current_position()
    assert position is not None
    assert position["done"] == 20
    cluster.kill(PS)
    assert cluster.wait_for_tasks(30)
    with pytest.raises(TaskLostError, match=f"{PS} was started again"):
        fit()
    trainer.restore(tmp_path)
    assert fit().steps == 10
    trainer.close()


@pytest.mark.row(18)
@pytest.mark.nightly
@pytest.mark.procs
def test_run_whose_ps_stays_away_ends_and_says_where_to_go_on(
    tmp_path: Path,
) -> None:
    clock = SystemClock()
    with LocalCluster(ps=2, workers=1) as cluster:
        trainer, killed_at = trainer_on(cluster, AsyncPS()), [0.0]
        kill = killing(cluster, tmp_path, PS)

        def kill_and_look_at_the_clock(run: Run, report: Report) -> None:
            kill(run, report)
            killed_at[0] = clock.now()

        with pytest.raises(TaskMissingError, match=f"{PS} ended") as caught:
            trainer.fit(
                data(),
                steps=10**6,
                batch_size=8,
                checkpoint=Checkpoints(tmp_path, every=50),
                callbacks=[kill_and_look_at_the_clock],
                progress=False,
            )
        assert clock.now() - killed_at[0] < 30
    newest = steps_in(tmp_path)[-1]
    assert f"the newest checkpoint is step {newest}" in str(caught.value)
    assert f"trainer.restore('{tmp_path}')" in str(caught.value)
    here = Trainer(NnxMLP(rngs=nnx.Rngs(0)), nnx_loss, optax.adam(1e-2))
    here.restore(tmp_path)
    values = dict(zip(here.names, here.current_values(), strict=True))
    assert int(values["global_step"]) == newest
