"""Parameter servers join a run and leave it; tasks are killed while variables move."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from jgraph.client.runs.scaling import Scaler
from jgraph.clock import SystemClock
from jgraph.errors import JGError, RescaleError
from jgraph.failpoints import CRASHED, ONCE, POINTS, VARIABLE
from jgraph.graph.device import TaskName
from jgraph.launch.local.cluster import LocalCluster
from jgraph.runtime.files.step_files import our_steps
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.run.run import Run
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.elastic import Elastic
from jgraph.train.strategies.sync_runner import SyncPS
from tests.support import hash_counting
from tests.support.counting import (
    BATCH,
    IDS,
    Ledger,
    check_recovered,
    check_together,
    goes_on,
    gone_back_to,
    trainer,
)
from tests.support.fault import Fault
from tests.support.leaver import kill_the_leaver
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.procs, pytest.mark.timeout(180)]

ELASTIC = Elastic(ps=(1, 3))
AT: Final = [point for point in POINTS if point.startswith("rescale.")]
RESCALES: Final = 25
"""In a night, for each strategy; the simulation makes thousands."""
QUICK: Final = "rescale.moved"


def begun(
    cluster: LocalCluster, strategy: Any, saves: Checkpoints | None = None
) -> tuple[Any, Run]:
    """A run that goes on until it is stopped."""
    there = trainer(cluster, strategy)
    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        block=False,
        progress=False,
        checkpoint=saves,
    )
    wait_until(lambda: run.steps >= 20)
    return there, run


def lies_on(cluster: LocalCluster, ps: int) -> Callable[[], bool]:
    """Whether the variables of the run of a cluster lie on so many ps."""

    def found() -> bool:
        with suppress(JGError):  # the task that is asked may be the one that is lost
            return [r.ps for r in cluster.runs() if r.state == "running"] == [ps]
        return False

    return found


def is_past(clock: SystemClock, moment_s: float) -> bool:
    """Whether a moment is over."""
    return clock.now() > moment_s


def reached(cluster: LocalCluster, ps: int) -> bool:
    """Whether a cluster has so many ps, on which a run lies; asks for them again."""
    with suppress(JGError):
        if lies_on(cluster, ps)() and len(cluster.renewed_tasks("ps")) == ps:
            return True
        cluster.scale(ps=ps, timeout_s=20)
    return False


def checked(there: Any, run: Run, *, together: bool, lost: int = 0) -> None:
    """Stops a run, and checks that each batch was counted as it should be."""
    run.stop()
    run.wait(60)
    if together:
        check_together(there, run)
        return
    ledger = Ledger()
    ledger.add(run)
    ledger.check(there, lost=lost)


@pytest.mark.row(45)
@pytest.mark.parametrize(
    "strategy", [pytest.param(AsyncPS, marks=pytest.mark.nightly), SyncPS]
)
def test_parameter_servers_join_a_run_and_leave_it_and_no_update_is_lost(
    fault: Fault, strategy: Any
) -> None:
    fault.is_noticed = False
    cluster = fault.cluster(ps=1, workers=2, elastic=True)
    saves = Checkpoints(fault.path, every=10)
    there, run = begun(cluster, strategy(elastic=ELASTIC), saves)
    for ps in (3, "-1"):
        cluster.scale(ps=ps)
        goes_on(run)
    assert len(cluster.tasks("ps")) == 2
    checked(there, run, together=strategy is SyncPS)
    assert run.repeated() == 0
    there.close()


@pytest.mark.row(45, 46)
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", [AsyncPS, SyncPS])
def test_many_rescales_while_tasks_are_killed_lose_and_double_no_update(
    fault: Fault, strategy: Any
) -> None:
    """Workers, of which one is the master, and ps that join are killed at any time."""
    chance, kills, rescales = random.Random(strategy.__name__), 0, 0
    clock = SystemClock()
    cluster = fault.cluster(ps=1, workers=3, elastic=True, restarts=50)
    there, run = begun(cluster, strategy(elastic=ELASTIC))
    while rescales < RESCALES:
        now = len(cluster.tasks("ps"))
        ps = chance.choice([n for n in (1, 2, 3) if n != now])
        with suppress(JGError):  # the master was asked, and is gone
            cluster.scale(ps=ps, wait=False)
        if chance.random() < 0.5:
            moment_s = clock.now() + chance.uniform(0.0, 1.5)
            wait_until(partial(is_past, clock, moment_s))
            cluster.kill(f"/job:worker/task:{chance.randrange(3)}")
            kills += 1
        wait_until(partial(reached, cluster, ps), 120)
        goes_on(run, 5)
        rescales += 1
    assert run.recoveries() == []
    together = strategy is SyncPS
    checked(there, run, together=together, lost=0 if together else kills)
    fault.names += ["was lost"]
    there.close()


@pytest.mark.row(46)
@pytest.mark.parametrize(
    "point",
    [
        pytest.param(n, marks=pytest.mark.nightly if n == QUICK else pytest.mark.chaos)
        for n in AT
    ],
)
@pytest.mark.parametrize(
    "strategy", [SyncPS, pytest.param(AsyncPS, marks=pytest.mark.chaos)]
)
def test_a_master_that_dies_while_variables_move_costs_no_update(
    fault: Fault, tmp_path: Path, point: str, strategy: Any
) -> None:
    """There is no checkpoint: to go back would end the run."""
    once = tmp_path / "crashed"
    env = {VARIABLE: f"{point}=crash", ONCE: str(once)}
    cluster = fault.cluster(ps=1, workers=2, elastic=True, restarts=3, env=env)
    there, run = begun(cluster, strategy(elastic=ELASTIC))
    master = cluster.master
    with suppress(JGError):  # the master was asked, and is gone
        cluster.scale(ps=2, timeout_s=5)
    wait_until(once.exists, 30)
    wait_until(lies_on(cluster, 2), 60)
    goes_on(run)
    assert run.recoveries() == []
    checked(there, run, together=strategy is SyncPS, lost=1)
    fault.names += [f"exit code {CRASHED}", f"{master}, the master, was lost"]
    there.close()


@pytest.mark.row(46)
@pytest.mark.chaos
@pytest.mark.parametrize("strategy", [SyncPS, AsyncPS])
@pytest.mark.parametrize("point", ["rescale.rested", "rescale.copied"])
def test_a_ps_that_joins_and_dies_while_variables_move_changes_nothing(
    fault: Fault, point: str, strategy: Any
) -> None:
    env = {VARIABLE: f"{point}=sleep:3"}
    cluster = fault.cluster(ps=1, workers=2, elastic=True, env=env)
    there, run = begun(cluster, strategy(elastic=ELASTIC))
    cluster.scale(ps=2, wait=False)
    wait_until(lambda: len(cluster.renewed_tasks("ps")) == 2)
    clock, stood = SystemClock(), (run.steps, 0.0)

    def is_at_rest() -> bool:
        """Whether no step was done for a second: a rest takes three here."""
        nonlocal stood
        if run.steps != stood[0]:
            stood = run.steps, clock.now()
        return clock.now() - stood[1] > 1.0

    wait_until(is_at_rest, 30)
    cluster.kill("/job:ps/task:1")
    goes_on(run)
    assert lies_on(cluster, 1)()
    assert all(rescale.why for rescale in run.rescales())
    told = [event.text for event in cluster.events() if event.kind == "scaled"]
    assert "was not scaled from 1 to 2 ps: /job:ps/task:1" in told[0]
    checked(there, run, together=strategy is SyncPS)
    fault.names += ["stays as it is"]
    there.close()


@pytest.mark.row(46)
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(SyncPS, marks=pytest.mark.nightly),
        pytest.param(AsyncPS, marks=pytest.mark.chaos),
    ],
)
def test_a_ps_that_leaves_and_dies_first_is_lost_as_any_and_then_leaves(
    fault: Fault, strategy: Any
) -> None:
    """The run goes back to its checkpoint when the ps is there again, elsewhere."""
    env = {VARIABLE: "rescale.prepared=sleep:2@2"}
    cluster = fault.cluster(ps=1, workers=2, elastic=True, restarts=3, env=env)
    saves = Checkpoints(fault.path, every=10, keep=10**6)
    there, run = begun(cluster, strategy(elastic=ELASTIC), saves)
    cluster.scale(ps=2)
    wait_until(lambda: our_steps(fault.path))
    kill_the_leaver(cluster, 1)
    assert run.state == "running"
    assert [r.lost for r in run.recoveries()] == [("/job:ps/task:1",)]
    assert [r.ps for r in run.rescales() if not r.why] == [2, 1]
    told = [event.text for event in cluster.events() if event.kind == "scaled"]
    assert "is scaled from 1 to 2 ps: " in told[0]
    assert "is scaled from 2 to 1 ps: " in told[-1]
    assert cluster.tasks("ps") == ["/job:ps/task:0"]
    goes_on(run)
    run.stop()
    run.wait(60)
    back = gone_back_to(fault.path, run)
    check_recovered(there, run, back, share=2 if strategy is SyncPS else 1, torn=2)
    fault.names += ["/job:ps/task:1 was lost", "SIGKILL"]
    there.close()


@pytest.mark.row(54)
@pytest.mark.chaos
@pytest.mark.parametrize("point", [p for p in AT if p != "rescale.copied"])
@pytest.mark.parametrize("task", ["/job:worker/task:1", "/job:ps/task:0"])
def test_a_task_that_dies_at_each_point_of_a_rescale_is_lost_as_at_any_other_time(
    fault: Fault, task: str, point: str
) -> None:
    """A worker, or the ps whose variables move; the run goes on, or back, as ever."""
    env = {VARIABLE: f"{point}=sleep:1"}
    cluster = fault.cluster(ps=1, workers=2, elastic=True, restarts=3, env=env)
    saves = Checkpoints(fault.path, every=10, keep=10**6)
    there, run = begun(cluster, SyncPS(elastic=ELASTIC), saves)
    wait_until(lambda: our_steps(fault.path))
    with suppress(JGError):  # a task is lost that it asks
        cluster.scale(ps=2, wait=False)
    wait_until(lambda: len(cluster.renewed_tasks("ps")) == 2)
    cluster.kill(task)
    wait_until(lies_on(cluster, 2), 60)
    goes_on(run)
    assert run.state == "running"
    lost = {one for recovery in run.recoveries() for one in recovery.lost}
    assert lost <= {task}
    run.stop()
    run.wait(60)
    back = gone_back_to(fault.path, run)
    check_recovered(there, run, back, share=2, torn=2)
    fault.names += ["SIGKILL"]
    there.close()


@pytest.mark.nightly
@pytest.mark.row(57)
def test_who_asked_for_more_ps_is_told_that_there_are_to_be_fewer_since(
    fault: Fault,
) -> None:
    """The newest number counts; and nobody waits for the one before."""
    fault.is_noticed = False
    env = {VARIABLE: "rescale.prepared=sleep:3"}
    cluster = fault.cluster(ps=1, workers=2, elastic=True, env=env)
    there, run = begun(cluster, AsyncPS(elastic=ELASTIC))
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(cluster.scale, ps=2)
        wait_until(lambda: len(cluster.renewed_tasks("ps")) == 2)
        assert cluster.scale(ps=1) == ["/job:ps/task:0"]
        with pytest.raises(RescaleError, match=r"asked for 2 .*, and for 1 since"):
            asked.result(30)
    goes_on(run)
    checked(there, run, together=False)
    there.close()


@pytest.mark.row(46)
@pytest.mark.parametrize(
    "restarts",
    [
        pytest.param(0, marks=pytest.mark.nightly),
        pytest.param(3, marks=pytest.mark.chaos),
    ],
)
def test_a_ps_that_leaves_and_dies_when_nothing_is_on_it_has_left(
    fault: Fault, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    """Nothing is lost: the scaling succeeds, and its next process leaves as well."""
    cluster = fault.cluster(ps=1, workers=2, elastic=True, restarts=restarts)
    there, run = begun(cluster, SyncPS(elastic=ELASTIC))
    cluster.scale(ps=2)
    looks, killed = Scaler._left_over, list[str]()

    def look(scaler: Scaler, task: TaskName, *moves: Any, copies: bool = False) -> Any:
        if copies and not killed:  # after all has moved, before it is told to end
            killed.append(task)
            cluster.kill(task)
        return looks(scaler, task, *moves, copies=copies)

    monkeypatch.setattr(Scaler, "_left_over", look)
    assert cluster.scale(ps=1) == ["/job:ps/task:0"]
    assert killed == ["/job:ps/task:1"]
    goes_on(run)
    assert run.recoveries() == []
    assert cluster.renewed_tasks("ps") == ["/job:ps/task:0"]
    checked(there, run, together=True)
    fault.is_noticed = bool(restarts)
    fault.names += ["SIGKILL"] * bool(restarts)
    there.close()


@pytest.mark.row(45, 46)
@pytest.mark.parametrize(
    "point",
    [
        pytest.param(n, marks=pytest.mark.nightly if n == QUICK else pytest.mark.chaos)
        for n in AT
    ],
)
def test_a_master_that_dies_while_a_hash_table_moves_costs_no_update(
    fault: Fault, tmp_path: Path, point: str
) -> None:
    once = tmp_path / "crashed"
    env = {VARIABLE: f"{point}=crash", ONCE: str(once)}
    cluster = fault.cluster(ps=1, workers=2, elastic=True, restarts=3, env=env)
    there = hash_counting.trainer(
        cluster, SyncPS(elastic=Elastic(ps=(1, 2), workers=(1, 2)))
    )
    how: Any = {"block": False, "progress": False, "batch_size": hash_counting.BATCH}
    run = there.fit(hash_counting.DATA, steps=10**6, **how)
    wait_until(lambda: run.steps >= 20)
    master = cluster.master
    with suppress(JGError):  # the master was asked, and is gone
        cluster.scale(ps=2, timeout_s=5)
    wait_until(once.exists, 30)
    wait_until(lies_on(cluster, 2), 60)
    goes_on(run)
    assert run.recoveries() == []
    assert {event.task for event in run.events()} == set(cluster.renewed_tasks("ps"))
    run.stop()
    run.wait(60)
    hash_counting.check_counts(there, run, together=True)
    fault.names += [f"exit code {CRASHED}", f"{master}, the master, was lost"]
    there.close()
