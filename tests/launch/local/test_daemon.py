"""Orders for the daemon of a cluster on this machine."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from jgraph.cluster.spec import check_counts
from jgraph.errors import ClusterBusyError, ConfigError
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


@contextmanager
def waiting(*words: str, lock: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for the end of its input, called as told."""
    process = subprocess.Popen(
        [sys.executable, "-c", "input()", *words],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=[] if lock is None else [lock],
    )
    with process:
        yield process


def test_a_name_is_taken_for_as_long_as_its_daemon_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JGRAPH_HOME", str(tmp_path))
    with daemon._reserved("mine") as lock, daemon._reserved("other"):
        holder = waiting(lock=lock)
        holder.__enter__()
    with pytest.raises(ClusterBusyError, match="'mine' is starting or ending"):
        daemon.up("mine", 1, 0, 0)
    holder.__exit__(None, None, None)
    with daemon._reserved("mine"):
        pass


def test_a_daemon_of_another_name_is_another_cluster() -> None:
    with waiting("-m", "jgraph.launch.local.daemon", "other") as process:
        clusters = [
            daemon.NamedCluster(name, "jgraph://a:1", process.pid, {}, "")
            for name in ("mine", "other")
        ]
        assert [cluster.running for cluster in clusters] == [False, True]


def test_the_end_of_a_cluster_spares_a_process_that_got_the_number_of_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JGRAPH_HOME", str(tmp_path))
    with (
        waiting("-m", "jgraph.launch.local.daemon", "mine") as process,
        waiting() as another,
    ):
        pids = {"/job:ps/task:0": another.pid}
        cluster = daemon.NamedCluster("mine", "jgraph://a:1", process.pid, pids, "")
        state = daemon.state_directory() / "mine.json"
        state.write_text(json.dumps(asdict(cluster)))
        daemon.down("mine", timeout_s=60)
        assert not psutil.pid_exists(process.pid) or process.wait() < 0
        assert another.poll() is None
    assert not state.exists()


def test_ctrl_c_of_a_start_ends_it_and_waits_for_no_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(what: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("JGRAPH_HOME", str(tmp_path))
    monkeypatch.setattr(daemon, "show_wait", interrupted)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        daemon.up("mine", 1, 0, 0, timeout_s=600)
    timers = [t for t in threading.enumerate() if isinstance(t, threading.Timer)]
    for timer in set(timers) - before:
        timer.join(10)
        assert not timer.is_alive(), "the process would wait for it"
    assert daemon.find("mine") is None
    with daemon._reserved("mine"):
        pass


@pytest.mark.bad_input_row(27)
def test_more_tasks_than_there_is_memory_for_are_refused_and_none_is_started(
    tmp_path: Path,
) -> None:
    for start in (
        lambda: TaskProcesses({"ps": 1, "worker": 10**7}, tmp_path, {}),
        lambda: daemon.up("many", 10**4, 10**4, 0),
        lambda: daemon.start_tasks("none", "worker", 10**7),
    ):
        with pytest.raises(ConfigError, match=r"take about 100 MB each.*at most"):
            start()
    assert not list(tmp_path.iterdir())


@pytest.mark.bad_input_row(27)
def test_more_tasks_of_a_job_than_any_cluster_has_are_refused() -> None:
    check_counts({"ps": 1, "worker": 10_000})
    with pytest.raises(ConfigError, match=r"10,000 tasks of a job at most.*'worker'"):
        check_counts({"ps": 1, "worker": 10_001})


@pytest.mark.procs
def test_only_the_process_that_left_is_forgotten_and_what_was_started_again(
    tmp_path: Path,
) -> None:
    back = threading.Semaphore(0)
    names = [TaskName(f"/job:worker/task:{index}") for index in range(4)]
    tasks = TaskProcesses(
        {"worker": 3}, tmp_path, {}, restarts=1, on_start=back.release
    )
    try:
        pids = [tasks.pids[name] for name in names[:3]]
        psutil.Process(pids[2]).kill()
        assert back.acquire(timeout=60)
        assert tasks.pids[names[2]] != pids[2]
        orders = tmp_path / "mine.orders"
        # Another process has the name of the first by now, and the last is forgotten.
        left = [names[0], names[1], names[2], names[3]], [pids[1], *pids[1:], pids[2]]
        lines = [f"forget {name} {pid}" for name, pid in zip(*left, strict=True)]
        orders.write_text("\n".join(lines))
        daemon._carry_out(tasks, orders)
        assert list(tasks.pids) == [names[0]]
    finally:
        tasks.end()
