"""How a process ended, in words."""

import signal
from pathlib import Path

import pytest

from jgraph.errors import TaskMissingError
from jgraph.launch.local import exit_codes
from jgraph.launch.local.cluster import LocalCluster
from jgraph.launch.local.exit_codes import how_it_ended, memory_kills


@pytest.fixture
def counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel's counters, of which it has killed three processes so far."""
    path = tmp_path / "vmstat"
    path.write_text("pgfault 7\noom_kill 3\nballoon_inflate 0\n")
    monkeypatch.setattr(exit_codes, "COUNTERS", path)
    return path


def test_a_kill_for_want_of_memory_is_told_from_others(counters: Path) -> None:
    before = memory_kills()
    assert how_it_ended(-signal.SIGKILL, before) == "SIGKILL"
    counters.write_text("oom_kill 4\n")
    told = how_it_ended(-signal.SIGKILL, before)
    assert told.startswith("SIGKILL by the kernel: this machine had no memory left")
    assert "trainer.plan()" in told
    assert how_it_ended(-signal.SIGKILL) == "SIGKILL"  # on another machine
    assert how_it_ended(-signal.SIGSEGV, before) == "SIGSEGV"
    assert how_it_ended(137, before) == "exit code 137"


def test_where_nobody_counts_nothing_is_said_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_codes, "COUNTERS", tmp_path / "none")
    assert memory_kills() == 0
    assert how_it_ended(-signal.SIGKILL, 0) == "SIGKILL"


@pytest.mark.procs
def test_a_task_that_the_kernel_killed_says_what_to_do(counters: Path) -> None:
    with LocalCluster(ps=1, workers=0) as cluster:
        counters.write_text("oom_kill 4\n")
        cluster.kill("/job:ps/task:0")
        with pytest.raises(TaskMissingError, match="more ps tasks, smaller batches"):
            cluster.wait_for_tasks(10)
