"""Faults of links alone, which a run outlives without going back; `make chaos`."""

import threading
from typing import Any

import numpy as np
import pytest

from jgraph.client.cluster import connect
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.sync_runner import SyncPS
from tests.support.counting import BATCH, IDS, Ledger, after, check_together, trainer
from tests.support.fault import Fault, Stopwatch
from tests.support.links import NOTICED_S, through_proxies
from tests.support.stopping import both_took_part, once

pytestmark = [pytest.mark.procs, pytest.mark.chaos, pytest.mark.timeout(300)]

PS, MASTER, WORKER = "/job:ps/task:1", "/job:worker/task:0", "/job:worker/task:1"
ALL = ("/job:ps/task:0", PS, MASTER, WORKER)
CHIEF = "/job:chief/task:0"
"""A master of its own."""
BACK = ("the loop goes on", "answers again")
GOES_ON = (*BACK, " began: ")


class Silence:
    """Links that are silent for some seconds, from when it is called.

    Attributes:
      since: when it began; None: it has not.
    """

    def __init__(
        self, fault: Fault, caplog: pytest.LogCaptureFixture, links: Any, seconds: float
    ) -> None:
        self.since: Stopwatch | None = None
        self.seconds = seconds
        self._fault, self._caplog, self._links = fault, caplog, links
        self._before: int | None = None  # so many lines

    def __call__(self) -> None:
        self.since = Stopwatch()
        for link in self._links:
            link.silence()
        threading.Timer(self.seconds, self._heal).start()

    def _heal(self) -> None:
        self._before = len(self._caplog.records)
        self._fault.begins()
        for link in self._links:
            link.heal()

    def said(self, *, since: bool) -> list[str]:
        """Returns what was said until, or since, the links healed."""
        lines = [record.getMessage() for record in self._caplog.records]
        split = len(lines) if self._before is None else self._before
        return lines[split:] if since else lines[:split]

    def is_too_long(self) -> bool:
        """Whether nothing went on for a minute; the run is not waited for then."""
        return self.since is not None and self.since.seconds > self.seconds + 60

    def check_that_loops_went_on(self) -> None:
        """Within seconds."""
        # A connection may end just as the link heals; the loops then begin anew.
        limit_s = 15 if "gave it up" in self._caplog.text else 5
        assert self._fault.seconds_until(*GOES_ON) < limit_s


def links_of_chief(tasks: tuple[str, ...]) -> list[tuple[str, str]]:
    """Returns them, there and back."""
    return [(CHIEF, task) for task in tasks] + [(task, CHIEF) for task in tasks]


def contributions_after(run: Any, pause_s: float) -> Any:
    """Returns those of updates after the first pause of so many seconds."""
    pauses = np.diff(run.metrics("loss")["seconds"]) > pause_s
    first = pauses.argmax() if pauses.any() else len(pauses)
    return run.metrics("contributions")["value"][first + 1 :]


@pytest.mark.row(21)
@pytest.mark.parametrize("strategy", [AsyncPS(), SyncPS()], ids=["async", "sync"])
def test_a_worker_that_does_not_reach_one_ps_is_left_out_until_it_does(
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


@pytest.mark.row(22)
@pytest.mark.parametrize(
    ("silent_s", "detached", "tasks"),
    [
        pytest.param(9.0, False, ALL, id="9 s"),
        pytest.param(30.0, False, ALL, id="30 s"),
        pytest.param(30.0, True, ALL, id="detached"),
        pytest.param(30.0, True, ALL[:1], id="detached, the arbiter alone"),
    ],
)
def test_a_synchronous_run_pauses_without_its_master_and_goes_on_when_it_heals(
    fault: Fault,
    caplog: pytest.LogCaptureFixture,
    silent_s: float,
    detached: bool,
    tasks: tuple[str, ...],
) -> None:
    """There is no checkpoint to go back to."""
    with (
        through_proxies(*links_of_chief(tasks), chief=True) as (servers, cut_off),
        connect(servers.target(CHIEF), timeout_s=20) as cluster,
    ):
        there = trainer(cluster, SyncPS())
        silence = Silence(fault, caplog, cut_off, silent_s)

        def stop_when_both_are_there_again(run: Any, report: Any) -> None:
            since = contributions_after(run, pause_s=silent_s - 6.5)
            both = len(since) >= 50 and (since[-50:] == 2).all()
            if both or silence.is_too_long():
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
        assert silence.since is not None
        assert silent_s < silence.since.seconds < silent_s + 25
        silence.check_that_loops_went_on()
        assert cluster.master == CHIEF
        check_together(there, run)
        paused = "the master does not answer; the loop pauses"
        assert paused in silence.said(since=False)
        fault.names += [paused]
        # Nothing was decided from the pause until the link was whole.
        assert len(contributions_after(run, pause_s=silent_s - 6.5))
        there.close()


@pytest.mark.row(22)
@pytest.mark.parametrize(
    ("silent_s", "detached"),
    [(9.0, False), (30.0, False), (30.0, True)],
    ids=["9 s", "30 s", "detached"],
)
def test_workers_pause_without_their_master_and_go_on_when_the_link_heals(
    fault: Fault, caplog: pytest.LogCaptureFixture, silent_s: float, detached: bool
) -> None:
    """In 5 to 15 s its connections end as well."""
    with (
        through_proxies(*links_of_chief(ALL), chief=True) as (servers, cut_off),
        connect(servers.target(CHIEF), timeout_s=20) as cluster,
    ):
        there, ledger = trainer(cluster, AsyncPS()), Ledger()
        silence = Silence(fault, caplog, cut_off, silent_s)

        def falls_silent(run: Any, report: Any) -> None:
            if silence.since is None and both_took_part(run, 200):
                silence()

        def both_are_back(run: Any) -> bool:
            lines = silence.said(since=True)
            back = [line for line in lines if any(text in line for text in BACK)]
            return len(back) >= 2 or silence.is_too_long()

        run = there.fit(
            IDS,
            steps=10**6,
            batch_size=BATCH,
            callbacks=[falls_silent, once(both_are_back)],
            detached=detached,
            progress=False,
        )
        assert run.state == "stopped"
        assert silence.since is not None
        assert silent_s < silence.since.seconds < silent_s + 60
        silence.check_that_loops_went_on()
        assert cluster.master == CHIEF
        ledger.add(run)
        said = silence.said(since=False) + silence.said(since=True)
        lost = sum(f"{task} was lost" in line for task in ALL for line in said)
        again = ledger.check(there, lost)
        if not lost:
            assert again == 0
            fault.names += ["the loop pauses", "the loop goes on"]
        else:
            fault.names += ["was lost"]
        if lost and silent_s > 15:
            fault.names += ["no worker is left", f"{WORKER} answers again"]
        there.close()
