"""Faults of synchronous training that a run outlives without going back."""

from typing import Any

import numpy as np
import pytest

from jgraph.train.strategies.sync_runner import SyncPS
from tests.support.counting import BATCH, IDS, check_together, trainer
from tests.support.fault import Fault

pytestmark = pytest.mark.procs

MASTER, WORKER = "/job:worker/task:0", "/job:worker/task:1"


@pytest.mark.nightly
@pytest.mark.row(1, 9, 19)
def test_a_synchronous_run_takes_lost_workers_and_masters_back(
    fault: Fault,
) -> None:
    """A worker, the master, then all workers: no batch is left out, or comes twice."""
    cluster = fault.cluster(ps=2, workers=2, restarts=5)
    there = trainer(cluster, SyncPS())
    to_kill = [(WORKER,), (MASTER,), (WORKER, MASTER)]
    killed_at = [0]

    def kill_when_all_take_part(run: Any, report: Any) -> None:
        since = run.metrics("contributions")["value"][killed_at[-1] :]
        alone, together = (np.flatnonzero(since == count) for count in (1, 2))
        # The last time all die at once, and nobody goes on alone.
        all_died = len(killed_at) == 4
        if len(together) < 50 or not (all_died or len(killed_at) == 1 or len(alone)):
            return
        if len(alone) and together[-1] < alone[-1]:
            return
        killed_at.append(report.step)
        if to_kill and to_kill[0] == (MASTER,):
            fault.begins()
        for task in to_kill.pop(0) if to_kill else []:
            cluster.kill(task)
        if len(killed_at) == 5:
            run.stop()

    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=[kill_when_all_take_part],
        progress=False,
    )
    assert run.state == "stopped"
    assert run.recoveries() == []
    assert fault.seconds_until("is the master from here on") < 15
    assert cluster.master.startswith("/job:ps/")
    steps, seconds = (run.metrics("loss")[name] for name in ("step", "seconds"))
    np.testing.assert_array_equal(steps, np.arange(1, run.steps + 1))
    assert (np.diff(seconds) >= 0).all()
    check_together(there, run)
    fault.names += [
        *(f"{MASTER}, the master, was lost", "is the master from here on", "SIGKILL"),
        *("the other workers go on", f"{WORKER} answers again", "no worker is left"),
    ]
    there.close()
