"""Workers join a run that goes on, and leave it; those that fail disturb nobody."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgraph.coordination.liveness.members import LEASE_S
from jgraph.coordination.liveness.restarts import REPLACED
from jgraph.errors import JGError, RescaleError
from jgraph.failpoints import CRASHED, VARIABLE
from jgraph.graph.device import TaskName
from jgraph.launch.local.cluster import LocalCluster
from jgraph.rpc.security.token import TOKEN_FILE
from jgraph.train.data.source import Source
from jgraph.train.run.run import Run
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.elastic import Elastic
from jgraph.train.strategies.sync_runner import SyncPS
from tests.support.counting import BATCH, IDS, Ledger, check_together, goes_on, trainer
from tests.support.fault import Fault
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.procs, pytest.mark.timeout(150)]

WORKERS = [TaskName(f"/job:worker/task:{n}") for n in range(4)]
ELASTIC = Elastic(workers=(1, 8))


@contextmanager
def joining(cluster: LocalCluster, log: Path, **env: str) -> Iterator[Any]:
    """A process of its own that joins a cluster; it is killed at the end."""
    words = ["--job", "worker", "--join", cluster.target, "--end-with-input"]
    environment = {**os.environ, **env, TOKEN_FILE: str(cluster._token_file)}
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "jgraph", "server", *words],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            env={"JAX_PLATFORMS": "cpu", **environment},
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def begun(cluster: LocalCluster, strategy: Any, data: Any = IDS) -> tuple[Any, Run]:
    """A run that goes on until it is stopped."""
    there = trainer(cluster, strategy)
    run = there.fit(
        data, steps=10**6, batch_size=BATCH, block=False, progress=False, callbacks=()
    )
    wait_until(lambda: run.steps >= 20)
    return there, run


def taking_part(run: Run) -> set[str]:
    return {one.task for one in run.members() if one.state == "takes part"}


def checked(there: Any, run: Run, *, together: bool, lost: int = 0) -> None:
    """Stops a run, and checks that each batch was counted as it should be."""
    run.stop()
    run.wait(60)
    if together:
        check_together(there, run)
    else:
        ledger = Ledger()
        ledger.add(run)
        ledger.check(there, lost=lost)
    there.close()


@pytest.mark.nightly
@pytest.mark.row(9)
def test_an_elastic_run_without_a_worker_waits_for_one_that_joins(fault: Fault) -> None:
    """Also where nothing starts the lost one again, which the others are told."""
    cluster = fault.cluster(ps=1, workers=1, elastic=True)
    there, run = begun(cluster, AsyncPS(elastic=ELASTIC))
    cluster.kill(WORKERS[0])

    def waits() -> bool:
        with suppress(JGError):  # the master was asked, and is gone
            return "0 of 1 workers that it needs, and waits" in cluster.explain()
        return False

    wait_until(waits)
    with pytest.raises(RescaleError, match=r"nothing starts it again; start it with"):
        cluster.scale(workers=2)
    goes_on(run)
    assert taking_part(run) == {WORKERS[1]}
    checked(there, run, together=False, lost=1)
    fault.names += ["no worker is left"]


@pytest.mark.row(42)
@pytest.mark.parametrize(
    "together",
    [pytest.param(False, marks=pytest.mark.nightly), True],
    ids=["async", "sync"],
)
def test_workers_join_a_run_and_leave_it_and_no_batch_is_lost_or_comes_twice(
    fault: Fault, together: bool
) -> None:
    cluster = fault.cluster(ps=1, workers=1, elastic=True)
    kind = SyncPS if together else AsyncPS
    there, run = begun(cluster, kind(elastic=ELASTIC))
    assert cluster.scale(workers=3) == WORKERS[:3]
    goes_on(run)
    assert taking_part(run) == set(WORKERS[:3])
    assert cluster.scale(workers="-1") == WORKERS[:2]
    goes_on(run)
    states = {member.task: member.state for member in run.members()}
    assert [states[task] for task in WORKERS[:3]] == [*2 * ["takes part"], "left"]
    if together:
        counts = run.metrics("contributions")["value"]
        assert set(counts) == {1, 2, 3}
    else:
        assert set(run.metrics("loss")["replica"]) == {0, 1, 2}
    kinds = [(e.kind, e.subject) for e in cluster.events()]
    assert ("joined", WORKERS[2]) in kinds
    assert ("left", WORKERS[2]) in kinds
    checked(there, run, together=together)
    assert run.repeated() == 0
    fault.names += [f"{WORKERS[2]} {what} the cluster" for what in ("joined", "left")]


@pytest.mark.row(39)
@pytest.mark.parametrize(
    ("kind", "others"),
    [
        pytest.param(AsyncPS, IDS[:40], id="fewer"),
        pytest.param(
            *(SyncPS, IDS.astype(np.float32)),
            id="another type",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_worker_whose_data_is_not_that_of_the_run_has_no_part_in_it_until_it_is(
    fault: Fault, tmp_path: Path, kind: Any, others: Any
) -> None:
    cluster = fault.cluster(ps=1, workers=1, elastic=True)
    file, other = tmp_path / "ids.npz", tmp_path / "other.npz"
    np.savez(file, id=IDS)
    there, run = begun(cluster, kind(elastic=ELASTIC), Source.npz(str(file)))
    np.savez(other, id=others)
    other.replace(file)
    with pytest.raises(
        RescaleError, match=rf"{WORKERS[1]} has no part.* make the files"
    ):
        cluster.scale(workers=2)
    goes_on(run, 100)
    assert taking_part(run) == {WORKERS[0]}
    refused = [e for e in cluster.events() if e.kind == "refused"]
    assert [event.subject for event in refused] == [WORKERS[1]]
    np.savez(other, id=IDS)
    other.replace(file)
    wait_until(lambda: WORKERS[1] in taking_part(run), 60)
    goes_on(run)
    checked(there, run, together=kind is SyncPS)
    fault.names += [f"{WORKERS[1]} has no part in run"]


STATES = (
    "member.invited=crash",
    "member.serves=crash",
    "program.received=crash",
    "program.received=sleep:600",
    "order.received=crash",
)
"""It has an index; it serves; it is prepared, and dies or hangs; its loop begins."""


@pytest.mark.row(38)
@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("together", [False, True], ids=["async", "sync"])
def test_a_worker_that_dies_or_hangs_as_it_joins_disturbs_nobody(
    fault: Fault, together: bool
) -> None:
    cluster = fault.cluster(ps=1, workers=1, elastic=True)
    kind = SyncPS if together else AsyncPS
    there, run = begun(cluster, kind(elastic=ELASTIC))
    for number, point in enumerate(STATES):
        log = fault.logs / f"joiner-{number}.log"
        with joining(cluster, log, **{VARIABLE: point}) as process:
            if point.endswith("crash"):
                process.wait(120)
                assert process.returncode == CRASHED
            else:
                wait_until(lambda: len(cluster.renewed_tasks("worker")) > 1, 60)
            goes_on(run, 100)
        assert WORKERS[0] in taking_part(run)
        assert run.state == "running"
    assert run.recoveries() == []
    assert {member.state for member in run.members()[:1]} == {"takes part"}
    wait_until(lambda: cluster.renewed_tasks("worker") == WORKERS[:1])
    workers = cluster.scale(workers=2)  # and a good one is taken
    goes_on(run)
    assert taking_part(run) == set(workers)
    checked(there, run, together=together, lost=1)
    fault.names += [f"{workers[1]} joined the cluster"]


@pytest.mark.row(41)
@pytest.mark.chaos
@pytest.mark.timeout(240)
def test_a_process_that_was_frozen_while_another_got_its_index_ends_when_woken(
    fault: Fault,
) -> None:
    cluster = fault.cluster(ps=1, workers=1, elastic=True)
    there, run = begun(cluster, AsyncPS(elastic=ELASTIC))
    fault.logs.mkdir(exist_ok=True)
    with joining(cluster, fault.logs / "first.log") as old:
        wait_until(lambda: WORKERS[1] in taking_part(run))
        os.kill(old.pid, signal.SIGSTOP)
        fault.begins()
        gone = lambda: WORKERS[1] not in cluster.renewed_tasks("worker")
        wait_until(gone, LEASE_S + 30)
        with joining(cluster, fault.logs / "second.log"):
            wait_until(lambda: WORKERS[1] in cluster.renewed_tasks("worker"), 60)
            wait_until(lambda: WORKERS[1] in taking_part(run), 60)
            os.kill(old.pid, signal.SIGCONT)
            assert old.wait(30) == REPLACED
            goes_on(run)
            assert WORKERS[1] in taking_part(run)
            checked(there, run, together=False, lost=1)
    fault.names += ["no member of its cluster any more"]
