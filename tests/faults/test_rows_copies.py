"""Faults by their row in docs/reliability.md: with copies of what each ps holds."""

import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import optax
import psutil
import pytest

from jgraph.coordination.liveness.freezes import FROZEN_S
from jgraph.errors import CopyLostError
from jgraph.failpoints import CRASHED, ONCE, VARIABLE
from jgraph.launch.local.cluster import LocalCluster
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.state.durability import Durability
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.counting import (
    BATCH,
    IDS,
    Ledger,
    after,
    check_recovered,
    gone_back_to,
    trainer,
)
from tests.support.fault import Fault, Stopwatch
from tests.support.hash_eviction import (
    BATCH as ROW_BATCH,
    Counts as Table,
    check_rows,
    examples,
    loss as table_loss,
    options,
)

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120)]

FIRST, PS = "/job:ps/task:0", "/job:ps/task:1"
REPLICA = AsyncPS(durability="replica")
GOES_ON = "the run goes on from"


@pytest.mark.row(13)
@pytest.mark.parametrize("prefetch", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_killed_ps_with_a_replica_loses_no_update(
    fault: Fault, prefetch: int
) -> None:
    cluster = fault.cluster(ps=2, workers=2, restarts=3)
    strategy = AsyncPS(durability="replica", prefetch=prefetch)
    there, ledger, under_way = trainer(cluster, strategy), Ledger(), 2 + prefetch
    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=[
            after(200, partial(kill, fault, cluster, PS)),
            fault.stop_after(GOES_ON),
        ],
        progress=False,
    )
    assert run.state == "stopped"
    check_times(fault, 10, PS)
    (recovery,) = run.recoveries()
    assert recovery.lost == (PS,)
    # Told of when they were computed, never acknowledged.
    assert recovery.again <= 2 * under_way
    ledger.add(run)
    # Both workers lost what they were about to tell.
    ledger.check(there, lost=2, under_way=under_way)
    fault.names += [PS, "goes on with the copies", "SIGKILL"]
    there.close()


@pytest.mark.row(13)
@pytest.mark.chaos
@pytest.mark.parametrize("ps", [FIRST, PS])
def test_a_killed_ps_with_a_replica_costs_no_step_of_synchronous_training(
    fault: Fault, ps: str
) -> None:
    cluster = fault.cluster(ps=2, workers=2, restarts=3)
    there = trainer(cluster, SyncPS(durability="replica", gradient_dtype="int8"))
    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=[
            after(200, partial(kill, fault, cluster, ps)),
            fault.stop_after(GOES_ON),
        ],
        progress=False,
    )
    assert run.state == "stopped"
    check_times(fault, 10, ps)
    (recovery,) = run.recoveries()
    assert recovery.again == 0
    check_recovered(there, run, share=2)
    fault.names += [ps, "goes on with the copies", "SIGKILL"]
    there.close()


@pytest.mark.row(17)
@pytest.mark.chaos
@pytest.mark.parametrize("frozen_s", [1.5, FROZEN_S])
def test_a_frozen_ps_is_killed_and_its_copy_takes_its_place(
    fault: Fault, frozen_s: float
) -> None:
    """A pause of less than that is waited for; the longer one ends with its process."""
    cluster = fault.cluster(ps=2, workers=2, restarts=3, frozen_s=frozen_s)
    there, ledger, clock = trainer(cluster, REPLICA), Ledger(), Stopwatch()
    pid, woken, froze_at = cluster.pid(PS), threading.Event(), list[float]()

    def wake() -> None:
        os.kill(pid, signal.SIGCONT)
        woken.set()

    def blink() -> None:
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.5, wake).start()

    def freeze(run: Any, report: Any) -> None:
        if woken.is_set() and not froze_at:
            assert cluster.pid(PS) == pid
            froze_at.append(clock.seconds)
            os.kill(pid, signal.SIGSTOP)

    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=[after(100, blink), freeze, fault.stop_after(GOES_ON)],
        progress=False,
    )
    assert run.state == "stopped"
    assert clock.seconds - froze_at[0] < frozen_s + 20
    (recovery,) = run.recoveries()
    assert recovery.lost == (PS,)
    assert recovery.again <= 4  # told of when they were computed, never acknowledged
    assert not psutil.pid_exists(pid)
    ledger.add(run)
    ledger.check(there, lost=2)
    fault.names += [f"{PS} is frozen for", "SIGKILL", "goes on with the copies"]
    there.close()


@pytest.mark.row(17)
@pytest.mark.chaos
def test_a_frozen_ps_with_a_replica_is_waited_for_and_loses_no_update(
    fault: Fault,
) -> None:
    """Given up by the others, it wakes with all that it held, and is asked for that."""
    cluster = fault.cluster(ps=2, workers=2)
    there, ledger = trainer(cluster, REPLICA), Ledger()
    pid = cluster.pid(PS)

    def freeze() -> None:
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(25, os.kill, (pid, signal.SIGCONT)).start()

    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=[after(300, freeze), fault.stop_after(GOES_ON)],
        progress=False,
    )
    assert run.state == "stopped"
    assert len(run.recoveries()) == 1
    ledger.add(run)
    ledger.check(there, lost=2)
    fault.names += [PS, "goes on with the copies"]
    there.close()


@pytest.mark.row(14, 16)
@pytest.mark.chaos
def test_a_killed_ps_with_a_log_loses_no_update(
    fault: Fault,
) -> None:
    """Wherever it was between an update, its record, the disk and the answer."""
    cluster = fault.cluster(ps=2, workers=2, restarts=3)
    there, ledger = trainer(cluster, AsyncPS(durability="log")), Ledger()
    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=[
            after(300, partial(kill, fault, cluster, FIRST, PS)),
            fault.stop_after(GOES_ON),
        ],
        progress=False,
    )
    assert run.state == "stopped"
    check_times(fault, 15, FIRST, PS)
    (recovery,) = run.recoveries()
    assert recovery.again <= 4
    ledger.add(run)
    ledger.check(there, lost=2)
    fault.names += [PS, "applied the change log", "goes on with the copies", "SIGKILL"]
    there.close()


@pytest.mark.row(13, 14, 15, 16)
@pytest.mark.chaos
@pytest.mark.parametrize(
    ("durability", "point"),
    [
        ("log", "update.recorded"),
        ("log", "log.written"),
        ("log", "log.on_disk"),
        ("replica", "update.applied"),
        ("replica", "update.recorded"),
        ("replica", "copy.received"),
    ],
)
def test_all_ps_go_on_from_one_update_when_one_dies_within_it(
    fault: Fault, tmp_path: Path, durability: Durability, point: str
) -> None:
    """After a worker froze and the master was killed; it is the first ps by then.

    Of that update its log or its copy may have more than the other ps heard, or less.
    """
    once = tmp_path / "crashed"
    env = {VARIABLE: f"{point}=crash@150", ONCE: str(once)}
    cluster = fault.cluster(ps=2, workers=3, restarts=3, env=env, frozen_s=10)
    there, master = trainer(cluster, SyncPS(durability=durability)), cluster.master
    frozen = cluster.pid("/job:worker/task:2")

    def freeze() -> None:
        os.kill(frozen, signal.SIGSTOP)
        threading.Timer(3, os.kill, (frozen, signal.SIGCONT)).start()

    run = there.fit(
        IDS,
        steps=400,
        batch_size=BATCH,
        callbacks=[after(20, freeze), after(60, partial(kill, fault, cluster, master))],
        progress=False,
    )
    assert once.exists(), f"nobody came to {point}"
    assert (run.state, run.steps) == ("done", 400)
    assert len(run.recoveries()) == 1
    check_recovered(there, run, share=3)
    fault.names += [f"exit code {CRASHED}", GOES_ON, "SIGKILL"]
    there.close()


@pytest.mark.row(13, 14)
@pytest.mark.chaos
@pytest.mark.parametrize("eviction", ["lru", "lfu", "ttl"])
@pytest.mark.parametrize("durability", ["replica", "log"])
def test_a_table_within_a_budget_outlives_its_ps(
    fault: Fault, durability: Any, eviction: Any
) -> None:
    """Its rows go on from where they were, and none has an update twice."""
    cluster = fault.cluster(ps=2, workers=1, restarts=3)
    given = options(eviction)
    given["capacity_bytes"] *= 2  # of two shards
    one = Trainer(
        Table(**given),
        table_loss,
        optax.sgd(1.0),
        cluster=cluster,
        strategy=AsyncPS(durability=durability),
    )
    run = one.fit(
        examples(),
        steps=10**6,
        batch_size=ROW_BATCH,
        callbacks=[
            after(200, partial(kill, fault, cluster, PS)),
            fault.stop_after(GOES_ON),
        ],
        progress=False,
    )
    assert run.state == "stopped"
    # Of the last steps before a loss it is not told.
    check_rows(run, run.metrics("seen")["value"].sum(0) + 2 * ROW_BATCH)
    fault.names += [PS, "goes on with the copies", "SIGKILL"]
    one.close()


def kill(fault: Fault, cluster: LocalCluster, *tasks: str) -> None:
    fault.begins()
    for task in tasks:
        cluster.kill(task)


def check_times(fault: Fault, seconds: float, *lost: str) -> None:
    """A loss is noticed at once; the run goes on soon after all processes serve.

    How long a process takes to start depends on the machine, and is not counted.
    """
    assert fault.seconds_until("lost at step") < 5
    served = [f"{task} serves again" for task in lost]
    assert min(fault.seconds_between(s, GOES_ON) for s in served) < seconds


@pytest.mark.row(18)
@pytest.mark.chaos
def test_both_copies_lost_end_a_run_and_it_never_begins_anew(
    fault: Fault,
) -> None:
    cluster = fault.cluster(ps=2, workers=2, restarts=3)
    there, clock = trainer(cluster, REPLICA), Stopwatch()
    with pytest.raises(CopyLostError, match=r"did not go on by itself: .*checkpoint"):
        there.fit(
            IDS,
            steps=10**6,
            batch_size=BATCH,
            callbacks=[after(300, partial(kill, fault, cluster, FIRST, PS))],
            progress=False,
        )
    assert clock.seconds < 60
    fault.names += ["SIGKILL", "lost at step"]
    there.close()


@pytest.mark.row(18)
@pytest.mark.chaos
def test_both_copies_lost_leave_the_newest_checkpoint(fault: Fault) -> None:
    cluster = fault.cluster(ps=2, workers=2, restarts=3)
    there = trainer(cluster, REPLICA)
    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        checkpoint=Checkpoints(fault.path, every=50, keep=1000),
        callbacks=[
            after(300, partial(kill, fault, cluster, FIRST, PS), fault.path),
            fault.stop_after(GOES_ON),
        ],
        progress=False,
    )
    assert run.state == "stopped"
    (recovery,) = run.recoveries()
    assert recovery.lost == (FIRST, PS)
    check_recovered(there, run, gone_back_to(fault.path, run))
    fault.names += ["SIGKILL", "goes back to step"]
    there.close()
