"""Faults of runs whose client is gone: their master looks after the workers."""

from collections.abc import Callable
from pathlib import Path

import pytest

from jgraph.client.cluster import Cluster, connect
from jgraph.client.runs.runs import wait_saved
from jgraph.runtime.files.step_files import steps_in
from jgraph.server.replication.streams import RECORDS_DIR
from jgraph.train.run.report import Report
from jgraph.train.run.run import Run
from jgraph.train.trainer import Trainer
from tests.support.counting import (
    BATCH,
    IDS,
    Ledger,
    check_recovered,
    check_together,
    trainer,
    write_files,
)
from tests.support.detached_client import STRATEGIES, begin_and_kill
from tests.support.fault import Fault, Stopwatch

pytestmark = pytest.mark.procs

PS, WORKERS = "/job:ps/task:0", ("/job:worker/task:0", "/job:worker/task:1")


@pytest.mark.row(1, 9, 30)
@pytest.mark.parametrize(
    ("strategy", "of_files"),
    [
        pytest.param("async", False, marks=pytest.mark.chaos),
        pytest.param("async", True, marks=pytest.mark.chaos),
        pytest.param("sync", True, marks=pytest.mark.chaos),
        pytest.param("int8", False, marks=pytest.mark.nightly),
        pytest.param("replica", False, marks=pytest.mark.nightly),
        pytest.param("sync int8", False, marks=pytest.mark.nightly),
    ],
)
def test_a_run_without_its_client_takes_lost_workers_back(
    fault: Fault, strategy: str, of_files: bool, tmp_path: Path
) -> None:
    """One worker, then all of them: no batch is left out, and no update is lost."""
    if of_files:
        pytest.importorskip("pyarrow", reason="needs jgraph[data]")
        write_files(tmp_path)
    servers = fault.cluster(ps=2, workers=2, restarts=6)
    target = servers.target.replace(servers.address, servers.spec.address(PS))
    begin_and_kill(target, strategy, files=tmp_path if of_files else None)
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
        stop_once_all_take_part(run)
        check_all(there, run, sum(killed.values()))
        there.close()
    fault.names += [f"{worker} was lost" for worker in WORKERS] + ["SIGKILL"]


@pytest.mark.row(1, 19, 30)
@pytest.mark.chaos
@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_detached_run_whose_master_is_lost_has_another_for_its_workers(
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
        elif all_take_part(run):
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
        check_all(there, run, len(WORKERS))
        there.close()
    fault.names += [f"{WORKERS[0]}, the master, was lost", "SIGKILL"]


@pytest.mark.row(29, 30)
@pytest.mark.chaos
@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", ["async", "sync int8"])
def test_a_run_without_its_client_rests_while_each_ps_is_restarted(
    fault: Fault, strategy: str
) -> None:
    """Then its master and a worker: no step is lost or made again."""
    servers = fault.cluster(ps=2, workers=2)
    begin_and_kill(servers.target, strategy, fault.path)
    target = servers.target.replace(servers.address, servers.spec.address(PS))
    saved = []
    for task in servers.tasks():
        with connect(target, timeout_s=20) as cluster:
            before = cluster.runs()[0].step
        assert servers.restart(task) == 0
        if task.startswith("/job:ps/"):
            saved.append(steps_in(fault.path)[-1])
            assert saved[-1] >= before
        with connect(target, timeout_s=20) as cluster:
            before, clock = cluster.runs()[0].step, Stopwatch()
            while cluster.runs()[0].step < before + 100:
                assert cluster.runs()[0].state == "running"
                assert clock.seconds < 30, servers.logs(PS, tail=100)
                is_back = f"{task} answers again" in servers.logs(PS, tail=1000)
                if task in WORKERS and not is_back:
                    before = cluster.runs()[0].step
    with connect(target, timeout_s=20) as cluster:
        there = trainer(cluster, STRATEGIES[strategy])
        run = there.attach()
        stop_once_all_take_part(run)
        wait_saved(cluster, str(fault.path), 30)
        assert steps_in(fault.path)[-3:] == [*saved, run.steps]
        steps = run.metrics("loss")["step"]
        assert sorted(steps) == [*range(1, run.steps + 1)]
        check_all(there, run, lost=0)
        assert run.repeated() == 0
        there.close()
    fault.names += [f"{task} was told to end" for task in cluster.tasks("ps")]
    fault.names += [f"{WORKERS[0]} was told to end"]


@pytest.mark.parametrize(
    ("strategy", "master", "lost"),
    [
        ("async", WORKERS[0], PS),
        pytest.param("sync", WORKERS[0], PS, marks=pytest.mark.chaos),
        pytest.param("async", WORKERS[0], "/job:ps/task:1", marks=pytest.mark.chaos),
        pytest.param("sync", WORKERS[0], "/job:ps/task:1", marks=pytest.mark.chaos),
        pytest.param("sync int8", WORKERS[0], PS, marks=pytest.mark.nightly),
        pytest.param("int8", WORKERS[0], PS, marks=pytest.mark.nightly),
        pytest.param("async", PS, PS, marks=pytest.mark.chaos),
        pytest.param("sync", PS, PS, marks=pytest.mark.chaos),
    ],
)
@pytest.mark.row(12, 30)
def test_a_run_without_its_client_goes_back_when_a_ps_is_killed(
    fault: Fault, strategy: str, master: str, lost: str
) -> None:
    servers = fault.cluster(ps=2, workers=2, restarts=6)

    def target(task: str) -> str:
        return servers.target.replace(servers.address, servers.spec.address(task))

    begin_and_kill(target(master), strategy, fault.path, every=50)
    clock = Stopwatch()
    while len(steps_in(fault.path)) < 3:
        assert clock.seconds < 60, servers.logs(master, tail=100)
    newest = steps_in(fault.path)[-1]
    servers.kill(lost)
    clock = Stopwatch()
    with connect(target(WORKERS[1]), timeout_s=20) as cluster:
        while not run_is_back(cluster, newest + 500):
            assert clock.seconds < 60, servers.logs(PS, tail=100)
        there = trainer(cluster, STRATEGIES[strategy])
        run = there.attach()
        stop_once_all_take_part(run)
        wait_saved(cluster, str(fault.path), 30)
        (recovery,) = run.recoveries()
        assert recovery.lost == (lost,)
        assert recovery.back_to >= newest
        back = fault.path / str(recovery.back_to)
        share = 2 if "sync" in strategy and "async" not in strategy else 1
        check_recovered(there, run, back, share)
        there.close()
    fault.names += [lost, "lost at step", "SIGKILL", "goes back to step"]


@pytest.mark.row(13, 14, 30)
@pytest.mark.chaos
@pytest.mark.parametrize("strategy", ["replica", "log", "sync replica", "sync log"])
@pytest.mark.parametrize("master", [WORKERS[0], PS])
def test_a_run_without_its_client_goes_on_from_what_is_kept_of_a_killed_ps(
    fault: Fault, strategy: str, master: str
) -> None:
    """Also where the ps is the master, and its standby is the one that goes on."""
    env = {RECORDS_DIR: str(fault.path)}
    servers = fault.cluster(ps=2, workers=2, restarts=6, env=env)

    def target(task: str) -> str:
        return servers.target.replace(servers.address, servers.spec.address(task))

    begin_and_kill(target(master), strategy)
    with connect(target(WORKERS[1]), timeout_s=20) as cluster:
        before, clock = cluster.runs()[0].step, Stopwatch()
        servers.kill(PS)
        while not run_is_back(cluster, before + 500):
            assert clock.seconds < 60, servers.logs("/job:ps/task:1", tail=100)
        there = trainer(cluster, STRATEGIES[strategy])
        run = there.attach()
        stop_once_all_take_part(run)
        (recovery,) = run.recoveries()
        assert recovery.lost == (PS,)
        assert recovery.back_to >= before
        is_sync = "sync" in strategy
        torn = 0 if is_sync else 2 * len(WORKERS)
        check_recovered(there, run, None, 2 if is_sync else 1, torn)
        there.close()
    fault.names += [PS, "lost at step", "SIGKILL", "goes on with the copies"]


def run_is_back(cluster: Cluster, step: int) -> bool:
    """Whether the run has come so far; nobody lists it while its master changes."""
    runs = cluster.runs()
    assert all(run.state == "running" for run in runs)
    return any(run.step >= step for run in runs)


def all_take_part(run: Run) -> bool:
    """Whether the last steps are of all workers."""
    if "loss" not in run.metric_names:
        return False  # nothing was told yet
    if "contributions" in run.metric_names:
        together = run.metrics("contributions")["value"]
        return bool((together[-50:] == len(WORKERS)).all())
    return set(run.metrics("loss")["replica"][-100:]) == {0, 1}


def stop_once_all_take_part(run: Run) -> None:
    """Before it stops: who sees that last may do the last steps alone."""
    clock = Stopwatch()
    while not all_take_part(run):
        assert clock.seconds < 30
    run.stop()
    run.wait(30)
    assert run.state == "stopped"


def check_all(there: Trainer, run: Run, lost: int) -> None:
    """Nothing is lost or left out."""
    if "contributions" in run.metric_names:
        check_together(there, run)
    else:
        ledger = Ledger()
        ledger.add(run)
        ledger.check(there, lost)
