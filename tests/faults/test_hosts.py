"""Faults of hosts with addresses of their own."""

import os
import random
import sys
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.run.run import Run
from jgraph.train.strategies.async_runner import AsyncPS
from tests.support.counting import BATCH, IDS, Ledger, after, trainer
from tests.support.fault import Fault, Stopwatch
from tests.support.hosts import cluster_on, hosts, lossy_hosts
from tests.support.links import NOTICED_S
from tests.support.stopping import once

pytestmark = [pytest.mark.procs, pytest.mark.chaos, pytest.mark.timeout(240)]

SEED = int(os.environ.get("CHAOS_SEED", random.randrange(10**6)))


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
