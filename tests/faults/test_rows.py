"""Faults by their row in docs/reliability.md: those that take seconds."""

import os
import random
import signal
from typing import Any

import numpy as np
import psutil
import pytest

from jgraph.client.cluster import connect
from jgraph.graph.tracing.function import function
from jgraph.graph.variable import Variable
from jgraph.train.run.report import Report
from jgraph.train.run.run import Run
from jgraph.train.strategies.async_runner import AsyncPS
from tests.support.counting import BATCH, IDS, Ledger, after, trainer
from tests.support.fault import Fault, Stopwatch
from tests.support.links import CLIENT, through_proxies
from tests.support.stopping import once, once_both_took_part

pytestmark = pytest.mark.procs

PS0, PS = "/job:ps/task:0", "/job:ps/task:1"
MASTER, WORKER = "/job:worker/task:0", "/job:worker/task:1"


@pytest.mark.row(1, 2, 3)
@pytest.mark.parametrize("prefetch", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_killed_worker_loses_no_update_and_is_taken_back(
    fault: Fault, caplog: pytest.LogCaptureFixture, prefetch: int
) -> None:
    """Killed in the middle of its steps; at its old port it begins to count anew."""
    cluster = fault.cluster(ps=2, workers=2, restarts=3)
    there = trainer(cluster, AsyncPS(prefetch=prefetch))
    ledger, clock = Ledger(), Stopwatch()
    lost, back = (
        f"{WORKER} was lost; the other workers go on",
        f"{WORKER} answers again",
    )

    def kill() -> None:
        fault.begins()
        cluster.kill(WORKER)

    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=[after(100, kill), fault.stop_after(lost)],
        progress=False,
    )
    assert run.state == "stopped"
    assert fault.seconds_until(lost) < 12
    assert clock.seconds < 30
    ledger.add(run)
    ledger.check(there, lost=1, under_way=2 + prefetch)
    assert cluster.wait_for_tasks(30)
    at_work: list[int] = []

    def kill_again_and_stop_when_it_is_back(run: Run, report: Report) -> None:
        if not at_work:
            kill()
        elif sum(back in r.getMessage() for r in caplog.records) <= backs:
            return
        at_work.append(int(run.metrics("loss")["replica"].sum()))
        if at_work[-1] > at_work[min(1, len(at_work) - 1)]:
            run.stop()

    backs = sum(back in r.getMessage() for r in caplog.records)
    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=[kill_again_and_stop_when_it_is_back],
        progress=False,
    )
    assert run.state == "stopped"
    assert fault.seconds_until(lost) < 12
    assert fault.seconds_between(f"{WORKER} serves again", back) < 15
    assert run.recoveries() == []  # nothing was done again
    steps = run.metrics("loss")["step"]
    assert len(np.unique(steps)) == len(steps)
    assert WORKER in run.staleness()
    ledger.add(run)
    ledger.check(there, lost=2, under_way=2 + prefetch)
    stop = once_both_took_part(steps=run.steps + 100)
    run = there.fit(
        IDS, steps=10**6, batch_size=BATCH, callbacks=[stop], progress=False
    )
    assert set(run.metrics("loss")["replica"]) == {0, 1}
    ledger.add(run)
    ledger.check(there, lost=2, under_way=2 + prefetch)
    fault.names += [lost, back, "SIGKILL"]
    there.close()


@pytest.mark.row(19)
def test_a_run_whose_master_is_killed_goes_on_from_where_it_was(
    fault: Fault,
) -> None:
    """Without a checkpoint: the ps keep the state, and one of them is the master."""
    cluster = fault.cluster(ps=2, workers=2)
    there, ledger, clock = trainer(cluster, AsyncPS()), Ledger(), Stopwatch()
    new_master = "is the master from here on"

    def kill() -> None:
        fault.begins()
        cluster.kill(MASTER)

    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=[after(100, kill), fault.stop_after(new_master)],
        progress=False,
    )
    assert run.state == "stopped"
    assert fault.seconds_until(new_master) < 15
    assert clock.seconds < 30
    assert run.recoveries() == []
    assert cluster.master.startswith("/job:ps/")
    ledger.add(run)
    ledger.check(there, lost=1)
    loss = run.metrics("loss")
    assert len(np.unique(loss["step"])) == len(loss["step"])
    assert (np.diff(loss["seconds"]) >= 0).all()
    fault.names += [f"{MASTER}, the master, was lost", new_master]
    there.close()


@pytest.mark.row(29)
@pytest.mark.nightly
def test_a_worker_that_is_told_to_end_ends_and_the_others_go_on(
    fault: Fault,
) -> None:
    cluster = fault.cluster(ps=2, workers=2)
    there, ledger = trainer(cluster, AsyncPS()), Ledger()
    process = psutil.Process(cluster.pid(WORKER))
    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=[
            after(100, lambda: os.kill(process.pid, signal.SIGTERM)),
            once(lambda run: cluster._processes[WORKER].process.poll() is not None),
        ],
        progress=False,
    )
    assert run.state == "stopped"
    ledger.add(run)
    assert ledger.check(there) == 0  # it gave back what it had not done
    assert cluster._processes[WORKER].process.wait(30) == 0
    fault.names += [f"{WORKER} got SIGTERM and ends"]
    there.close()


@pytest.mark.row(4, 5, 7)
def test_connections_that_are_cut_lose_nothing_and_bring_nothing_twice(
    fault: Fault,
) -> None:
    """What was on its way, there or back, is sent again; no step knows of it."""
    fault.is_noticed = False
    links = [(WORKER, PS0), (PS0, WORKER), (WORKER, PS), (PS, WORKER)]
    links += [(CLIENT, MASTER), (MASTER, WORKER), (WORKER, MASTER)]
    chance, cuts = random.Random(0), [0]
    with (
        through_proxies(*links) as (servers, cut),
        connect(servers.target(MASTER), timeout_s=20) as cluster,
    ):
        there, ledger = trainer(cluster, AsyncPS()), Ledger()

        def cut_some(run: Any, report: Any) -> None:
            chance.choice(cut).cut()
            cuts[0] += 1
            if cuts[0] == 10:
                run.stop()

        run = there.fit(
            IDS,
            steps=10**6,
            batch_size=BATCH,
            callbacks=[cut_some],
            progress=False,
        )
        assert run.state == "stopped"
        assert cuts[0] >= 10
        ledger.add(run)
        assert ledger.check(there) == 0
        assert set(run.metrics("loss")["replica"]) == {0, 1}
        there.close()


@pytest.mark.row(4, 5, 6, 7)
def test_steps_of_a_session_are_made_once_over_a_line_that_is_cut(
    fault: Fault,
) -> None:
    fault.is_noticed = False
    chance = random.Random(0)
    with (
        through_proxies((CLIENT, MASTER)) as (servers, (link,)),
        connect(servers.target(MASTER), timeout_s=20) as cluster,
    ):
        count = Variable("count", np.zeros((), np.int32), device=PS)

        @function
        def step(x: Any) -> Any:
            count[...] = count[...] + 1
            return count[...] + 0 * x.sum().astype(np.int32)

        session = cluster.session()
        small, large = np.zeros(1, np.uint8), np.zeros(3 << 20, np.uint8)
        assert [session.run(step, x) for x in (small, large)] == [1, 2]  # compiled
        for done in range(60):
            if done % 6 == 3:
                link.cut_after(chance.randrange(1 << chance.randrange(1, 22)))
            clock = Stopwatch()
            assert session.run(step, large if done % 10 == 3 else small) == done + 3
            assert clock.seconds < 5  # resumed; no time limit was waited for
