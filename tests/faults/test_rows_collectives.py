"""Faults by their row in docs/reliability.md: children for XLA's collectives."""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import psutil
import pytest

from jgraph.launch.local.cluster import LocalCluster
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.strategies.sync_runner import SyncPS
from tests.support.collective_children import children_of
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
from tests.support.stopping import once
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120)]

WORKERS, WORKER = 2, "/job:worker/task:1"
GOES_ON = "the run goes on from"


def is_gone(child: psutil.Process) -> bool:
    return not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def regrouped(cluster: LocalCluster) -> list[str]:
    return [e.text for e in cluster.events() if e.kind == "regrouped"]


def signalled(cluster: LocalCluster, number: int) -> Callable[[], None]:
    """Returns what sends the child of a worker a signal, once it has one."""

    def act() -> None:
        # Steps go as messages until children are there, which takes its time.
        wait_until(lambda: children_of(cluster.pid(WORKER)), 60)
        (child,) = children_of(cluster.pid(WORKER))
        os.kill(child.pid, number)

    return act


@pytest.mark.row(50, 51)
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGSTOP, marks=pytest.mark.chaos),
    ],
)
def test_steps_go_on_with_other_children_and_no_batch_comes_twice(
    fault: Fault, number: int
) -> None:
    """What was contributed is still there, so that no step is done again."""
    fault.is_noticed = False
    cluster = fault.cluster(ps=0, workers=WORKERS)
    there = trainer(cluster, SyncPS(dense="xla"))
    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=[
            after(50, signalled(cluster, number)),
            once(lambda run: regrouped(cluster), steps=50),
        ],
        progress=False,
    )
    assert run.state == "stopped"
    assert not run.recoveries()
    assert len(regrouped(cluster)) == 1
    check_together(there, run)
    there.close()
    pids = [cluster.pid(task) for task in cluster.tasks()]
    wait_until(lambda: not any(children_of(pid) for pid in pids))


@pytest.mark.row(52)
@pytest.mark.chaos
def test_children_that_die_again_and_again_leave_the_sums_to_messages(
    fault: Fault,
) -> None:
    fault.is_noticed = False
    cluster = fault.cluster(ps=0, workers=WORKERS)
    there = trainer(cluster, SyncPS(dense="xla"))

    def none_is_left() -> bool:
        for child in children_of(cluster.pid(WORKER)):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        return any(event.kind == "fell back" for event in cluster.events())

    killer = threading.Thread(target=wait_until, args=(none_is_left, 60))
    run = there.fit(
        IDS,
        steps=200,
        batch_size=BATCH,
        callbacks=[after(50, killer.start)],
        progress=False,
    )
    killer.join()
    assert run.state == "done"
    assert len(regrouped(cluster)) >= 2
    check_together(there, run)
    there.close()


@pytest.mark.row(53)
@pytest.mark.chaos
@pytest.mark.parametrize("durability", ["checkpoint", "log"])
def test_a_killed_worker_takes_its_child_along_and_others_begin_with_its_next_process(
    fault: Fault, durability: Any
) -> None:
    cluster = fault.cluster(ps=0, workers=WORKERS, restarts=3)
    there = trainer(cluster, SyncPS(dense="xla", durability=durability))
    saves = Checkpoints(fault.path, every=40, keep=10**6)
    killed: list[psutil.Process] = []

    def kill() -> None:
        """Also a child that stands still ends with its server."""
        killed.extend(children_of(cluster.pid(WORKER)))
        killed[0].suspend()
        fault.begins()
        cluster.kill(WORKER)

    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        checkpoint=saves,
        callbacks=[after(100, kill, fault.path), fault.stop_after(GOES_ON)],
        progress=False,
    )
    assert run.state == "stopped"
    wait_until(partial(is_gone, killed[0]), 10)
    (recovery,) = run.recoveries()
    assert recovery.lost == (WORKER,)
    if durability == "log":
        assert recovery.again == 0
        back = None
        fault.names += [WORKER, "SIGKILL"]
    else:
        back = gone_back_to(fault.path, run)
        fault.names += [WORKER, "goes back to step", "SIGKILL"]
    check_recovered(there, run, back, share=WORKERS)
    there.close()
