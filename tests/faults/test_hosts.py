"""Faults of hosts with addresses of their own."""

import os
import random
import sys
import threading
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from jgraph.errors import JGError
from jgraph.failpoints import VARIABLE
from jgraph.graph.device import TaskName
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.run.run import Run
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.elastic import Elastic
from jgraph.train.strategies.sync_runner import SyncPS
from tests.support.counting import (
    BATCH,
    IDS,
    Ledger,
    after,
    check_together,
    goes_on,
    trainer,
)
from tests.support.fault import Fault, Stopwatch
from tests.support.hosts import Host, cluster_on, hosts, lossy_hosts, why_no_hosts
from tests.support.links import NOTICED_S
from tests.support.stopping import once
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.procs, pytest.mark.chaos, pytest.mark.timeout(240)]

SEED = int(os.environ.get("CHAOS_SEED", random.randrange(10**6)))


@pytest.fixture(scope="module", autouse=True)
def are_there() -> None:
    """Before the faults: a test that is skipped has put none in."""
    if why := why_no_hosts():
        pytest.skip(why)


@pytest.mark.row(21, 23)
def test_a_cable_that_is_out_for_a_second_loses_nothing(
    fault: Fault, tmp_path: Path
) -> None:
    fault.is_noticed = False
    with hosts(2) as there, cluster_on(there, fault, tmp_path) as cluster:
        trained, ledger = trainer(cluster, AsyncPS()), Ledger()
        back = threading.Event()

        def plug() -> None:
            there[1].up()
            back.set()

        def pull() -> None:
            there[1].down()
            threading.Timer(1.0, plug).start()

        run = trained.fit(
            IDS,
            steps=10**6,
            batch_size=BATCH,
            callbacks=[after(100, pull), once(lambda run: back.is_set(), steps=500)],
            progress=False,
        )
        assert run.state == "stopped"
        ledger.add(run)
        assert ledger.check(trained) == 0
        assert set(run.metrics("loss")["replica"]) == {0, 1}
        trained.close()


@pytest.mark.row(21, 23)
def test_a_host_whose_cable_is_out_is_noticed_and_done_without(
    fault: Fault, tmp_path: Path
) -> None:
    with hosts(2) as there, cluster_on(there, fault, tmp_path) as cluster:
        trained, ledger = trainer(cluster, AsyncPS()), Ledger()
        back = threading.Event()

        def plug() -> None:
            there[1].up()
            back.set()

        def pull() -> None:
            fault.begins()
            there[1].down()
            threading.Timer(25.0, plug).start()

        def end(run: object, report: object) -> None:
            if back.is_set():
                run.stop()  # type: ignore[attr-defined]

        run = trained.fit(
            IDS,
            steps=10**6,
            batch_size=BATCH,
            checkpoint=Checkpoints(fault.path, every=100),
            callbacks=[after(200, pull, saved_in=fault.path), end],
            progress=False,
        )
        assert run.state == "stopped"  # by us
        assert fault.seconds_until("was lost") < NOTICED_S
        assert run.recoveries() == []  # the only ps is the master, and judges itself
        ledger.add(run)
        ledger.check(trained, lost=1)
        fault.names += ["/job:worker/task:1 was lost; the other workers go on"]
        trained.close()


class Silence:
    """Two hosts that do not reach each other for some seconds; others reach both."""

    def __init__(self, one: Host, other: Host, seconds: float) -> None:
        self._ways = (one, other), (other, one)
        self.is_over = threading.Event()
        for src, dst in self._ways:
            src.lose(dst)
        threading.Timer(seconds, self._heal).start()

    def _heal(self) -> None:
        for src, dst in self._ways:
            src.find(dst)
        self.is_over.set()


@pytest.mark.row(55)
@pytest.mark.parametrize(
    ("strategy", "silent_s", "at_rest"),
    [
        (AsyncPS, 5.0, False),
        (AsyncPS, 20.0, False),
        (AsyncPS, 20.0, True),
        (SyncPS, 5.0, True),
        (SyncPS, 20.0, True),
    ],
)
def test_a_silent_link_between_two_ps_costs_a_rescale_time_and_nothing_else(
    fault: Fault,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    strategy: Any,
    silent_s: float,
    at_rest: bool,
) -> None:
    """There is no checkpoint: to go back would end the run."""
    if at_rest:
        monkeypatch.setenv(VARIABLE, "rescale.rested=sleep:2@1")
    with hosts(4) as there, cluster_on(there, fault, tmp_path, ps=2) as cluster:
        trained, ledger = (
            trainer(cluster, strategy(elastic=Elastic(ps=(1, 2)))),
            Ledger(),
        )
        run = trained.fit(
            IDS, steps=10**6, batch_size=BATCH, block=False, progress=False
        )
        wait_until(lambda: run.steps >= 50)
        if at_rest:
            cluster.announce(TaskName("/job:ps/task:1"))
            stood = Stood(run)
            wait_until(stood)
        silence = Silence(there[0], there[1], silent_s)
        if not at_rest:
            cluster.announce(TaskName("/job:ps/task:1"))

        def has_moved() -> bool:
            with suppress(JGError):
                return [r.ps for r in cluster.runs() if r.state == "running"] == [1]
            return False

        wait_until(has_moved, 120)
        wait_until(silence.is_over.is_set)
        goes_on(run)
        assert run.recoveries() == []
        given_up = [rescale.why for rescale in run.rescales() if rescale.why]
        assert bool(given_up) == (silent_s > NOTICED_S - 6), given_up
        run.stop()
        run.wait(60)
        if strategy is SyncPS:
            check_together(trained, run)
        else:
            ledger.add(run)
            ledger.check(trained)
        trained.close()
    fault.names += ["stays as it is"] * bool(given_up)
    fault.is_noticed = bool(given_up)


class Stood:
    """Whether a run has done nothing for half a second: the master rests for two."""

    def __init__(self, run: Run) -> None:
        self._run, self._clock = run, Stopwatch()
        self._steps = run.steps

    def __call__(self) -> bool:
        if self._run.steps != self._steps:
            self._steps, self._clock = self._run.steps, Stopwatch()
        return self._clock.seconds > 0.5


@pytest.mark.row(24)
def test_hosts_that_are_slow_and_lose_packets_lose_nobody(
    fault: Fault, tmp_path: Path
) -> None:
    """Each packet comes 0.3 s later, and each twentieth never."""
    fault.is_noticed = False
    sys.stdout.write(f"CHAOS_SEED={SEED}\n")
    with ExitStack() as stack:
        there, network = stack.enter_context(lossy_hosts(3, SEED))
        cluster = stack.enter_context(cluster_on(there, fault, tmp_path))
        trained, ledger, clock = trainer(cluster, AsyncPS()), Ledger(), Stopwatch()
        ledger.add(trained.fit(IDS, steps=200, batch_size=BATCH, progress=False))
        at_best_s = clock.seconds / 200
        before = [host.tcp() for host in there]
        network.line.delay_s, network.line.loss = 0.3, 0.05
        clock = Stopwatch()

        def end(run: Run, report: object) -> None:
            if clock.seconds > 40.0:
                run.stop()

        run = trained.fit(
            IDS, steps=10**6, batch_size=BATCH, callbacks=[end], progress=False
        )
        steps, seconds = run.steps - 200, clock.seconds
        tcp = Counter[str]()
        for host, then in zip(there, before, strict=True):
            tcp.update(host.tcp())
            tcp.subtract(then)
        network.line.delay_s = network.line.loss = 0.0
        sys.stdout.write(f"{steps} steps in {seconds:.0f} s; {dict(tcp)}\n")
        assert run.state == "stopped"
        ledger.add(run)
        assert ledger.check(trained) == 0
        assert set(run.metrics("loss")["replica"]) == {0, 1}
        assert seconds / steps > at_best_s
        # TCP sends again what is lost; we hardly ever do, and never the more for it.
        assert 0.01 < tcp["RetransSegs"] / tcp["OutSegs"] < 0.5
        assert tcp["ActiveOpens"] <= 12
        assert tcp["OutSegs"] < 100 * steps
        trained.close()
