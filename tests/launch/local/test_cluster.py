"""Real processes on this machine."""

import atexit
import fcntl
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from jgraph.client.cluster import connect
from jgraph.clock import SystemClock
from jgraph.errors import (
    ConfigError,
    JGError,
    StartError,
    TaskLostError,
    UnknownDeviceError,
)
from jgraph.graph.device import device
from jgraph.graph.ir import TaskName
from jgraph.graph.variable import Variable
from jgraph.launch.local.cluster import LocalCluster
from jgraph.launch.local.processes import TaskProcesses
from jgraph.launch.ray_cluster import RayCluster
from jgraph.server.server import Server
from tests.support.counted_loops import requests
from tests.support.other_jax import losses_of_training, run_there
from tests.support.waiting import wait_until

pytestmark = pytest.mark.procs


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    clock = SystemClock()
    began = clock.now()
    with LocalCluster(ps=1, workers=2) as cluster:
        assert clock.now() - began < 30  # 2 s on an idle machine
        yield cluster


def test_function_runs_over_three_processes(cluster: LocalCluster) -> None:
    w = Variable("w", jnp.ones((3, 2)), device="/job:ps/task:0")

    def step(x: Any) -> Any:
        with device("/job:worker/task:0"):
            h = x @ w[...]
        w[...] = w[...] + 1
        with device("/job:worker/task:1"):
            return h * 2

    session = cluster.session()
    x = np.ones((1, 3), np.float32)
    assert session.run(step, x).tolist() == [[6, 6]]
    assert session.run(step, x).tolist() == [[12, 12]]
    pids = {task.pid for task in cluster.status().tasks}
    assert pids == {cluster.pid(task) for task in cluster.tasks()}
    assert len(pids) == 3


def test_second_client_joins_the_same_cluster(cluster: LocalCluster) -> None:
    with connect(cluster.target, timeout_s=20) as other:
        assert other.tasks() == cluster.tasks()
        assert other.tasks("worker") == ["/job:worker/task:0", "/job:worker/task:1"]


@pytest.mark.slow
def test_a_client_of_another_jax_trains_on_it(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    code = (
        "import sys, jax, jgraph as jg;"
        "from tests.support.other_jax import losses_of_training;"
        "cluster = jg.connect(sys.argv[1]);"
        "print(jax.__version__, *losses_of_training(cluster)); cluster.close()"
    )
    version, *losses = run_there(code, cluster.target, home=tmp_path)[-1].split()
    assert version != jax.__version__
    assert [float(loss) for loss in losses] == pytest.approx(
        losses_of_training(cluster), rel=1e-4
    )


def test_cluster_shows_itself(cluster: LocalCluster) -> None:
    assert "1 ps, 2 worker" in repr(cluster)
    assert "/job:worker/task:1" in str(cluster)
    assert "<table>" in cluster._repr_html_()
    log = cluster.logs("/job:ps/task:0")
    assert "listens on" in log
    assert cluster.logs("ps:0").startswith(log[:100])
    assert cluster.pid("worker:1") == cluster.pid("/job:worker/task:1")
    with pytest.raises(UnknownDeviceError, match="'worker:9' does not name one task"):
        cluster.kill("worker:9")
    assert "Unable to initialize" not in log


def test_status_is_plain_data_that_shows_itself(cluster: LocalCluster) -> None:
    status = cluster.status()
    assert repr(status) == "<ClusterStatus 3 of 3 tasks ready>"
    assert "<td>/job:worker/task:1</td>" in status._repr_html_()
    with pytest.raises(FrozenInstanceError):
        status.missing = ()  # type: ignore[misc]
    facts = json.loads(json.dumps(status.to_dict()))
    assert facts["cluster"] == cluster.spec.as_dict()
    task = facts["tasks"][0]
    assert task["pid"] == cluster.pid(task["task"])
    assert type(task["variable_bytes"]) is int
    assert task["rss_bytes"] > 1e6
    assert task["busy_s"]["process"] > 0.1
    assert "hash tables" not in str(status)


def test_killed_task_fails_the_step_that_needs_it_and_the_others_go_on() -> None:
    v = Variable("v", jnp.ones(2), device="/job:ps/task:0")
    clock = SystemClock()
    with LocalCluster(ps=1, workers=1) as cluster:
        session = cluster.session()

        def read() -> Any:
            return v[...] * 2

        assert session.run(read).tolist() == [2, 2]
        cluster.kill("/job:ps/task:0")
        began = clock.now()
        with pytest.raises(JGError, match="/job:ps/task:0"):
            session.run(read, timeout_s=60)
        assert clock.now() - began < 30
        assert session.run(lambda x: x + 1, 1.0) == 2.0
        assert list(cluster.status().missing) == ["/job:ps/task:0"]
        row = f"{cluster.spec.address(TaskName('/job:ps/task:0'))} │ no answer"
        assert row in str(cluster)


@pytest.mark.nightly
def test_killed_worker_is_named_by_the_loop_that_it_ran() -> None:
    with LocalCluster(ps=2, workers=2) as cluster:
        session = cluster.session()
        loops = session.run_loops(requests(session, cluster, steps=1_000_000))
        reports = iter(loops)
        while next(reports).task != "/job:worker/task:1":
            pass
        cluster.kill("/job:worker/task:1")
        with pytest.raises(TaskLostError, match="/job:worker/task:1"):
            list(reports)


def test_closing_leaves_no_process_and_says_so_afterwards() -> None:
    whole: Any = np.int64  # a number of NumPy is one, too
    cluster = LocalCluster(ps=whole(0), workers=whole(1))
    assert cluster.tasks() == ["/job:worker/task:0"]
    processes = [psutil.Process(cluster.pid(task)) for task in cluster.tasks()]
    cluster.close()
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive
    assert repr(cluster) == "<LocalCluster closed>"
    with pytest.raises(ConfigError, match=r"was closed; make a new jg\.LocalCluster$"):
        cluster.session().run(lambda x: x, 1.0)
    cluster.close()


def test_task_that_cannot_start_shows_the_end_of_its_log() -> None:
    with pytest.raises(StartError, match="no_such_platform") as caught:
        LocalCluster(ps=0, workers=1, env={"JAX_PLATFORMS": "no_such_platform"})
    assert caught.value.details["task"] == "/job:worker/task:0"


def test_what_python_says_before_a_task_does_is_no_answer_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\necho module load: welcome\n"
        """echo '{"address": "127.0.0.1:9", "task": "/job:ps/task:0"}'\n"""
        "read spec\necho joined\nread end\n"
    )
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    tasks = TaskProcesses({"ps": 1}, tmp_path, {})
    try:
        assert tasks.spec.address(tasks.master) == "127.0.0.1:9"
    finally:
        tasks.end()


def test_task_ends_when_its_parent_is_gone() -> None:
    """A notebook's kernel is killed: nothing may stay behind."""
    cluster = LocalCluster(ps=0, workers=1)
    process = psutil.Process(cluster.pid("/job:worker/task:0"))
    cluster._processes[cluster.master].end()  # what the kernel does for a dead parent
    assert process.wait(20) in {0, None}
    cluster.close()


def test_sigterm_drains_a_task_and_it_exits_cleanly() -> None:
    cluster = LocalCluster(ps=0, workers=1)
    task = cluster._processes[cluster.master].process
    task.send_signal(signal.SIGTERM)
    assert task.wait(20) == 0
    cluster.close()


def has_shared_memory(cluster: LocalCluster) -> bool:
    """Whether a large tensor went through shared memory."""
    v = Variable("large", jnp.ones(2**20), device="/job:ps/task:0")
    cluster.session().run(lambda: v[...] + 1)
    maps = psutil.Process(cluster.pid("/job:ps/task:0")).memory_maps(grouped=False)
    return any("memfd:jgraph" in row.path for row in maps)


def test_large_tensors_go_through_shared_memory(cluster: LocalCluster) -> None:
    assert has_shared_memory(cluster)


@pytest.mark.nightly
def test_nothing_goes_through_shared_memory_where_grpc_is_asked_for() -> None:
    with LocalCluster(ps=1, workers=1, transport="grpc") as cluster:
        assert not has_shared_memory(cluster)


def test_unknown_transport_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="transport='tcp' is not an option"):
        LocalCluster(ps=1, workers=1, transport="tcp")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="transport='tcp' is not an option"):
        Server({"ps": ["localhost:0"]}, transport="tcp")  # type: ignore[arg-type]


def test_cluster_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one task"):
        LocalCluster(ps=0, workers=0)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"env": {"A": 1}}, 'JG-124 env has \'A\': 1; write texts: env={"A": "1"}'),
        ({"env": "A=1"}, "env is 'A=1'; write variables and their values"),
        ({"env": {"A=": "1"}}, "env has 'A=': '1', which cannot be"),
        ({"allow_sources": 3}, "JG-124 allow_sources is 3; write a list of patterns"),
        ({"allow_sources": "mine:*"}, "allow_sources is 'mine:*'; write a list"),
        ({"allow_sources": [3]}, "allow_sources is [3]; write a list of patterns"),
        ({"jobs": ["spare"]}, "jobs is ['spare']; write how many tasks"),
    ],
)
def test_what_is_no_job_variable_or_source_is_refused(
    options: Any, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        LocalCluster(ps=1, workers=1, **options)


def test_what_is_no_list_of_sources_is_refused_by_servers_and_by_ray() -> None:
    """Before anything is begun; one text is no list of its letters."""
    wrong: Any = "tests"
    for of in (
        lambda: Server({"ps": ["localhost:0"]}, "ps", 0, allow_sources=wrong),
        lambda: RayCluster(ps=1, workers=1, allow_sources=wrong),
    ):
        with pytest.raises(ConfigError, match="allow_sources is 'tests'; write a list"):
            of()


def test_counts_that_are_no_whole_numbers_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"not '2' ps, 2 worker.*write for example ps=2"
    ):
        LocalCluster(ps="2")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not -1 ps, 1 worker"):
        LocalCluster(ps=-1, workers=1)


# For the children: none takes the cluster's description until the test closes its door.
HELD = """
import os, socket
from jgraph.server.server import Server
told = Server.set_cluster
def held(self, *args):
    with socket.create_connection(("127.0.0.1", int(os.environ["DOOR"])), 60) as door:
        token = os.environ["JGRAPH_TOKEN_FILE"]
        door.sendall(f"{self.target}?token_file={token}\\n".encode())
        door.recv(1)
    told(self, *args)
Server.set_cluster = held
"""


def test_cluster_is_ready_only_when_every_task_knows_all_others(tmp_path: Path) -> None:
    """One that does not know them yet answers for itself alone, as a cluster of one."""
    (tmp_path / "sitecustomize.py").write_text(HELD)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with (
        ThreadPoolExecutor(1) as thread,
        socket.create_server(("127.0.0.1", 0)) as listener,
        ExitStack() as doors,
    ):
        listener.settimeout(60)
        env = {"PYTHONPATH": path, "DOOR": str(listener.getsockname()[1])}
        starting = thread.submit(LocalCluster, ps=1, workers=1, env=env)
        for _ in range(2):
            door = doors.enter_context(listener.accept()[0])
            with connect(door.makefile().readline().strip()) as alone:
                assert len(alone.tasks()) == 1
        assert not starting.done()
        doors.close()
        with starting.result(60) as cluster:
            assert cluster.tasks() == ["/job:ps/task:0", "/job:worker/task:0"]


@pytest.mark.timeout(150)
def test_workers_join_a_cluster_with_tls_by_certificates_of_their_own() -> None:
    with LocalCluster(ps=1, workers=1, elastic=True, tls=True) as cluster:
        assert cluster.scale(workers=2) == cluster.tasks("worker")
        worker = cluster.tasks("worker")[1]
        assert [t.state for t in cluster.status().tasks] == ["ready"] * 3
        assert "listens on" in cluster.logs(worker)
        assert cluster.scale(workers="-1") == ["/job:worker/task:0"]
        with pytest.raises(UnknownDeviceError, match="task:1"):
            cluster.pid(worker)
        assert cluster.gone() == {}


@pytest.mark.nightly
@pytest.mark.timeout(150)
def test_a_process_that_joins_in_place_of_a_lost_one_is_the_task() -> None:
    with LocalCluster(ps=1, workers=1, elastic=True) as cluster:
        worker = cluster.scale(workers=2)[1]
        before = cluster.pid(worker)
        cluster.kill(worker)
        wait_until(lambda: len(cluster.renewed_tasks("worker")) == 1)
        assert list(cluster.gone()) == [worker]
        assert cluster.scale(workers=2)[1] == worker
        assert cluster.pid(worker) != before
        assert cluster.gone() == {}


@pytest.mark.nightly
@pytest.mark.timeout(150)
def test_a_ps_that_has_left_is_not_one_that_ended() -> None:
    with LocalCluster(ps=2, workers=1, elastic=True) as cluster:
        process = psutil.Process(cluster.pid("/job:ps/task:1"))
        cluster.scale(ps=1, wait=False)
        wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE, 60)
        wait_until(lambda: cluster.gone() == {})


@pytest.mark.nightly
@pytest.mark.timeout(150)
def test_a_worker_that_joined_and_died_joins_again() -> None:
    with LocalCluster(ps=1, workers=1, elastic=True, restarts=2) as cluster:
        worker = cluster.scale(workers="+1")[1]
        before = cluster.pid(worker)
        cluster.kill(worker)
        wait_until(lambda: cluster.pid(worker) != before)
        wait_until(lambda: len(cluster.renewed_tasks("worker")) == 2, 60)
        assert cluster.wait_for_tasks(60)


def test_a_directory_for_logs_that_cannot_be_made_is_told_of(tmp_path: Path) -> None:
    """One that is not there is made; no process is started for one that cannot be."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"log_dir='.*file/logs' cannot be a direct"):
        LocalCluster(log_dir=tmp_path / "file" / "logs")
    for name in (cast(Any, 5), "a\0b"):
        with pytest.raises(ConfigError, match="cannot be a directory for logs: "):
            LocalCluster(log_dir=name)


def test_a_directory_in_the_place_of_a_log_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "ps-0.log").mkdir()
    with pytest.raises(ConfigError, match=r"ps-0\.log cannot be the log of /job:ps/"):
        LocalCluster(ps=1, workers=0, log_dir=tmp_path)


def test_a_directory_has_the_logs_of_one_cluster_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "ps-0.log").mkdir()
    lock = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # as a cluster that is up
    with pytest.raises(ConfigError, match="the logs of another local cluster"):
        LocalCluster(ps=1, workers=0, log_dir=tmp_path)
    os.close(lock)
    for _ in range(2):  # what does not start gives it back
        with pytest.raises(ConfigError, match="cannot be the log"):
            LocalCluster(ps=1, workers=0, log_dir=tmp_path)


@pytest.mark.parametrize("timeout_s", ["60", None, float("nan")])
def test_a_time_limit_that_is_none_is_refused(timeout_s: Any) -> None:
    with pytest.raises(ConfigError, match="give a number of seconds"):
        LocalCluster(timeout_s=timeout_s)


def test_the_end_of_a_process_that_was_forked_is_not_that_of_the_cluster(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: 1)
        cluster._end_processes()
    assert Path(cluster._secrets).exists()
    assert not cluster.gone()
    atexit.register(cluster._end_processes)
