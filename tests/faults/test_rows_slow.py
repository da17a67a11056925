"""Faults by their row in docs/reliability.md: those that take long; `make chaos`."""

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from jgraph.client.cluster import connect
from jgraph.client.connection import unique
from jgraph.client.runs.runs import wait_saved
from jgraph.errors import FencedError
from jgraph.failpoints import CRASHED, ONCE, VARIABLE
from jgraph.launch.local.cluster import LocalCluster
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.runtime.files.step_files import steps_in
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.run.run import Run
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.counting import (
    BATCH,
    IDS,
    Ledger,
    after,
    check_it_goes_on_from,
    check_recovered,
    check_together,
    counted,
    gone_back_to,
    trainer,
)
from tests.support.detached_client import STRATEGIES
from tests.support.fault import Fault, Stopwatch
from tests.support.fit_forever import fit_and_kill, fitting
from tests.support.links import NOTICED_S, through_proxies
from tests.support.stopping import once_both_took_part

pytestmark = [pytest.mark.procs, pytest.mark.chaos, pytest.mark.timeout(300)]

PS, MASTER, WORKER = "/job:ps/task:1", "/job:worker/task:0", "/job:worker/task:1"


BOTH: Final = pytest.mark.parametrize(
    "strategy", [AsyncPS(), SyncPS()], ids=["async", "sync"]
)


@pytest.mark.row(12, 34, 35)
@BOTH
@pytest.mark.parametrize(
    ("master", "lost"),
    [(MASTER, (PS,)), (PS, (PS,)), (MASTER, (MASTER, PS))],
    ids=["ps", "master", "both"],
)
def test_a_run_goes_back_to_a_checkpoint_and_loses_no_batch(
    fault: Fault, strategy: Any, master: str, lost: tuple[str, ...]
) -> None:
    """Also if the ps is the master of the client, or dies with it."""
    servers = fault.cluster(ps=2, workers=2, restarts=3)
    clocks, newest, went_on = list[Stopwatch](), list[int](), list[float]()

    def kill(run: Any, report: Any) -> None:
        if clocks:
            if run.recoveries() and not went_on:
                went_on.append(clocks[0].seconds)
            if went_on and report.step >= newest[0] + 500:
                run.stop()
        elif report.step >= 200 and (saved := steps_in(fault.path)):
            newest.append(saved[-1])
            for task in lost:
                servers.kill(task)
            clocks.append(Stopwatch())

    target = servers.target.replace(servers.address, servers.spec.address(master))
    with connect(target, timeout_s=20) as cluster:
        there = trainer(cluster, strategy)
        run = there.fit(
            IDS,
            steps=10**6,
            batch_size=BATCH,
            checkpoint=Checkpoints(fault.path, every=50, keep=1000),
            callbacks=[kill],
            progress=False,
        )
        assert run.state == "stopped"
        assert went_on[0] < 30
        (recovery,) = run.recoveries()
        assert recovery.lost == (PS,)  # of a worker nothing has to come back
        assert recovery.back_to >= newest[0]
        share = 2 if isinstance(strategy, SyncPS) else 1
        check_recovered(there, run, gone_back_to(fault.path, run), share)
        there.close()
    fault.names += [*lost, "lost at step", "SIGKILL", "goes back to step"]


@pytest.mark.row(25)
@pytest.mark.parametrize("point", ["shard.written", "shard.on_disk"])
def test_a_ps_that_crashes_while_it_writes_its_shard_loses_no_saved_step(
    fault: Fault, tmp_path: Path, point: str
) -> None:
    once = tmp_path / "crashed"
    env = {VARIABLE: f"{point}=crash@3", ONCE: str(once)}
    cluster = fault.cluster(ps=2, workers=2, restarts=3, env=env)
    there = trainer(cluster, AsyncPS())
    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        checkpoint=Checkpoints(fault.path, every=500),
        callbacks=[fault.stop_after("the run goes on from")],
        progress=False,
    )
    assert run.state == "stopped"
    assert run.recoveries()
    check_recovered(there, run, gone_back_to(fault.path, run))
    fault.names += ["goes back to step", f"exit code {CRASHED}"]
    there.close()


@pytest.mark.row(9, 19)
@pytest.mark.parametrize("lost", [(MASTER,), (WORKER, MASTER)], ids=["19", "9"])
def test_lost_workers_are_back_in_the_same_run_also_of_a_new_master(
    fault: Fault, lost: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    cluster = fault.cluster(ps=2, workers=2, restarts=3)
    there, ledger, clock = trainer(cluster, AsyncPS()), Ledger(), Stopwatch()

    def kill() -> None:
        for task in lost:
            cluster.kill(task)

    def stop_when_all_are_back(run: Any, report: Any) -> None:
        said = [record.getMessage() for record in caplog.records]
        if all(any(f"{t} answers again" in line for line in said) for t in lost):
            run.stop()

    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        checkpoint=Checkpoints(fault.path, every=200),
        callbacks=[after(200, kill), stop_when_all_are_back],
        progress=False,
    )
    assert run.state == "stopped"
    assert clock.seconds < 60
    assert run.recoveries() == []
    ledger.add(run)
    ledger.check(there, lost=len(lost))
    stop = once_both_took_part(steps=run.steps + 100)
    run = there.fit(
        IDS, steps=10**6, batch_size=BATCH, callbacks=[stop], progress=False
    )
    assert set(run.metrics("loss")["replica"]) == {0, 1}
    ledger.add(run)
    ledger.check(there, lost=len(lost))
    fault.names += [f"{MASTER}, the master, was lost", f"{MASTER} answers again"]
    if WORKER in lost:
        fault.names += ["no worker is left; the run waits up to 300 s for one"]
    there.close()


@pytest.mark.row(20)
@BOTH
def test_a_master_that_was_frozen_and_replaced_changes_nothing_when_it_wakes(
    fault: Fault, monkeypatch: pytest.MonkeyPatch, strategy: Strategy
) -> None:
    """What it would order of that run is refused by the worker that is left."""
    names = list[str]()

    def named(what: str) -> str:
        names.append(unique(what))
        return names[-1]

    monkeypatch.setattr("jgraph.client.runs.submission.unique", named)
    cluster = fault.cluster(ps=2, workers=2)
    lost = f"{MASTER}, the master, was lost"
    there, _ = trained_without(cluster, strategy, MASTER, fault.stop_after(lost))
    assert cluster.master != MASTER
    old = cluster.spec.address(MASTER)
    order = pb.StopLoop(loop="any", task=WORKER, run=names[0], term=1)
    with pytest.raises(FencedError, match=f"master 1 of run '{names[0]}' came after"):
        cluster.call("Master.StopLoop", frame(stop_loop=order), to=old)
    fault.names += [lost]
    there.close()


@pytest.mark.row(8)
@BOTH
def test_a_frozen_worker_is_replaced_and_changes_nothing_when_it_wakes(
    fault: Fault, strategy: Strategy
) -> None:
    lost = f"{WORKER} was lost; the other workers go on"
    cluster = fault.cluster(ps=2, workers=2)
    there, ledger = trained_without(cluster, strategy, WORKER, fault.stop_after(lost))
    run = there.fit(IDS, steps=100, batch_size=BATCH, progress=False)
    assert run.state == "done"
    if isinstance(strategy, AsyncPS):
        check(there, run, ledger, strategy, lost=1)
    fault.names += [lost]
    there.close()


def check(
    there: Trainer, run: Run, ledger: Ledger, strategy: Strategy, lost: int = 0
) -> None:
    """Compares what a run says is done with what the parameters have counted."""
    if isinstance(strategy, SyncPS):
        check_together(there, run)
    else:
        ledger.add(run)
        assert ledger.check(there, lost) == 0 or lost


def trained_without(
    cluster: LocalCluster, strategy: Strategy, task: str, stop: Callable[..., None]
) -> tuple[Trainer, Ledger]:
    """Trains while a task freezes, and checks that it changes nothing when it wakes."""
    there, ledger, clock = trainer(cluster, strategy), Ledger(), Stopwatch()
    pid = cluster.pid(task)
    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=[after(100, lambda: os.kill(pid, signal.SIGSTOP)), stop],
        progress=False,
    )
    assert run.state == "stopped"
    assert clock.seconds < 60  # 15 s are those of keepalive
    check(there, run, ledger, strategy, lost=1)
    before = counted(there)
    os.kill(pid, signal.SIGCONT)
    assert cluster.wait_for_tasks(30)
    for _ in range(20):
        cluster.session().run(lambda x: x + 1, 1.0)
    assert [c.tolist() for c in counted(there)] == [c.tolist() for c in before]
    return there, ledger


@pytest.mark.row(17)
@BOTH
def test_a_frozen_ps_is_waited_for_and_writes_nothing_late(
    fault: Fault, strategy: Strategy
) -> None:
    cluster = fault.cluster(ps=2, workers=2)
    there, clock = trainer(cluster, strategy), Stopwatch()
    pid = cluster.pid(PS)

    def freeze() -> None:
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(25.0, os.kill, (pid, signal.SIGCONT)).start()

    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        checkpoint=Checkpoints(fault.path, every=50, keep=1000),
        callbacks=[
            after(200, freeze, saved_in=fault.path),
            fault.stop_after("the run goes on from"),
        ],
        progress=False,
    )
    assert run.state == "stopped"
    assert clock.seconds < 100
    share = 2 if isinstance(strategy, SyncPS) else 1
    check_recovered(there, run, gone_back_to(fault.path, run), share)
    assert run.recoveries()[0].lost == (PS,)
    fault.names += [f"{PS} was lost at step"]
    there.close()


@pytest.mark.row(21, 23)
@pytest.mark.parametrize("silent_s", [3.0, 40.0], ids=["3 s", "40 s"])
def test_a_link_that_falls_silent_is_noticed_and_done_without(
    fault: Fault, silent_s: float
) -> None:
    """One worker does not reach one ps; no connection is closed.

    There is no checkpoint: to go back would end the run.
    """
    with (
        through_proxies((WORKER, PS)) as (servers, (link,)),
        connect(servers.server(MASTER).target, timeout_s=20) as cluster,
    ):
        there, ledger = trainer(cluster, AsyncPS()), Ledger()
        healed = threading.Event()
        left_out = f"{WORKER} was lost; the other workers go on"

        def heal() -> None:
            link.heal()
            healed.set()

        def silence() -> None:
            fault.begins()
            link.silence()
            threading.Timer(silent_s, heal).start()

        def stop_then(run: Any, report: Any) -> None:
            if healed.is_set():
                run.stop()

        run = there.fit(
            IDS,
            steps=10**6,
            batch_size=BATCH,
            callbacks=[after(200, silence), stop_then],
            progress=False,
        )
        assert run.state == "stopped"
        assert run.recoveries() == []
        ledger.add(run)
        fault.is_noticed = silent_s > 5  # keepalive waits as long for an answer
        if fault.is_noticed:
            assert fault.seconds_until(left_out) < NOTICED_S
            fault.names += [left_out]
            ledger.check(there, lost=1)
        else:
            assert ledger.check(there) == 0
        there.close()


@pytest.mark.row(24)
@BOTH
def test_slow_links_lose_nobody(fault: Fault, strategy: Strategy) -> None:
    fault.is_noticed = False
    tasks = ("/job:ps/task:0", PS, MASTER, WORKER)
    links = [(a, b) for a in tasks for b in tasks if a != b]
    with (
        through_proxies(*links) as (servers, slow),
        connect(servers.server(MASTER).target, timeout_s=20) as cluster,
    ):
        there, ledger = trainer(cluster, strategy), Ledger()
        fit = partial(there.fit, IDS, batch_size=BATCH, progress=False)
        before = 100 if isinstance(strategy, AsyncPS) else 0
        if before:
            ledger.add(fit(steps=before))
        for link in slow:
            link.delay(0.3)
        run = fit(steps=40)
        assert (run.state, run.steps) == ("done", before + 40)
        check(there, run, ledger, strategy)
        if isinstance(strategy, AsyncPS):
            assert set(run.metrics("loss")["replica"]) == {0, 1}
        there.close()


@pytest.mark.row(30)
@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_client_that_was_away_for_longer_than_its_lease_finds_its_run_stopped(
    fault: Fault, strategy: str
) -> None:
    """And has all that the run did meanwhile."""
    cluster, clock = fault.cluster(ps=2, workers=2), Stopwatch()
    with fitting(cluster.target, fault.path, strategy, lease_s=1.0) as client:
        client.send_signal(signal.SIGSTOP)
        while cluster.runs()[0].state == "running":  # silent links end after 15 s
            assert clock.seconds < 60
        client.send_signal(signal.SIGCONT)
        assert client.stdout is not None
        state, steps = client.stdout.readline().split()
    (info,) = cluster.runs()
    assert (state, info.state) == ("stopped", "stopped")
    assert int(steps) == info.step == steps_in(fault.path)[-1]
    there = trainer(cluster, STRATEGIES[strategy])
    there.restore(fault.path)
    assert [round(c.sum() / BATCH) for c in counted(there)] == [info.step] * 2
    there.close()
    fault.names += ["[ended] run"]


@pytest.mark.row(30)
def test_a_killed_client_stops_its_run_and_another_goes_on_from_its_checkpoint(
    fault: Fault,
) -> None:
    cluster = fault.cluster(ps=2, workers=2)
    fit_and_kill(cluster.target, fault.path)

    def versions() -> list[int]:
        query = frame(variable_query=pb.VariableQuery())
        table = body_of(cluster.call("Master.Variables", query))
        return [row.version for row in table.variables]

    clock, last = Stopwatch(), None
    while (now := versions()) != last:
        last = now
        cluster.session().run(lambda x: x + 1, 1.0)
        assert clock.seconds < 15
    wait_saved(cluster, str(fault.path), 60)
    there = trainer(cluster, AsyncPS())
    check_it_goes_on_from(there, fault.path)
    fault.names += ["[ended] run"]
    there.close()
