"""Faults by their row in docs/reliability.md: of workers that hold dense parameters."""

import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jgraph.errors import ClusterUnreachableError
from jgraph.failpoints import CRASHED, ONCE, VARIABLE
from jgraph.launch.local.cluster import LocalCluster
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.strategies.sync_runner import SyncPS
from tests.support.counting import (
    BATCH,
    IDS,
    after,
    check_recovered,
    check_together,
    goes_on,
    gone_back_to,
    trainer,
)
from tests.support.fault import Fault
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120)]

WORKERS, WORKER = 2, "/job:worker/task:1"
GOES_ON, IS_BACK = "the run goes on from", "takes part in the run"


def kill(fault: Fault, cluster: LocalCluster, task: str) -> None:
    fault.begins()
    cluster.kill(task)


def master_or(task: str, cluster: LocalCluster) -> str:
    return str(cluster.master) if task == "master" else task


@pytest.mark.row(13, 14)
@pytest.mark.parametrize(
    ("ps", "workers", "task"),
    [
        pytest.param(0, 3, WORKER, marks=pytest.mark.nightly),
        pytest.param(0, WORKERS, "master", marks=pytest.mark.chaos),
        pytest.param(1, WORKERS, WORKER, marks=pytest.mark.chaos),
    ],
    ids=["worker", "master, and one is left", "a ps has the copy"],
)
def test_who_has_the_copy_of_a_killed_owner_has_its_part_until_that_is_back(
    fault: Fault, ps: int, workers: int, task: str
) -> None:
    """With no ps the workers have all, the arbiter and the master included."""
    cluster = fault.cluster(ps=ps, workers=workers, restarts=3)
    there = trainer(cluster, SyncPS(dense="workers", durability="replica"))
    killed = master_or(task, cluster)
    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=[
            after(100, partial(kill, fault, cluster, killed)),
            fault.stop_after(GOES_ON, IS_BACK),
        ],
        progress=False,
    )
    assert run.state == "stopped"
    (recovery,) = run.recoveries()
    assert (recovery.again, recovery.lost) == (0, (killed,))
    assert len(recovery.by) == 1
    assert killed not in recovery.by
    check_recovered(there, run, share=workers)
    fault.names += [killed, "goes on with the copies on", "SIGKILL"]
    there.close()


@pytest.mark.row(13, 14)
@pytest.mark.chaos
def test_the_next_one_has_all_parts_if_a_stand_in_is_killed(
    fault: Fault,
) -> None:
    """Nobody is started again, so nobody has its part back."""
    cluster = fault.cluster(ps=1, workers=3, restarts=0)
    there = trainer(cluster, SyncPS(dense="workers", durability="replica"))

    def kill_next(run: Any, report: Any) -> None:
        lost = len(run.recoveries())
        if lost < 2 and report.step >= 100 * (lost + 1):
            kill(fault, cluster, f"/job:worker/task:{lost + 1}")

    run = there.fit(
        IDS,
        steps=600,
        batch_size=BATCH,
        callbacks=[kill_next],
        progress=False,
    )
    assert run.state == "done"
    first, second = run.recoveries()
    assert (first.lost, first.by) == ((WORKER,), ("/job:worker/task:2",))
    assert (second.lost, second.by) == (("/job:worker/task:2",), ("/job:ps/task:0",))
    check_recovered(there, run, share=3)
    fault.names += [WORKER, "goes on with the copies on"]
    there.close()


@pytest.mark.row(13)
@pytest.mark.chaos
@pytest.mark.parametrize("point", ["stand_in.noted", "stand_in.copied"])
def test_a_master_that_dies_while_a_part_is_given_or_given_back(
    fault: Fault, tmp_path: Path, point: str
) -> None:
    """It is an owner, too. As the part is given, copies begin anew: it has none."""
    once = tmp_path / "crashed"
    env = {VARIABLE: f"{point}=crash", ONCE: str(once)}
    cluster = fault.cluster(ps=0, workers=4, restarts=3, env=env)
    there = trainer(cluster, SyncPS(dense="workers", durability="replica"))
    lost, saves = "/job:worker/task:2", Checkpoints(fault.path, every=40, keep=10**6)
    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        checkpoint=saves,
        callbacks=[after(100, partial(kill, fault, cluster, lost), fault.path)],
        block=False,
        progress=False,
    )
    wait_until(once.exists, 40)
    goes_on(run)
    run.stop()
    run.wait(60)
    back = gone_back_to(fault.path, run) if point == "stand_in.noted" else None
    check_recovered(there, run, back, share=4)
    fault.names += [lost, f"exit code {CRASHED}", "the master, was lost"]
    there.close()


@pytest.mark.row(13, 14)
@pytest.mark.chaos
def test_a_killed_owner_is_back_from_its_log_and_no_step_is_lost(fault: Fault) -> None:
    cluster = fault.cluster(ps=0, workers=WORKERS, restarts=3)
    options: Any = {"durability": "log", "gradient_dtype": "int8"}
    there = trainer(cluster, SyncPS(dense="workers", **options))
    killed = WORKER
    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=[
            after(100, partial(kill, fault, cluster, killed)),
            fault.stop_after(GOES_ON),
        ],
        progress=False,
    )
    assert run.state == "stopped"
    (recovery,) = run.recoveries()
    assert recovery.again == 0
    assert recovery.lost == (killed,)
    check_recovered(there, run, share=WORKERS)
    fault.names += [killed, "goes on with the copies", "SIGKILL"]
    there.close()


@pytest.mark.row(12, 62)
@pytest.mark.chaos
def test_a_killed_owner_without_a_copy_gets_parameters_of_who_has_read_them(
    fault: Fault,
) -> None:
    """If it dies between an update and the next reading of it, all go back.

    So it is killed until it does not.
    """
    cluster = fault.cluster(ps=0, workers=WORKERS, restarts=5)
    there = trainer(cluster, SyncPS(dense="workers"))
    saves = Checkpoints(fault.path, every=40, keep=10**6)

    def kill_again(run: Any, report: Any) -> None:
        recoveries = run.recoveries()
        if any(one.rest_of is not None for one in recoveries):
            return
        due = recoveries[-1].back_to + 60 if recoveries else 100
        if len(recoveries) == len(kills) and report.step >= due:
            kills.append(report.step)
            kill(fault, cluster, WORKER)

    kills: list[int] = []
    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        checkpoint=saves,
        callbacks=[kill_again, fault.stop_after("Workers gave the parameters")],
        progress=False,
    )
    assert run.state == "stopped"
    *before, recovery = run.recoveries()
    assert (recovery.lost, recovery.again) == ((WORKER,), 0)
    assert recovery.rest_of is not None
    assert recovery.rest_of % 40 == 0  # of a checkpoint
    back = fault.path / str(before[-1].back_to) if before else None
    check_recovered(there, run, back, share=WORKERS)
    fault.names += [WORKER, "what workers have read", "SIGKILL"]
    there.close()


@pytest.mark.row(17)
@pytest.mark.chaos
def test_a_frozen_owner_is_killed_and_its_copy_takes_its_place(fault: Fault) -> None:
    cluster = fault.cluster(ps=1, workers=WORKERS, restarts=3, frozen_s=1.5)
    there = trainer(cluster, SyncPS(dense="workers", durability="replica"))

    def freeze() -> None:
        os.kill(cluster.pid(WORKER), signal.SIGSTOP)

    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=[after(100, freeze), fault.stop_after(GOES_ON)],
        progress=False,
    )
    assert run.state == "stopped"
    assert [each.lost for each in run.recoveries()] == [(WORKER,)]
    check_recovered(there, run, share=WORKERS)
    fault.names += [f"{WORKER} is frozen for", "SIGKILL", "goes on with the copies"]
    there.close()


@pytest.mark.row(29)
@pytest.mark.chaos
def test_an_owner_that_is_told_to_end_rests_the_run_and_nothing_is_done_again(
    fault: Fault,
) -> None:
    """What it holds is saved before it ends, as that of a ps is."""
    cluster = fault.cluster(ps=0, workers=WORKERS)
    there = trainer(cluster, SyncPS(dense="workers"))
    codes: list[int] = []

    def restart() -> None:
        codes.append(cluster.restart(WORKER))

    thread = threading.Thread(target=restart)
    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        checkpoint=Checkpoints(fault.path, every=10**5),
        callbacks=[after(60, thread.start), fault.stop_after(GOES_ON)],
        progress=False,
    )
    thread.join()
    assert run.state == "stopped"
    assert codes == [0]
    (recovery,) = run.recoveries()
    assert recovery.is_drain
    assert recovery.again == 0
    check_together(there, run)
    fault.is_noticed = False
    there.close()


@pytest.mark.row(13)
@pytest.mark.chaos
@pytest.mark.parametrize("restarts", [3, 0])
def test_a_fit_begins_while_somebody_stands_in_for_an_owner_if_that_comes_back(
    fault: Fault, restarts: int
) -> None:
    """It waits for the worker, gives it the data again, and leaves the parts."""
    cluster = fault.cluster(ps=1, workers=3, restarts=restarts)
    there = trainer(cluster, SyncPS(dense="workers", durability="replica"))
    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=[
            after(100, partial(kill, fault, cluster, WORKER)),
            fault.stop_after(GOES_ON, steps=0),
        ],
        progress=False,
    )
    assert run.recoveries()[0].by == ("/job:worker/task:2",)
    fault.names += [WORKER, "goes on with the copies on"]
    go_on = partial(there.fit, IDS, steps=100, batch_size=BATCH, progress=False)
    if restarts:
        run = go_on(wait_s=30)
        assert run.state == "done"
        assert not run.recoveries()
    else:
        words = f"{WORKER} does not answer.*start it again"
        with pytest.raises(ClusterUnreachableError, match=words):
            go_on(wait_s=30)
    check_recovered(there, run, share=3)
    there.close()
