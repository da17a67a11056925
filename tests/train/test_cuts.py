"""Checkpoints in the middle of a run on a cluster: when they come, and of which moment.

Each update adds 1 to every number of the model, so that a checkpoint shows how many
updates each ps had, beside the position of the data.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jgraph.client.cluster import Cluster, connect
from jgraph.launch.local.cluster import LocalCluster
from jgraph.runtime.files.manifest import read_manifest
from jgraph.runtime.files.step_files import steps_in
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from tests.support.two_counts import X, counting

pytestmark = pytest.mark.usefixtures("nothing_is_left")

WORKERS = 2


class Cut(NamedTuple):
    """What a checkpoint says of how far the run was."""

    step: int
    on_ps: tuple[int, ...]
    done: int
    again: int


def cuts_in(directory: Path) -> list[Cut]:
    """Returns what all steps of a directory say."""
    found = []
    for step in steps_in(directory):
        here = counting(None).restore(directory / str(step))
        values = dict(zip(here.names, here.current_values(), strict=True))
        position = read_manifest(directory / str(step)).position
        position = position or {"done": 0, "again": 0}  # of the beginning
        assert values["global_step"] == step
        counts = [np.unique(v) for n, v in values.items() if n.startswith("params/")]
        on_ps = tuple(int(count.item()) for count in counts)
        found.append(Cut(step, on_ps, position["done"], position["again"]))
    return found


def train(cluster: Cluster, strategy: Strategy, where: Checkpoints, **how: Any) -> Any:
    there = counting(cluster, strategy)
    run = there.fit(X, batch_size=2, progress=False, checkpoint=where, **how)
    there.close()
    return run


@pytest.mark.combined
@pytest.mark.parametrize("detached", [False, True], ids=["fit", "detached"])
@pytest.mark.parametrize("backups", [0, 1])
def test_a_synchronous_checkpoint_is_of_one_update_on_all_ps_and_in_the_data(
    cluster: Cluster, tmp_path: Path, backups: int, *, detached: bool
) -> None:
    where = Checkpoints(tmp_path, every=25, keep=100)
    strategy = SyncPS(backup_workers=backups, step_timeout_s=20)
    train(cluster, strategy, where, steps=110, detached=detached).wait()
    cuts = cuts_in(tmp_path)
    assert [cut.step for cut in cuts if cut.step] == [25, 50, 75, 100, 110]
    for cut in cuts:
        assert set(cut.on_ps) == {cut.step}
        assert cut.done == cut.step * (WORKERS - backups)


@pytest.mark.combined
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("detached", [False, True], ids=["fit", "detached"])
def test_an_asynchronous_checkpoint_is_ahead_of_its_data_by_two_steps_per_worker(
    cluster: Cluster, tmp_path: Path, prefetch: int, *, detached: bool
) -> None:
    """By three where a worker begins a step while it computes the one before."""
    where = Checkpoints(tmp_path, every=100, keep=100)
    strategy = AsyncPS(prefetch=prefetch)
    train(cluster, strategy, where, steps=350, detached=detached).wait()
    cuts = cuts_in(tmp_path)
    assert cuts[-1].step == 350
    assert [cut.step // 100 for cut in cuts if cut.step] == [1, 2, 3, 3]
    for cut in cuts:
        check_moment(cut, 2 + prefetch)


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(AsyncPS(), marks=pytest.mark.nightly), SyncPS()],
    ids=["async", "sync"],
)
def test_what_was_evaluated_and_is_kept_is_of_one_moment_as_a_checkpoint_is(
    cluster: Cluster, tmp_path: Path, strategy: AsyncPS | SyncPS
) -> None:
    """The loss only falls, so that each copy that is evaluated is the best so far."""
    where = Checkpoints(tmp_path, every=25, keep=100, best="eval_loss")
    how: Any = {"steps": 60, "eval_data": X[:4], "eval_every": 10}
    run = train(cluster, strategy, where, **how)
    evaluated = run.metrics("eval_loss")["step"].tolist()
    cuts = [cut for cut in cuts_in(tmp_path) if cut.step]
    assert {cut.step for cut in cuts} >= set(evaluated)
    if isinstance(strategy, SyncPS):
        assert evaluated == [10, 20, 30, 40, 50, 60]
        assert [cut.step for cut in cuts] == [10, 20, 25, 30, 40, 50, 60]
        for cut in cuts:
            assert set(cut.on_ps) == {cut.step}
            assert cut.done == cut.step * WORKERS
    else:
        assert len({step // 10 for step in evaluated}) == len(evaluated)
        for cut in cuts:
            check_moment(cut)


def check_moment(cut: Cut, under_way: int = 2) -> None:
    """Checks how far asynchronous training may be ahead of its data."""
    assert max(cut.on_ps) - min(cut.on_ps) <= under_way * WORKERS
    assert min(*cut.on_ps, cut.step) - cut.done >= 0
    assert max(*cut.on_ps, cut.step) - cut.done <= cut.again <= under_way * WORKERS


@pytest.fixture(scope="module")
def processes() -> Iterator[LocalCluster]:
    with LocalCluster(ps=2, workers=2, restarts=50) as cluster:
        yield cluster


@pytest.mark.procs
@pytest.mark.nightly
@pytest.mark.parametrize("lost", ["/job:worker/task:1", "/job:ps/task:1"])
@pytest.mark.parametrize("detached", [False, True], ids=["fit", "detached"])
@pytest.mark.parametrize("strategy", [AsyncPS(), SyncPS()], ids=["async", "sync"])
def test_checkpoints_after_the_loss_of_a_task_are_of_one_moment(
    processes: LocalCluster,
    tmp_path: Path,
    strategy: AsyncPS | SyncPS,
    lost: str,
    *,
    detached: bool,
) -> None:
    if detached and "ps" in lost:
        pytest.skip("without a client such a run ends")
    killed = list[int]()

    def kill(run: Any, report: Any) -> None:
        if not killed and len(steps_in(tmp_path)) > 2:
            processes.kill(lost)
            killed.append(report.step)

    where, steps = Checkpoints(tmp_path, every=50, keep=100), 3000
    how: Any = {"steps": steps, "detached": detached, "callbacks": [kill]}
    with connect(processes.target, timeout_s=20) as cluster:
        train(cluster if detached else processes, strategy, where, **how).wait()
    assert processes.wait_for_tasks(30)
    cuts = cuts_in(tmp_path)
    assert killed
    assert cuts[-1].step >= steps  # what was under way may have been applied
    assert [cut for cut in cuts[:-1] if cut.step > killed[0] + 100]
    for cut in cuts:
        if isinstance(strategy, SyncPS):
            assert set(cut.on_ps) == {cut.step}
        else:
            assert max(cut.on_ps) - min(cut.on_ps) <= 2 * WORKERS
            assert min(*cut.on_ps, cut.step) - cut.done >= 0
            assert max(*cut.on_ps, cut.step) - cut.done <= cut.again
