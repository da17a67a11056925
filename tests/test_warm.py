"""Tasks that are forks of a process that has loaded what they run."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from jgraph.failpoints import VARIABLE
from jgraph.launch.local.cluster import LocalCluster
from tests.support.warm import NEW, TASK, WARM, new_processes

pytestmark = [
    pytest.mark.procs,
    pytest.mark.skipif(
        sys.platform != "linux" or NEW in os.environ, reason="each task is new here"
    ),
]


def started(task: psutil.Process) -> list[str]:
    return task.cmdline()[1:3]


def test_a_task_is_a_child_of_the_test_in_its_folder_with_files_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with LocalCluster(ps=1, workers=1, log_dir=tmp_path) as cluster:
        tasks = [psutil.Process(cluster.pid(task)) for task in cluster.tasks()]
        (warm,) = WARM.values()
        for task in tasks:
            assert started(task) == ["-m", "tests.support.warm_parent"]
            assert task.ppid() == os.getpid()
            assert os.getsid(task.pid) == task.pid
            assert Path(task.cwd()) == tmp_path
            files = {Path(f"/proc/{task.pid}/fd/{n}").resolve() for n in (0, 1, 2)}
            assert tmp_path / f"{task_name(task, cluster)}.log" in files
        assert warm.pid is not None
        assert psutil.Process(warm.pid).num_threads() == 1
    assert not any(task.is_running() for task in tasks)


def task_name(process: psutil.Process, cluster: LocalCluster) -> str:
    (task,) = [t for t in cluster.tasks() if cluster.pid(t) == process.pid]
    return task.removeprefix("/job:").replace("/task:", "-")


def test_a_task_that_is_to_be_new_or_has_variables_that_are_read_at_its_start_is() -> (
    None
):
    with new_processes(), LocalCluster(ps=0, workers=1) as cluster:
        assert started(psutil.Process(cluster.pid("/job:worker/task:0"))) == [
            "-m",
            TASK,
        ]
    other = {"XLA_FLAGS": ""}
    with LocalCluster(ps=0, workers=1, env=other) as cluster:
        assert started(psutil.Process(cluster.pid("/job:worker/task:0"))) == [
            "-m",
            TASK,
        ]


def test_how_a_task_ended_and_why_is_known_to_who_started_it() -> None:
    """Here by a variable that is looked at when the task begins."""
    command = [sys.executable, "-m", TASK, "ps", "0", "{}", "auto", "", ""]
    armed = {**os.environ, VARIABLE: "no such failpoint"}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=armed
    )
    assert ended.returncode == 1
    assert "warm_parent.py" in ended.stderr
    assert "there is no failpoint 'no such failpoint'" in ended.stderr
