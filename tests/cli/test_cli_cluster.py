"""The commands that start, show and end clusters, as a user types them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import psutil
import pytest

from jgraph.client.cluster import connect
from tests.support.cli import Shell

pytestmark = pytest.mark.procs


@pytest.fixture
def jgraph(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    if any((tmp_path / "clusters").glob("*.json")):
        shell("down")


def test_cluster_goes_up_shows_itself_and_goes_down(
    jgraph: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    here = partial(jgraph.here, capsys)
    started = jgraph("up", "--ps", "1", "--workers", "1", "--json")
    assert started.returncode == 0, started.stderr
    facts = json.loads(started.stdout)
    assert sorted(facts["pids"]) == ["/job:ps/task:0", "/job:worker/task:0"]

    again = here("up")
    assert (again.returncode, again.stderr[:6]) == (1, "JG-501")
    shown = here("status", "--json")
    assert [t["state"] for t in json.loads(shown.stdout)["tasks"]] == ["ready"] * 2
    told = json.loads(here("logs", "/job:ps/task:0", "--json").stdout)
    assert any("listens on" in line for line in told["lines"])
    other = here("logs", "/job:ps/task:7")
    assert (other.returncode, other.stderr[:6]) == (1, "JG-221")
    follow = jgraph.start("logs", "/job:ps/task:0", "-f", "--tail", "1")
    assert follow.stdout is not None
    assert "/job:ps/task:0 listens on" in follow.stdout.readline()
    top = jgraph.start("top", "--every", "0.2", "--json")
    assert top.stdout is not None
    looks = [json.loads(top.stdout.readline()) for _ in range(2)]
    assert looks[1]["shares"].keys() == facts["pids"].keys()
    top.send_signal(signal.SIGINT)
    top.communicate(timeout=20)
    assert top.returncode == 0
    with connect(facts["target"], token_file=jgraph.token, timeout_s=20) as cluster:
        assert cluster.session().run(lambda x: x + 1, 1.0) == 2.0
        os.kill(facts["pids"]["/job:ps/task:0"], signal.SIGKILL)  # and it comes back
        assert cluster.wait_for_tasks(30)
        assert cluster.session().run(lambda x: x + 1, 1.0) == 2.0
        now = {str(task.task): task.pid for task in cluster.status().tasks}
        assert now["/job:ps/task:0"] != facts["pids"]["/job:ps/task:0"]
        assert now["/job:worker/task:0"] == facts["pids"]["/job:worker/task:0"]

    while "/job:ps/task:0 listens on" not in follow.stdout.readline():
        continue  # its new process writes to the same log
    follow.send_signal(signal.SIGINT)
    follow.communicate(timeout=20)
    assert follow.returncode == 0
    follow = jgraph.start("events", "-f", "--json")
    assert follow.stdout is not None
    seen = {}
    while "restarted" not in seen:
        event = json.loads(follow.stdout.readline())
        if event["subject"] == "/job:ps/task:0":
            seen[event["kind"]] = event["by"]
    seen.pop("lost", None)  # of a peer that it has spoken to
    assert list(seen) == ["joined", "died", "restarted"]
    assert seen["died"] == seen["restarted"] == "launcher"
    follow.send_signal(signal.SIGINT)
    follow.communicate(timeout=20)
    assert follow.returncode == 0
    drained = json.loads(here("drain", "/job:ps/task:0", "--json").stdout)
    assert drained["ended"]
    ended = jgraph("down")
    assert ended.returncode == 0
    assert "0 processes left" in ended.stdout
    assert not any(map(_runs, [facts["daemon"], *now.values()]))
    again = here("down")  # there is nothing to do
    assert (again.returncode, "nothing to stop" in again.stdout) == (0, True)
    gone = here("status", facts["target"])
    assert (gone.returncode, gone.stderr[:6]) == (3, "JG-101")


def test_going_up_and_down_loads_jax_in_the_tasks_only() -> None:
    """It takes as long to load as everything else together."""
    code = (
        "import jgraph.launch.local.daemon, jgraph.cli, sys\n"
        "print('jax' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.nightly
def test_killed_daemon_takes_its_tasks_along(jgraph: Shell) -> None:
    facts = json.loads(jgraph("up", "--ps", "0", "--workers", "1", "--json").stdout)
    processes = [psutil.Process(pid) for pid in facts["pids"].values()]
    os.kill(facts["daemon"], signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive
    assert jgraph("up", "--ps", "0", "--workers", "1").returncode == 0
    assert jgraph("down").returncode == 0


def test_servers_started_by_hand_make_a_cluster(jgraph: Shell, tmp_path: Path) -> None:
    """As on hosts: one command each, a file that names all; the port is the file's."""
    ports = _free_ports(2)
    file = tmp_path / "cluster.toml"
    file.write_text(
        f'[cluster]\nps = ["127.0.0.1:{ports[0]}"]\nworker = ["127.0.0.1:{ports[1]}"]\n'
    )
    options = ["--task", "0", "--cluster", str(file)]
    servers = [
        jgraph.start("server", "--job", "ps", *options),
        jgraph.start(
            "server", "--job", "worker", *options, "--sigterm-exit-code", "143"
        ),
    ]
    targets = []
    for server in servers:
        assert server.stdout is not None
        found = re.search(r"jgraph://\S+", server.stdout.readline())
        assert found, server.communicate(timeout=10)
        targets.append(found[0])
    with connect(targets[1], token_file=jgraph.token, timeout_s=30) as cluster:
        assert cluster.tasks() == ["/job:ps/task:0", "/job:worker/task:0"]
    for server in servers:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=40)
    assert [server.returncode for server in servers] == [0, 143]


def test_server_on_a_taken_port_says_which(jgraph: Shell) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        spec = {"ps": [f"127.0.0.1:{port}"]}
        config = {"cluster": spec, "task": {"type": "ps", "index": 0}}
        answer = jgraph("server", TF_CONFIG=json.dumps(config))
    assert answer.returncode == 1
    assert answer.stderr.startswith("JG-121")
    assert f"port {port} of 127.0.0.1" in answer.stderr


def test_server_without_cluster_says_what_to_give(jgraph: Shell) -> None:
    answer = jgraph("server", "--job", "ps", "--task", "0")
    assert answer.returncode == 1
    assert answer.stderr.startswith("JG-123")
    assert "--cluster cluster.toml" in answer.stderr
    assert "Traceback" not in answer.stderr


def _runs(pid: int) -> bool:
    # Of what has ended, init may keep the entry for a while.
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def test_cluster_of_no_tasks_is_refused_in_one_sentence(jgraph: Shell) -> None:
    done = jgraph("up", "--ps", "0", "--workers", "0")
    assert done.returncode == 1
    assert done.stderr.startswith("JG-124 a cluster needs at least one task")
    assert len(done.stderr.splitlines()) == 1


def test_server_that_is_not_told_its_task_names_the_options(
    jgraph: Shell, tmp_path: Path
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('[cluster]\nps = ["a:1", "b:1"]\n')
    done = jgraph("server", "--cluster", str(path))
    assert done.returncode == 1
    assert "--job and --task" in done.stderr
