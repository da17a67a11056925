"""A task that crashes at a step of its work, before or after what changes its state."""

from pathlib import Path
from typing import Final

import pytest

from jgraph.failpoints import CRASHED, ONCE, VARIABLE
from jgraph.train.state.durability import Durability
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.sync_runner import SyncPS
from tests.support.counting import BATCH, IDS, Ledger, check_together, trainer
from tests.support.fault import Fault

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120)]

QUICK = "update.applied"
AT: Final[dict[str, tuple[Durability, int]]] = {
    "update.computed": ("replica", 150),
    "update.applied": ("replica", 150),
    "update.recorded": ("replica", 150),
    "copy.received": ("replica", 150),
    "copy.applied": ("replica", 150),
    "push.sent": ("replica", 151),  # by a worker, to the first of two ps
    "step.received": ("replica", 150),
    "step.begun": ("replica", 150),
    "step.done": ("replica", 150),
    "step.told": ("replica", 150),
    "log.written": ("log", 150),
    "log.on_disk": ("log", 150),
    "order.received": ("replica", 1),
    "order.accepted": ("replica", 1),
    "data.dealt": ("replica", 10),
    "data.answered": ("replica", 10),
}
"""What is kept a second time, and when the process crashes."""


@pytest.mark.row(2, 16)
@pytest.mark.parametrize(
    "point",
    [
        pytest.param(n, marks=pytest.mark.nightly if n == QUICK else pytest.mark.chaos)
        for n in AT
    ],
)
def test_a_task_that_crashes_at_a_step_of_its_work_loses_no_update(
    fault: Fault, tmp_path: Path, point: str
) -> None:
    (durability, time), once = AT[point], tmp_path / "crashed"
    env = {VARIABLE: f"{point}=crash@{time}", ONCE: str(once)}
    cluster = fault.cluster(ps=2, workers=2, restarts=3, env=env)
    there, ledger = trainer(cluster, AsyncPS(durability=durability)), Ledger()
    run = there.fit(IDS, steps=600, batch_size=BATCH, progress=False)
    assert once.exists(), f"nobody came to {point} {time} times"
    assert run.state == "done"
    ledger.add(run)
    again = ledger.check(there, lost=2)
    assert cluster.wait_for_tasks(30)  # who starts it again has seen how it ended
    assert 600 <= run.steps <= 600 + again
    fault.names += [f"exit code {CRASHED}"]
    there.close()


@pytest.mark.row(19)
@pytest.mark.parametrize(
    "point",
    [
        "gates.opened",
        pytest.param("gates.opening", marks=pytest.mark.chaos),
        pytest.param("loop.asked", marks=pytest.mark.chaos),
    ],
)
def test_a_master_that_dies_while_gates_open_is_replaced_and_costs_no_step(
    fault: Fault, tmp_path: Path, point: str
) -> None:
    """There is no checkpoint: to go back would end the run."""
    once = tmp_path / "crashed"
    env = {VARIABLE: f"{point}=crash", ONCE: str(once)}
    cluster = fault.cluster(ps=2, workers=2, restarts=3, env=env)
    there, master = trainer(cluster, SyncPS()), cluster.master
    run = there.fit(IDS, steps=100, batch_size=BATCH, progress=False)
    assert once.exists(), f"nobody came to {point}"
    assert (run.state, run.steps, run.recoveries()) == ("done", 100, [])
    assert cluster.master != master
    check_together(there, run)
    fault.names += [f"exit code {CRASHED}", f"{master}, the master, was lost"]
    there.close()
