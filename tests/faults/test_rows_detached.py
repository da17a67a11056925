"""Faults of runs whose client is gone: their master looks after the workers."""

import os
import random
import signal
from pathlib import Path

import pytest

from jgraph.client.cluster import Cluster, connect
from jgraph.client.runs.runs import RunInfo, wait_saved
from jgraph.cluster.options import RECORDS_DIR
from jgraph.coordination.run.recovery import Recovery
from jgraph.errors import ConfigError
from jgraph.failpoints import CRASHED, ONCE, VARIABLE
from jgraph.graph.device import is_ps
from jgraph.launch.local.cluster import LocalCluster
from jgraph.runtime.files.step_files import steps_in
from jgraph.train.run.report import Report
from jgraph.train.run.run import Run
from jgraph.train.trainer import Trainer
from tests.support.counting import (
    BATCH,
    IDS,
    Ledger,
    check_it_goes_on_from,
    check_recovered,
    check_together,
    trainer,
    write_files,
)
from tests.support.detached_client import (
    STRATEGIES,
    begin_and_kill,
    begun,
    until,
    until_further,
)
from tests.support.fault import Fault, Stopwatch
from tests.support.links import through_proxies

pytestmark = pytest.mark.procs

PS, PS1 = "/job:ps/task:0", "/job:ps/task:1"
WORKERS = ("/job:worker/task:0", "/job:worker/task:1")


@pytest.mark.row(1, 3, 9, 30)
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
    begin_and_kill(target(servers, PS), strategy, files=tmp_path if of_files else None)
    killed = dict.fromkeys(WORKERS, 0)
    with connect(target(servers, PS), timeout_s=20) as cluster:

        def all_are_back(run: RunInfo) -> bool:
            log = servers.logs(PS, tail=1000)
            return all(
                log.count(f"{worker} answers again and takes part") >= times
                for worker, times in killed.items()
            )

        for lost in (WORKERS[1:], WORKERS):
            for worker in lost:
                killed[worker] += 1
                servers.kill(worker)
            until(cluster, all_are_back)
            until_further(cluster)
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
    saved = []
    for task in servers.tasks():
        with connect(target(servers, PS), timeout_s=20) as cluster:
            before = until(cluster, lambda run: True).step
        assert servers.restart(task) == 0
        if task.startswith("/job:ps/"):
            saved.append(steps_in(fault.path)[-1])
            assert saved[-1] >= before
        with connect(target(servers, PS), timeout_s=20) as cluster:
            if task in WORKERS:
                until_said(cluster, servers, f"{task} answers again")
            until_further(cluster)
    with connect(target(servers, PS), timeout_s=20) as cluster:
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
        pytest.param("async", WORKERS[0], (PS,), marks=pytest.mark.nightly),
        *(
            pytest.param(*one, marks=pytest.mark.chaos)
            for one in [
                ("sync", WORKERS[0], (PS,)),
                ("async", WORKERS[0], (PS1,)),
                ("sync", WORKERS[0], (PS1,)),
                ("async", PS, (PS,)),
                ("sync", PS, (PS,)),
                ("async", WORKERS[0], (WORKERS[0], PS1)),
                ("sync", WORKERS[0], (WORKERS[0], PS1)),
                ("replica", WORKERS[0], (PS, PS1)),
            ]
        ),
        pytest.param("sync int8", WORKERS[0], (PS,), marks=pytest.mark.nightly),
        pytest.param("int8", WORKERS[0], (PS,), marks=pytest.mark.nightly),
    ],
)
@pytest.mark.row(12, 18, 30, 31, 34, 35)
def test_a_run_without_its_client_goes_back_when_a_ps_is_killed(
    fault: Fault, strategy: str, master: str, lost: tuple[str, ...]
) -> None:
    """Also with the master, which it may be, or with the ps that has its copy."""
    servers = fault.cluster(ps=2, workers=2, restarts=6)
    begin_and_kill(target(servers, master), strategy, fault.path, every=50)
    with connect(target(servers, WORKERS[1]), timeout_s=20) as cluster:
        until(cluster, lambda run: len(steps_in(fault.path)) >= 3)
        newest = steps_in(fault.path)[-1]
        for task in lost:
            servers.kill(task)
        until(cluster, lambda run: run.step >= newest + 500)
        there = trainer(cluster, STRATEGIES[strategy])
        run = there.attach()
        stop_once_all_take_part(run)
        wait_saved(cluster, str(fault.path), 30)
        (recovery,) = run.recoveries()
        assert recovery.lost == tuple(task for task in lost if is_ps(task))
        assert recovery.back_to >= newest
        back = fault.path / str(recovery.back_to)
        check_recovered(there, run, back, share_of(strategy))
        there.close()
    fault.names += [*lost, "lost at step", "SIGKILL", "goes back to"]


@pytest.mark.row(12, 30, 62)
@pytest.mark.chaos
def test_a_run_without_its_client_gives_a_lost_owner_what_workers_have_read(
    fault: Fault,
) -> None:
    """The master has the rest from its own checkpoints.

    If the owner dies between an update and the next reading of it, all go back. So it
    is killed until it does not.
    """
    servers = fault.cluster(ps=0, workers=2, restarts=8)
    begin_and_kill(target(servers, WORKERS[0]), "workers", fault.path, every=50)
    said = ["gave /job:worker/task:1 the parameters", "workers cannot give"]
    with connect(target(servers, WORKERS[0]), timeout_s=20) as cluster:

        def outcomes() -> list[int]:
            log = servers.logs(WORKERS[0], tail=10_000)
            return [log.count(text) for text in said]

        def lose(number: int) -> None:
            until(cluster, lambda run: len(steps_in(fault.path)) >= 3 * number)
            servers.kill(WORKERS[1])
            until(cluster, lambda run: sum(outcomes()) >= number)
            until_further(cluster)

        for kills in range(1, 8):
            lose(kills)
            if outcomes()[0]:
                break
        there = trainer(cluster, STRATEGIES["workers"])
        run = there.attach()
        stop_once_all_take_part(run)
        *before, recovery = run.recoveries()
        assert len(before) == kills - 1
        assert (recovery.lost, recovery.again) == (WORKERS[1:], 0)
        assert recovery.rest_of is not None
        assert recovery.rest_of % 50 == 0  # of a checkpoint
        back = fault.path / str(before[-1].back_to) if before else None
        check_recovered(there, run, back, share=len(WORKERS))
        there.close()
    fault.names += [WORKERS[1], "what workers have read", "SIGKILL"]


@pytest.mark.row(13, 14, 30, 32, 33, 34, 35)
@pytest.mark.chaos
@pytest.mark.parametrize("strategy", ["replica", "log", "sync replica", "sync log"])
@pytest.mark.parametrize(
    ("master", "lost"),
    [(WORKERS[0], (PS,)), (PS, (PS,)), (WORKERS[0], (WORKERS[0], PS1))],
    ids=["ps", "master", "both"],
)
def test_a_run_without_its_client_goes_on_from_what_is_kept_of_a_killed_ps(
    fault: Fault, strategy: str, master: str, lost: tuple[str, ...]
) -> None:
    """Also where the ps is the master, or dies with it: its standby goes on."""
    servers = fault.cluster(ps=2, workers=2, restarts=6, env=records(fault))
    begin_and_kill(target(servers, master), strategy)
    with connect(target(servers, WORKERS[1]), timeout_s=20) as cluster:
        before = until(cluster, lambda run: True).step
        for task in lost:
            servers.kill(task)
        until(cluster, lambda run: run.step >= before + 500)
        assert check_kept(cluster, strategy, before).lost == lost[-1:]
    fault.names += [*lost, "lost at step", "SIGKILL", "goes on with the copies"]


@pytest.mark.row(2, 16, 30)
@pytest.mark.chaos
@pytest.mark.parametrize(
    ("strategy", "point"),
    [
        ("async", "push.sent"),
        ("replica", "update.recorded"),
        ("log", "log.on_disk"),
        ("sync replica", "update.applied"),
        ("sync log", "log.written"),
    ],
)
def test_a_run_without_its_client_loses_no_update_when_a_task_crashes_at_its_work(
    fault: Fault, strategy: str, point: str, tmp_path: Path
) -> None:
    """A worker between its pushes to two ps; a ps within an update, or its record."""
    once = tmp_path / "crashed"
    env = {**records(fault), VARIABLE: f"{point}=crash@501", ONCE: str(once)}
    servers = fault.cluster(ps=2, workers=2, restarts=3, env=env)
    watched = PS if strategy == "async" else WORKERS[1]  # it does not crash
    with connect(target(servers, watched), timeout_s=20) as cluster:
        begin_and_kill(target(servers, watched), strategy)
        before = until(cluster, lambda run: once.exists()).step
        if strategy == "async":
            until_said(cluster, servers, "answers again and takes part")
            there = trainer(cluster, STRATEGIES[strategy])
            run = there.attach()
            stop_once_all_take_part(run)
            check_all(there, run, lost=1)
            there.close()
        else:
            until(cluster, lambda run: run.step >= before + 500)
            (lost,) = check_kept(cluster, strategy, 0).lost
            assert is_ps(lost)
    fault.names += [f"exit code {CRASHED}"]


@pytest.mark.row(35)
@pytest.mark.chaos
def test_a_run_ends_that_loses_its_master_and_both_standbys_and_leaves_a_checkpoint(
    fault: Fault,
) -> None:
    """Nobody else knows how to go on with it, so it is not found again."""
    servers = fault.cluster(ps=2, workers=2, restarts=6)
    begin_and_kill(servers.target, "async", fault.path, every=50)
    with connect(target(servers, PS1), timeout_s=20) as cluster:
        until(cluster, lambda run: len(steps_in(fault.path)) >= 3)
        # Two of them follow the journal of the third. Stopped first: those that die
        # last would make the task that is left a standby.
        pids = [servers.pid(task) for task in (PS, *WORKERS)]
        for each in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                os.kill(pid, each)
        assert servers.wait_for_tasks(30)
        assert cluster.runs() == []
        there = trainer(cluster, STRATEGIES["async"])
        with pytest.raises(ConfigError, match="does not have one run that goes on"):
            there.attach()
        check_it_goes_on_from(there, fault.path)
        there.close()
    fault.names += [PS, *WORKERS, "SIGKILL"]


@pytest.mark.row(30, 36)
@pytest.mark.chaos
@pytest.mark.parametrize("strategy", ["async", "sync", "replica", "sync log"])
def test_a_run_goes_on_whose_client_is_killed_while_a_ps_is_away(
    fault: Fault, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    servers = fault.cluster(ps=2, workers=2, restarts=6, env=records(fault))
    saved_in = fault.path if strategy in ("async", "sync") else None
    with connect(target(servers, WORKERS[1]), timeout_s=20) as cluster:
        with begun(servers.target, strategy, saved_in, every=50):
            saved = lambda run: saved_in is None or len(steps_in(saved_in)) >= 3
            before = until(cluster, saved).step
            servers.kill(PS)
        assert f"{PS} serves again" not in caplog.text
        until(cluster, lambda run: run.step >= before + 500)
        if saved_in is None:
            assert check_kept(cluster, strategy, before).lost == (PS,)
        else:
            there = trainer(cluster, STRATEGIES[strategy])
            run = there.attach()
            stop_once_all_take_part(run)
            wait_saved(cluster, str(saved_in), 30)
            (recovery,) = run.recoveries()
            assert recovery.lost == (PS,)
            back = saved_in / str(recovery.back_to)
            check_recovered(there, run, back, share_of(strategy))
            there.close()
    fault.names += [PS, "lost at step", "SIGKILL"]


@pytest.mark.row(17, 30)
@pytest.mark.chaos
@pytest.mark.parametrize("strategy", ["replica", "sync log"])
def test_a_run_without_its_client_goes_on_when_a_frozen_ps_is_killed(
    fault: Fault, strategy: str
) -> None:
    servers = fault.cluster(
        ps=2, workers=2, restarts=6, env=records(fault), frozen_s=1.5
    )
    begin_and_kill(servers.target, strategy)
    with connect(servers.target, timeout_s=20) as cluster:
        before = until(cluster, lambda run: True).step
        os.kill(servers.pid(PS1), signal.SIGSTOP)
        until(cluster, lambda run: run.step >= before + 500)
        assert check_kept(cluster, strategy, before).lost == (PS1,)
    fault.names += [f"{PS1} is frozen for", "SIGKILL", "goes on with the copies"]


@pytest.mark.row(8, 30)
@pytest.mark.chaos
@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_run_without_its_client_does_without_a_frozen_worker_until_it_wakes(
    fault: Fault, strategy: str
) -> None:
    """Nothing of the work that was given to the other one is applied then."""
    servers = fault.cluster(ps=2, workers=2)
    begin_and_kill(target(servers, PS), strategy)
    pid, back = servers.pid(WORKERS[1]), f"{WORKERS[1]} answers again and takes part"
    with connect(target(servers, PS), timeout_s=20) as cluster:
        os.kill(pid, signal.SIGSTOP)
        until_said(cluster, servers, f"{WORKERS[1]} was lost")
        os.kill(pid, signal.SIGCONT)
        until_said(cluster, servers, back)
        there = trainer(cluster, STRATEGIES[strategy])
        run = there.attach()
        stop_once_all_take_part(run)
        assert run.recoveries() == []
        check_all(there, run, lost=1)
        there.close()
    fault.names += [f"{WORKERS[1]} was lost", back]


@pytest.mark.row(4, 5, 6, 7)
@pytest.mark.chaos
@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_run_without_its_client_loses_nothing_over_connections_that_are_cut(
    fault: Fault, strategy: str
) -> None:
    """Also those over which its master hears and tells."""
    fault.is_noticed = False
    pairs = [(WORKERS[1], PS), (WORKERS[1], PS1), WORKERS, (PS, PS1)]
    links = [*pairs, *((there, here) for here, there in pairs)]
    chance = random.Random(0)
    with through_proxies(*links) as (servers, cut):
        begin_and_kill(servers.target(WORKERS[0]), strategy)
        with connect(servers.target(WORKERS[0]), timeout_s=20) as cluster:
            for _ in range(10):
                chance.choice(cut).cut()
                until_further(cluster, steps=20)
            there = trainer(cluster, STRATEGIES[strategy])
            run = there.attach()
            stop_once_all_take_part(run)
            assert run.recoveries() == []
            check_all(there, run, lost=0)
            assert run.repeated() == 0
            there.close()


@pytest.mark.row(21, 23)
@pytest.mark.chaos
@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_run_without_its_client_does_without_a_worker_that_does_not_reach_a_ps(
    fault: Fault, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No connection is closed; the worker is taken back once the link heals."""
    left_out, back = f"{WORKERS[1]} was lost", f"{WORKERS[1]} answers again"
    with through_proxies((WORKERS[1], PS1), (PS1, WORKERS[1])) as (servers, silent):
        begin_and_kill(servers.target(WORKERS[0]), strategy)
        with connect(servers.target(WORKERS[0]), timeout_s=20) as cluster:
            for link in silent:
                link.silence()
            until(cluster, lambda run: left_out in caplog.text)
            until_further(cluster)
            for link in silent:
                link.heal()
            until(cluster, lambda run: back in caplog.text)
            there = trainer(cluster, STRATEGIES[strategy])
            run = there.attach()
            stop_once_all_take_part(run)
            assert run.recoveries() == []
            check_all(there, run, lost=1)
            there.close()
    fault.names += [left_out, back]


@pytest.mark.row(24)
@pytest.mark.chaos
@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_run_without_its_client_loses_nobody_over_slow_links(
    fault: Fault, strategy: str
) -> None:
    fault.is_noticed = False
    tasks = (PS, PS1, *WORKERS)
    links = [(here, there) for here in tasks for there in tasks if here != there]
    with through_proxies(*links) as (servers, slow):
        begin_and_kill(servers.target(WORKERS[0]), strategy)
        with connect(servers.target(WORKERS[0]), timeout_s=20) as cluster:
            for link in slow:
                link.delay(0.3)
            until_further(cluster, steps=20)
            for link in slow:
                link.delay(0.0)
            there = trainer(cluster, STRATEGIES[strategy])
            run = there.attach()
            stop_once_all_take_part(run)
            check_all(there, run, lost=0)
            assert run.repeated() == 0
            there.close()


def until_said(cluster: Cluster, servers: LocalCluster, text: str) -> None:
    """Waits until the master has said something."""
    tasks = servers.tasks()  # any of them may be the master now
    until(cluster, lambda run: any(text in servers.logs(t, tail=1000) for t in tasks))


def target(servers: LocalCluster, task: str) -> str:
    """Returns where a client has a task for its master."""
    return servers.target.replace(servers.address, servers.spec.address(task))


def records(fault: Fault) -> dict[str, str]:
    """Returns where the ps of a run write their logs, which outlive its client."""
    return {RECORDS_DIR: str(fault.path)}


def share_of(strategy: str) -> int:
    """Returns how many batches an update is of."""
    return len(WORKERS) if strategy.startswith("sync") else 1


def check_kept(cluster: Cluster, strategy: str, before: int) -> Recovery:
    """Stops a run that went on from what was kept of a ps; no update is lost."""
    there = trainer(cluster, STRATEGIES[strategy])
    run = there.attach()
    stop_once_all_take_part(run)
    (recovery,) = run.recoveries()
    assert recovery.back_to >= before
    share = share_of(strategy)
    torn = 0 if share > 1 else 2 * len(WORKERS)
    check_recovered(there, run, None, share, torn)
    there.close()
    return recovery


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
