"""Parameter servers join and leave a run whose state is kept twice, and are killed."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgraph.errors import JGError
from jgraph.failpoints import CRASHED, ONCE, VARIABLE
from jgraph.launch.local.cluster import LocalCluster
from jgraph.train.run.run import Run
from jgraph.train.state.durability import Durability
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.elastic import Elastic
from jgraph.train.strategies.sync_runner import SyncPS
from tests.support import counting, hash_counting
from tests.support.counting import goes_on
from tests.support.fault import Fault
from tests.support.leaver import kill_the_leaver
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.procs, pytest.mark.timeout(180)]


def begun(there: Any, data: Any, batch: int) -> Run:
    run: Run = there.fit(
        data, steps=10**6, batch_size=batch, block=False, progress=False
    )
    wait_until(lambda: run.steps >= 20)
    return run


def kill(cluster: LocalCluster, run: Run, task: str) -> None:
    """Kills a ps, and waits until its run has gone on without a step done again."""
    before = len(run.recoveries())
    cluster.kill(task)
    wait_until(lambda: len(run.recoveries()) > before or run.state != "running", 60)
    if run.state != "running":
        run.wait(10)  # raises what ended it
    assert task in run.recoveries()[-1].lost
    goes_on(run)


def ledger_of(there: Any, run: Run, *, together: bool, kills: int) -> None:
    run.stop()
    run.wait(60)
    if together:
        assert [r.again for r in run.recoveries()] == [0] * kills
        counting.check_recovered(there, run, share=2)
        return
    ledger = counting.Ledger()
    ledger.add(run)
    ledger.check(there, lost=2 * kills, under_way=2)


@pytest.mark.row(13, 45)
@pytest.mark.parametrize(
    ("strategy", "durability"),
    [
        (SyncPS, "replica"),
        pytest.param(AsyncPS, "replica", marks=pytest.mark.chaos),
        pytest.param(SyncPS, "log", marks=pytest.mark.chaos),
        pytest.param(AsyncPS, "log", marks=pytest.mark.chaos),
    ],
)
def test_a_ps_that_joined_a_run_with_copies_is_killed_and_no_update_is_lost(
    fault: Fault, strategy: Any, durability: Durability
) -> None:
    """Also one that was there before, after others have left."""
    cluster = fault.cluster(ps=2, workers=2, elastic=True, restarts=3)
    elastic = Elastic(ps=(2, 3))
    there = counting.trainer(cluster, strategy(elastic=elastic, durability=durability))
    run = begun(there, counting.IDS, counting.BATCH)
    cluster.scale(ps=3)
    goes_on(run)
    kill(cluster, run, "/job:ps/task:2")
    cluster.scale(ps=2)
    goes_on(run)
    kill(cluster, run, "/job:ps/task:1")
    assert [r.ps for r in run.rescales() if not r.why] == [3, 2]
    ledger_of(there, run, together=strategy is SyncPS, kills=2)
    fault.names += ["goes on with the copies", "SIGKILL"]
    there.close()


@pytest.mark.row(13, 46)
@pytest.mark.chaos
@pytest.mark.parametrize("durability", ["replica", "log"])
@pytest.mark.parametrize("strategy", [SyncPS, AsyncPS])
def test_a_ps_with_copies_that_leaves_and_dies_first_costs_no_update(
    fault: Fault, strategy: Any, durability: Durability
) -> None:
    env = {VARIABLE: "rescale.prepared=sleep:2@2"}
    cluster = fault.cluster(ps=2, workers=2, elastic=True, restarts=3, env=env)
    elastic = Elastic(ps=(2, 3))
    there = counting.trainer(cluster, strategy(elastic=elastic, durability=durability))
    run = begun(there, counting.IDS, counting.BATCH)
    cluster.scale(ps=3)
    kill_the_leaver(cluster, 2)
    assert [r.lost for r in run.recoveries()] == [("/job:ps/task:2",)]
    assert [r.ps for r in run.rescales() if not r.why] == [3, 2]
    goes_on(run)
    ledger_of(there, run, together=strategy is SyncPS, kills=1)
    fault.names += ["goes on with the copies", "SIGKILL"]
    there.close()


@pytest.mark.row(13, 45)
@pytest.mark.chaos
@pytest.mark.parametrize("durability", ["replica", "log"])
def test_the_rows_of_a_hash_table_that_moved_are_kept_twice(
    fault: Fault, durability: Durability
) -> None:
    cluster = fault.cluster(ps=2, workers=2, elastic=True, restarts=3)
    elastic = Elastic(ps=(2, 3), workers=(1, 2), vshards_per_ps=2)
    strategy = SyncPS(elastic=elastic, durability=durability)
    there = hash_counting.trainer(cluster, strategy)
    run = begun(there, hash_counting.DATA, hash_counting.BATCH)
    cluster.scale(ps=3)
    goes_on(run)
    kill(cluster, run, "/job:ps/task:2")
    kill(cluster, run, "/job:ps/task:1")
    run.stop()
    run.wait(60)
    assert [r.again for r in run.recoveries()] == [0, 0]
    hash_counting.check_steps(there, run)
    fault.names += ["goes on with the copies", "SIGKILL"]
    there.close()


@pytest.mark.row(13, 46)
@pytest.mark.chaos
@pytest.mark.parametrize(
    "point", ["rescale.rested", "rescale.moved", "rescale.retired"]
)
@pytest.mark.parametrize("strategy", [SyncPS, AsyncPS])
def test_a_master_that_dies_while_copies_begin_anew_leaves_none_out(
    fault: Fault, tmp_path: Path, point: str, strategy: Any
) -> None:
    once = tmp_path / "crashed"
    env = {VARIABLE: f"{point}=crash", ONCE: str(once)}
    cluster = fault.cluster(ps=2, workers=3, elastic=True, restarts=3, env=env)
    elastic = Elastic(ps=(2, 3))
    there = counting.trainer(cluster, strategy(elastic=elastic, durability="replica"))
    run = begun(there, counting.IDS, counting.BATCH)
    with suppress(JGError):  # the master was asked, and is gone
        cluster.scale(ps=3, timeout_s=5)
    wait_until(once.exists, 30)
    wait_until(lambda: any(not r.why for r in run.rescales()), 60)
    goes_on(run)
    kill(cluster, run, "/job:ps/task:2")
    kill(cluster, run, "/job:ps/task:1")
    run.stop()
    run.wait(60)
    if strategy is SyncPS:
        assert [r.again for r in run.recoveries()] == [0, 0]
        a, b = counting.counted(there)
        np.testing.assert_allclose(a, b, rtol=1e-6)
    else:
        ledger = counting.Ledger()
        ledger.add(run)
        ledger.check(there, lost=7, under_way=2)
    fault.names += ["goes on with the copies", f"exit code {CRASHED}", "SIGKILL"]
    there.close()
