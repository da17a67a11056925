"""A task that crashes at a step of its work, before or after what changes its state."""

from pathlib import Path
from typing import Final

import pytest

from jgraph.failpoints import CRASHED, ONCE, VARIABLE
from jgraph.train.async_ps import AsyncPS
from jgraph.train.kept_copies import Durability
from tests.faults.conftest import Fault
from tests.faults.counting import BATCH, IDS, Ledger, trainer

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120)]

QUICK = "update.applied"
AT: Final[dict[str, tuple[Durability, int]]] = {
    "update.computed": ("replica", 150),
    "update.applied": ("replica", 150),
    "update.recorded": ("replica", 150),
    "copy.received": ("replica", 150),
    "copy.applied": ("replica", 150),
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


@pytest.mark.parametrize(
    "point",
    [pytest.param(n, marks=() if n == QUICK else pytest.mark.chaos) for n in AT],
)
def test_a_task_that_crashes_at_a_step_of_its_work_loses_no_update(
    fault: Fault, tmp_path: Path, point: str
) -> None:
    (durability, time), once = AT[point], tmp_path / "crashed"
    env = {
        VARIABLE: f"{point}=crash@{time}",
        ONCE: str(once),
        "JGRAPH_RECORDS_DIR": str(tmp_path / "records"),
    }
    cluster = fault.cluster(ps=2, workers=2, restarts=3, env=env)
    there, ledger = trainer(cluster, AsyncPS(durability=durability)), Ledger()
    run = there.fit(IDS, steps=600, batch_size=BATCH, progress=False)
    assert once.exists(), f"nobody came to {point} {time} times"
    assert run.state == "done"
    ledger.add(run)
    again = ledger.check(there, lost=2)
    assert 600 <= run.steps <= 600 + again
    fault.names += [f"exit code {CRASHED}"]
    there.close()
