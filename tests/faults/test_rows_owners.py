"""Faults by their row in docs/reliability.md: of workers that hold dense parameters."""

import os
import signal
import threading
from functools import partial
from typing import Any

import pytest

from jgraph.launch.local.cluster import LocalCluster
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.strategies.sync_runner import SyncPS
from tests.support.counting import (
    BATCH,
    IDS,
    after,
    check_recovered,
    check_together,
    gone_back_to,
    trainer,
)
from tests.support.fault import Fault

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120)]

WORKERS, WORKER = 2, "/job:worker/task:1"
GOES_ON = "the run goes on from"


def kill(fault: Fault, cluster: LocalCluster, task: str) -> None:
    fault.begins()
    cluster.kill(task)


def master_or(task: str, cluster: LocalCluster) -> str:
    return str(cluster.master) if task == "master" else task


@pytest.mark.row(13, 14)
@pytest.mark.parametrize(
    ("task", "options"),
    [
        (WORKER, {"durability": "replica"}),
        pytest.param(
            WORKER,
            {"durability": "log", "gradient_dtype": "int8"},
            marks=pytest.mark.chaos,
        ),
        pytest.param("master", {"durability": "replica"}, marks=pytest.mark.chaos),
    ],
    ids=["replica", "log", "master"],
)
def test_a_killed_owner_is_back_from_what_is_kept_of_it_and_no_step_is_lost(
    fault: Fault, task: str, options: Any
) -> None:
    """No ps is there: the workers have all, the arbiter and the master included."""
    cluster = fault.cluster(ps=0, workers=WORKERS, restarts=3)
    there = trainer(cluster, SyncPS(dense="workers", **options))
    killed = master_or(task, cluster)
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


@pytest.mark.row(12)
@pytest.mark.chaos
def test_a_killed_owner_without_a_copy_goes_back_with_all_others(fault: Fault) -> None:
    cluster = fault.cluster(ps=0, workers=WORKERS, restarts=3)
    there = trainer(cluster, SyncPS(dense="workers"))
    saves = Checkpoints(fault.path, every=40, keep=10**6)
    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        checkpoint=saves,
        callbacks=[
            after(100, partial(kill, fault, cluster, WORKER), fault.path),
            fault.stop_after(GOES_ON),
        ],
        progress=False,
    )
    assert run.state == "stopped"
    (recovery,) = run.recoveries()
    assert recovery.lost == (WORKER,)
    back = gone_back_to(fault.path, run)
    check_recovered(there, run, back, share=WORKERS)
    fault.names += [WORKER, "goes back to step", "SIGKILL"]
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
