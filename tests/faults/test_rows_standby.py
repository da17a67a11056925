"""A run whose client and master are both killed goes on with its standby."""

import pytest

from jgraph.client.cluster import connect
from jgraph.client.runs.runs import wait_saved
from jgraph.runtime.files.step_files import steps_in
from jgraph.train.checkpoint.checkpoint import verify
from jgraph.train.run.run import Run
from jgraph.train.trainer import Trainer
from tests.support.counting import Ledger, check_together, trainer
from tests.support.detached_client import (
    STRATEGIES,
    begin_and_kill,
    until,
    until_further,
)
from tests.support.fault import Fault

pytestmark = pytest.mark.procs

PS, MASTER = "/job:ps/task:0", "/job:worker/task:0"


@pytest.mark.row(19, 30)
@pytest.mark.parametrize(
    ("strategy", "restarts"),
    [
        pytest.param("async", 0, marks=pytest.mark.nightly),
        pytest.param("async", 3, marks=pytest.mark.chaos),
        pytest.param("sync", 3, marks=pytest.mark.chaos),
        pytest.param("sync", 0, marks=pytest.mark.chaos),
    ],
)
def test_a_run_without_its_client_goes_on_when_its_master_is_killed(
    fault: Fault, strategy: str, restarts: int
) -> None:
    """Also if it is started again at once: what it knew of the run is gone."""
    servers = fault.cluster(ps=2, workers=2, restarts=restarts)
    assert servers.master == MASTER
    begin_and_kill(servers.target, strategy, fault.path)
    target = servers.target.replace(servers.address, servers.spec.address(PS))
    with connect(target, timeout_s=20) as cluster:
        servers.kill(MASTER)
        info = until(cluster, lambda run: run.term > 1)
        assert info.master == PS
        if restarts:
            back = f"{MASTER} answers again and takes part"
            until(cluster, lambda run: back in servers.logs(PS, tail=1000))
        until_further(cluster)
        there = trainer(cluster, STRATEGIES[strategy])
        run = there.attach()
        run.stop()
        run.wait(30)
        assert run.state == "stopped"
        if strategy == "sync":
            check_together(there, run)
        else:
            check_each(there, run)
        wait_saved(cluster, str(fault.path), 30)
        newest = verify(fault.path / str(steps_in(fault.path)[-1]))
        assert newest.position == there.current_position()
        there.close()
    fault.names.append(f"{MASTER}, the master, was lost")


def check_each(there: Trainer, run: Run) -> None:
    ledger = Ledger()
    ledger.add(run)
    ledger.check(there, lost=1)
