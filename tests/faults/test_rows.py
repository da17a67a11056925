"""Faults by their row in docs/reliability.md: those that take seconds."""

import os
import signal

import psutil
import pytest

from jgraph.train.async_ps import AsyncPS
from tests.faults.conftest import Fault, Stopwatch
from tests.faults.counting import BATCH, IDS, Ledger, after, trainer

pytestmark = pytest.mark.procs

WORKER = "/job:worker/task:1"


def test_rows_1_to_3_a_killed_worker_loses_no_update_and_is_taken_back(
    fault: Fault,
) -> None:
    """Killed in the middle of its steps; at its old port it begins to count anew."""
    cluster = fault.cluster(ps=2, workers=2, restarts=3)
    there, ledger = trainer(cluster, AsyncPS()), Ledger()
    for done in (0, 600):
        clock = Stopwatch()
        run = there.fit(
            IDS,
            steps=600,
            batch_size=BATCH,
            callbacks=[after(done + 100, lambda: cluster.kill(WORKER))],
            progress=False,
        )
        assert run.state == "done"
        assert clock.seconds < 30
        ledger.add(run)
        ledger.check(there)
        assert cluster.wait_for_tasks(30)
    run = there.fit(IDS, steps=100, batch_size=BATCH, progress=False)
    assert set(run.metrics("loss")["replica"]) == {0, 1}
    ledger.add(run)
    ledger.check(there)
    fault.names += [f"{WORKER} was lost; the other workers go on", "SIGKILL"]
    there.close()


def test_row_29_a_worker_that_is_told_to_end_ends_and_the_others_go_on(
    fault: Fault,
) -> None:
    cluster = fault.cluster(ps=2, workers=2)
    there, ledger = trainer(cluster, AsyncPS()), Ledger()
    process = psutil.Process(cluster.pid(WORKER))
    run = there.fit(
        IDS,
        steps=600,
        batch_size=BATCH,
        callbacks=[after(100, lambda: os.kill(process.pid, signal.SIGTERM))],
        progress=False,
    )
    assert run.state == "done"
    ledger.add(run)
    assert ledger.check(there) == 0  # it gave back what it had not done
    assert cluster._processes[WORKER].process.wait(30) == 0
    fault.names += [f"{WORKER} ends on SIGTERM"]
    there.close()
