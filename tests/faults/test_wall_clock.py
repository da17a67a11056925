"""The time of day is shown and saved; nothing that waits, or times out, looks at it."""

import ast
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import jgraph
from jgraph.runtime.files.step_files import steps_in
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from tests.support.counting import BATCH, IDS, check_recovered, trainer
from tests.support.fault import Fault
from tests.support.servers import connected
from tests.support.stopping import once

PACKAGE = Path(jgraph.__file__).parent
DATES = {
    "clock.py": "is the wall clock",
    "cli/top.py": "dates what it sees",
    "client/timeline/collecting.py": "dates a trace",
    "client/watching.py": "dates what it sees",
    "cluster/events.py": "dates events",
    "dashboard/sources.py": "dates what it sees",
    "dashboard/task_metrics.py": "dates what it sees",
    "server/runs/saving/checkpointer.py": "dates a checkpoint",
    "rpc/security/certificates.py": "dates certificates",
    "rpc/security/tls.py": "dates certificates",
    "runtime/files/writer_lease.py": "compares with what another host wrote; a "
    "generation "
    "fences whoever was taken for gone and was not",
    "serving/function_queue.py": "dates the last request",
    "train/checkpoint/checkpoint.py": "dates a checkpoint",
    "train/run/trackers.py": "dates metrics of MLflow",
    "train/checkpoint/checkpoints.py": "dates a checkpoint",
    "train/export.py": "dates an exported model",
    "train/export_live.py": "dates an exported model",
    "train/export_program.py": "dates an exported model",
}
"""Who reads the time of day, and what for."""


def readers(names: set[str]) -> set[str]:
    """Returns the files that use one of these names."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not any(name in text for name in names):  # it need not be parsed
            continue
        for node in ast.walk(ast.parse(text)):
            is_name = isinstance(node, ast.Attribute | ast.Name)
            if is_name and ast.unparse(node) in names:
                found.add(path.relative_to(PACKAGE).as_posix())
    return found


def test_only_dates_that_are_shown_or_saved_are_of_the_wall_clock() -> None:
    wall = {
        *("WallClock", "time.time", "time.time_ns", "time.localtime", "time.gmtime"),
        *("datetime.now", "datetime.utcnow", "datetime.fromtimestamp", "date.today"),
    }
    assert readers(wall) == DATES.keys()


def test_what_decides_reads_no_clock_at_all() -> None:
    files = [
        p
        for d in ("coordination", "plan", "graph", "view")
        for p in (PACKAGE / d).rglob("*.py")
    ]
    assert len(files) > 30
    for path in files:
        text = path.read_text(encoding="utf-8")
        if not re.search(r"\b(?:time|datetime|clock)\b", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {node.module or ""}
            else:
                continue
            assert not names & {"time", "datetime", "jgraph.clock"}, path


@pytest.mark.parametrize(
    "strategy", [AsyncPS, pytest.param(SyncPS, marks=pytest.mark.chaos)]
)
def test_training_goes_on_when_the_wall_clock_jumps_by_an_hour(
    fault: Fault,
    strategy: Callable[[], Strategy],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Forward past every lease, and back; also that of the writer of checkpoints."""
    fault.is_noticed = False
    jumps = [0.0]
    monkeypatch.setattr(time, "time", lambda: datetime.now(UTC).timestamp() + jumps[-1])

    def jump(run: Any, report: Any) -> None:
        jumps.append(-3600.0 if jumps[-1] > 0 else 3600.0)

    with connected(ps=2, worker=2) as cluster:
        there = trainer(cluster, strategy())
        run = there.fit(
            IDS,
            steps=10**6,
            batch_size=BATCH,
            checkpoint=Checkpoints(tmp_path, every=50),
            callbacks=[jump, once(lambda run: len(jumps) > 4)],
            progress=False,
        )
        assert run.state == "stopped"
        assert not run.recoveries()
        assert not run.dropped()
        assert steps_in(tmp_path)[-1] == run.steps
        check_recovered(there, run, share=2 if strategy is SyncPS else 1)
        there.close()
