"""Faults of runs whose client is gone: their master looks after the workers."""

from collections.abc import Callable

import numpy as np
import pytest

from jgraph.cluster.client import connect
from jgraph.train.progress import Report
from jgraph.train.run import Run
from jgraph.train.trainer import Trainer
from tests.faults.conftest import Fault, Stopwatch
from tests.faults.counting import BATCH, IDS, Ledger, counted, trainer
from tests.faults.detached_client import STRATEGIES, begin_and_kill
from tests.train.ledger import examples_counted, examples_due

pytestmark = pytest.mark.procs

PS, WORKERS = "/job:ps/task:0", ("/job:worker/task:0", "/job:worker/task:1")


@pytest.mark.parametrize(
    "strategy",
    [
        "async",
        pytest.param("sync", marks=pytest.mark.chaos),
        pytest.param("int8", marks=pytest.mark.nightly),
        pytest.param("replica", marks=pytest.mark.nightly),
    ],
)
def test_rows_1_9_and_30_a_run_without_its_client_takes_lost_workers_back(
    fault: Fault, strategy: str
) -> None:
    """One worker, then all of them: no batch is left out, and no update is lost."""
    servers = fault.cluster(ps=2, workers=2, restarts=6)
    target = servers.target.replace(servers.address, servers.spec.address(PS))
    begin_and_kill(target, strategy)
    killed = dict.fromkeys(WORKERS, 0)
    with connect(target, timeout_s=20) as cluster:

        def wait_for(what: Callable[[], bool]) -> None:
            clock = Stopwatch()
            while not what():
                assert cluster.runs()[0].state == "running"
                assert clock.seconds < 60, servers.logs(PS, tail=100)

        def all_are_back() -> bool:
            log = servers.logs(PS, tail=1000)
            return all(
                log.count(f"{worker} answers again and takes part") >= times
                for worker, times in killed.items()
            )

        def make_steps(steps: int) -> None:
            end = cluster.runs()[0].step + steps
            wait_for(lambda: cluster.runs()[0].step >= end)

        for lost in (WORKERS[1:], WORKERS):
            for worker in lost:
                killed[worker] += 1
                servers.kill(worker)
            wait_for(all_are_back)
            make_steps(100)
        there = trainer(cluster, STRATEGIES[strategy])
        run = there.attach()
        make_steps(20)
        run.stop()
        run.wait(30)
        assert run.state == "stopped"
        check = check_together if strategy == "sync" else check_each
        check(there, run, sum(killed.values()))
        there.close()
    fault.names += [f"{worker} was lost" for worker in WORKERS] + ["SIGKILL"]


@pytest.mark.chaos
@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_rows_1_and_19_a_detached_run_whose_master_is_lost_has_another_for_its_workers(
    fault: Fault, strategy: str
) -> None:
    """The client makes a ps its master, which takes back the old one, and others."""
    servers = fault.cluster(ps=2, workers=2, restarts=6)
    to_kill, killed = list(WORKERS), 0
    noticed = dict[int, int]()

    def kill_when_all_take_part(run: Run, report: Report) -> None:
        nonlocal killed
        log = servers.logs(PS, tail=1000)
        back = log.count("answers again and takes part")
        if back < killed or report.step < noticed.setdefault(back, report.step) + 200:
            return
        if to_kill:
            killed += 1
            servers.kill(to_kill.pop(0))
        else:
            run.stop()

    with connect(servers.target, timeout_s=20) as cluster:
        assert cluster.master == WORKERS[0]
        there = trainer(cluster, STRATEGIES[strategy])
        run = there.fit(
            IDS,
            steps=10**6,
            batch_size=BATCH,
            callbacks=[kill_when_all_take_part],
            progress=False,
            detached=True,
        )
        assert (run.state, cluster.master) == ("stopped", PS)
        assert run.recoveries() == []
        check = check_together if strategy == "sync" else check_each
        check(there, run, len(WORKERS))
        there.close()
    fault.names += [f"{WORKERS[0]}, the master, was lost", "SIGKILL"]


def check_each(there: Trainer, run: Run, lost: int) -> None:
    ledger = Ledger()
    ledger.add(run)
    ledger.check(there, lost)
    assert set(run.metrics("loss")["replica"][-100:]) == {0, 1}


def check_together(there: Trainer, run: Run, lost: int) -> None:
    position = there.current_position()
    assert position is not None
    assert position["again"] == 0
    np.testing.assert_array_equal(examples_counted(run), examples_due(position))
    means = run.metrics("seen")["value"].sum(0)
    for count in counted(there):
        np.testing.assert_allclose(count, means, rtol=1e-6)
    together = run.metrics("contributions")["value"]
    assert set(together) == {1, 2}
    assert (together[-50:] == 2).all()
