"""Faults of links alone, which a run outlives without going back; `make chaos`."""

import threading
from typing import Any

import numpy as np
import pytest

from jgraph.cluster.client import connect
from jgraph.train.async_ps import AsyncPS
from jgraph.train.sync_ps import SyncPS
from tests.faults.conftest import Fault, Stopwatch
from tests.faults.counting import BATCH, IDS, Ledger, after, check_together, trainer
from tests.faults.links import NOTICED_S, through_proxies

pytestmark = [pytest.mark.procs, pytest.mark.chaos, pytest.mark.timeout(300)]

PS, MASTER, WORKER = "/job:ps/task:1", "/job:worker/task:0", "/job:worker/task:1"
ALL = ("/job:ps/task:0", PS, MASTER, WORKER)


def contributions_after(run: Any, pause_s: float) -> Any:
    """Returns those of updates after the first pause of so many seconds."""
    pauses = np.diff(run.metrics("loss")["seconds"]) > pause_s
    first = pauses.argmax() if pauses.any() else len(pauses)
    return run.metrics("contributions")["value"][first + 1 :]


@pytest.mark.parametrize("strategy", [AsyncPS(), SyncPS()], ids=["async", "sync"])
def test_row_21_a_worker_that_does_not_reach_one_ps_is_left_out_until_it_does(
    fault: Fault, caplog: pytest.LogCaptureFixture, strategy: Any
) -> None:
    """There is no checkpoint: to go back would end the run."""
    with (
        through_proxies((WORKER, PS), (PS, WORKER)) as (servers, cut_off),
        connect(servers.server(MASTER).target, timeout_s=20) as cluster,
    ):
        there, ledger = trainer(cluster, strategy), Ledger()
        clocks: list[Stopwatch] = []
        left_out = f"{WORKER} was lost; the other workers go on"

        def heal() -> None:
            for link in cut_off:
                link.heal()

        def silence() -> None:
            clocks.append(Stopwatch())
            fault.begins()
            for link in cut_off:
                link.silence()
            threading.Timer(30.0, heal).start()

        def stop_when_it_is_back(run: Any, report: Any) -> None:
            said = [record.getMessage() for record in caplog.records]
            if any(f"{WORKER} answers again" in line for line in said):
                assert clocks[0].seconds > 30
                run.stop()

        run = there.fit(
            IDS,
            steps=10**6,
            batch_size=BATCH,
            callbacks=[after(200, silence), stop_when_it_is_back],
            progress=False,
        )
        assert run.state == "stopped"
        assert run.recoveries() == []
        assert fault.seconds_until(left_out) < NOTICED_S
        assert clocks[0].seconds < 60
        if isinstance(strategy, SyncPS):
            check_together(there, run)
        else:
            ledger.add(run)
            ledger.check(there, lost=1)
        fault.names += [left_out, f"{WORKER} answers again"]
        there.close()


@pytest.mark.parametrize(
    ("silent_s", "detached", "tasks"),
    [
        pytest.param(9.0, False, ALL, id="9 s"),
        pytest.param(30.0, False, ALL, id="30 s"),
        pytest.param(30.0, True, ALL, id="detached"),
        pytest.param(30.0, True, ALL[:1], id="detached, who decides alone"),
    ],
)
def test_row_22_a_synchronous_run_pauses_without_its_master_and_goes_on_when_it_heals(
    fault: Fault,
    caplog: pytest.LogCaptureFixture,
    silent_s: float,
    detached: bool,
    tasks: tuple[str, ...],
) -> None:
    """A master of its own reaches nobody. There is no checkpoint to go back to."""
    master = "/job:chief/task:0"
    links = [(master, task) for task in tasks] + [(task, master) for task in tasks]
    with (
        through_proxies(*links, chief=True) as (servers, cut_off),
        connect(servers.target(master), timeout_s=20) as cluster,
    ):
        there = trainer(cluster, SyncPS())
        clocks: list[Stopwatch] = []
        healed: list[int] = []

        def heal() -> None:
            healed.append(len(caplog.records))
            fault.begins()
            for link in cut_off:
                link.heal()

        def silence() -> None:
            clocks.append(Stopwatch())
            for link in cut_off:
                link.silence()
            threading.Timer(silent_s, heal).start()

        def stop_when_both_are_there_again(run: Any, report: Any) -> None:
            since = contributions_after(run, pause_s=silent_s - 6.5)
            both = len(since) >= 50 and (since[-50:] == 2).all()
            if both or (clocks and clocks[0].seconds > silent_s + 60):
                run.stop()

        run = there.fit(
            IDS,
            steps=10**6,
            batch_size=BATCH,
            callbacks=[after(200, silence), stop_when_both_are_there_again],
            progress=False,
            detached=detached,
        )
        assert run.state == "stopped"
        assert run.recoveries() == []
        assert silent_s < clocks[0].seconds < silent_s + 25
        # A connection may end just as the link heals; the loops then begin anew.
        limit_s = 15 if "gave it up" in caplog.text else 5
        goes_on = "the loop goes on", "answers again", " began: "
        assert fault.seconds_until(*goes_on) < limit_s
        assert cluster.master == master
        check_together(there, run)
        said = [r.getMessage() for r in caplog.records]
        paused = said.index("no answer of the master: the loop pauses")
        assert paused < healed[0]
        fault.names += ["no answer of the master: the loop pauses"]
        # Nothing was decided from the pause until the link was whole.
        assert len(contributions_after(run, pause_s=silent_s - 6.5))
        there.close()
