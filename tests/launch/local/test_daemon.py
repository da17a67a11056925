"""Orders for the daemon of a cluster on this machine."""

import os
from pathlib import Path
from typing import cast

import pytest

from jgraph.graph.ir import TaskName
from jgraph.launch.local import daemon
from jgraph.launch.local.processes import TaskProcesses


def test_orders_are_carried_out_in_the_order_that_they_were_given_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JGRAPH_HOME", str(tmp_path))
    directory = daemon.state_directory()
    given = ["mine.b.orders", "mine.c.orders", "mine.a.orders"]
    for at, name in enumerate([*given, "other.d.orders", "mine.e.new"]):
        (directory / name).write_text("start worker 1")
        os.utime(directory / name, ns=(at, at))
    assert [path.name for path in daemon._orders("mine")] == given


class Tasks:
    """Processes of tasks that join and leave."""

    def __init__(self, pids: dict[str, int]) -> None:
        self.pids = pids

    def forget(self, task: TaskName) -> None:
        """Waits for the end of a task."""
        del self.pids[task]


def test_only_the_process_that_left_is_forgotten(tmp_path: Path) -> None:
    """Another one has the name of the second by now, and the third is forgotten."""
    tasks = Tasks({"/job:worker/task:1": 41, "/job:worker/task:2": 52})
    orders = tmp_path / "mine.orders"
    lines = [f"forget /job:worker/task:{n} {41 + n - 1}" for n in (1, 2, 3)]
    orders.write_text("\n".join(lines))
    daemon._carry_out(cast("TaskProcesses", tasks), orders)
    assert tasks.pids == {"/job:worker/task:2": 52}
