"""Clusters on hosts, over a real sshd on loopback with keys of its own."""

import getpass
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer

from jgraph.cli import hosts_up
from jgraph.client.cluster import connect
from jgraph.cluster.spec import ClusterSpec
from jgraph.errors import ClusterSpecError, ConfigError
from jgraph.graph.device import TaskName
from jgraph.launch.hosts import (
    Host,
    RemoteTask,
    cluster_file,
    deal,
    look_command,
    packed,
    read_hosts,
    remote_command,
)
from jgraph.launch.ssh import HostsCluster
from tests.support.free_port import free_port
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "said"),
    [("# none\n", "names no host"), ("a\nb c d\n", "hosts.txt:2"), ("-oX=y\n", ":1")],
)
def test_a_hosts_file_that_is_none_says_where(text: str, said: str) -> None:
    with pytest.raises(ClusterSpecError, match=said):
        read_hosts(text, "hosts.txt")


def test_a_cluster_file_of_dealt_tasks_is_one(tmp_path: Path) -> None:
    _, spec = deal(read_hosts("a\nb", "h"), {"ps": 1, "worker": 2}, 9000)
    path = tmp_path / "cluster.toml"
    path.write_bytes(cluster_file(spec))
    assert ClusterSpec.from_toml(path).as_dict() == spec.as_dict()


def test_packed_files_are_for_their_owner_alone() -> None:
    with tarfile.open(fileobj=io.BytesIO(packed({"token": b"x"}))) as archive:
        (entry,) = archive.getmembers()
        assert (entry.name, entry.mode, entry.size) == ("token", 0o600, 1)


@pytest.mark.parametrize("home", ["~", "~ada"])
def test_a_tilde_before_the_remote_command_is_the_home_there(home: str) -> None:
    (task,), _ = deal([Host("a", "a")], {"ps": 1}, 1)
    command = remote_command(task, 5, "jgraph-1", f"'{home}/my venv/jgraph' ~/x")
    assert f"{home}/'my venv/jgraph' '~/x' server --job ps" in command


def test_words_of_the_remote_command_are_quoted() -> None:
    (task,), _ = deal([Host("a", "a")], {"ps": 1}, 1)
    assert "'my venv/bin/jgraph' server --job ps --task 0 " in remote_command(
        task, 5, "jgraph-1", "'my venv/bin/jgraph'"
    )
    assert RemoteTask(task.task, task.host).stem == "ps-0"
    joiner = RemoteTask(
        TaskName("/job:worker/task:2"), Host("b", "b c"), "jgraphs://a:1", 9
    )
    command = remote_command(joiner, 5, "jgraph-1", "jgraph")
    assert "server --job worker --join jgraphs://a:1 --host 'b c' --port 9 " in command
    assert "--cluster" not in command
    assert "insecure" not in command
    accepts = replace(joiner, insecure_i_accept=True)
    command = remote_command(accepts, 5, "jgraph-1", "jgraph")
    assert command.endswith(" --overdue-s 10 --insecure-i-accept")


@pytest.mark.parametrize(
    ("ssh", "jgraph", "said"),
    [
        ("ssh 'x", "jgraph", '--ssh is "ssh \'x", which is no command'),
        ("ssh", " ", "--remote is ' ', which is no command"),
        ("/nowhere/ssh -p 2", "jgraph", "no command '/nowhere/ssh' on this machine"),
    ],
)
def test_what_is_no_command_starts_nothing(
    tmp_path: Path, ssh: str, jgraph: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        HostsCluster([Host("a", "a")], {"ps": 1}, tmp_path, ssh=ssh, jgraph=jgraph)


def test_logs_go_on_into_files_when_nobody_reads_the_terminal_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def closed(line: str, *, err: bool) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(typer, "echo", closed)
    hosts_up._say("[ps-0] a line")


def test_who_is_told_to_end_waits_for_no_task_that_starts(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/sh\nfor last; do :; done\n"
        'case "$last" in *" server --job "*) cat > /dev/null;; esac\n'
    )
    ssh.chmod(0o700)
    stop = threading.Event()
    stop.set()
    hosts, port = [Host("a", "127.0.0.1")], free_port()
    with HostsCluster(hosts, {"ps": 1}, tmp_path, port=port, ssh=str(ssh)) as cluster:
        cluster.wait(600, stop)


# ---------------------------------------------------------------- over a real sshd


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[str]:
    """The ssh command that reaches this machine by the names one and two."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if sshd is None or shutil.which("ssh-keygen") is None:
        pytest.skip("needs sshd: apt-get install openssh-server")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # it insists
    for name in ("host", "user"):
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", name]
        subprocess.run(key, cwd=tmp_path, check=True)
    port = free_port()
    (tmp_path / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {tmp_path}/host\nPidFile none\n"
        f"AuthorizedKeysFile {tmp_path}/user.pub\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nPermitRootLogin yes\nMaxStartups 20\n"
    )
    (tmp_path / "ssh_config").write_text(
        f"Host one two\n HostName 127.0.0.1\n Port {port}\n"
        f" IdentityFile {tmp_path}/user\n IdentitiesOnly yes\n"
        f" UserKnownHostsFile {tmp_path}/known\n StrictHostKeyChecking accept-new\n"
        f" User {getpass.getuser()}\n"
    )
    with subprocess.Popen(
        [sshd, "-D", "-e", "-f", str(tmp_path / "sshd_config")],
        stderr=subprocess.PIPE,
        text=True,
    ) as daemon:
        assert daemon.stderr is not None
        assert "listening" in daemon.stderr.readline()
        yield f"ssh -F {tmp_path}/ssh_config"
        daemon.terminate()


def up(
    tmp_path: Path, ssh: str, *options: str, remote: str | None = None
) -> "subprocess.Popen[str]":
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("one 127.0.0.1\ntwo 127.0.0.1\n")
    here = f"env JAX_PLATFORMS=cpu PYTHONPATH={ROOT} {sys.executable} -m jgraph"
    options = ("--hosts", str(hosts), "--remote", remote or here, *options)
    port = str(free_port())
    return subprocess.Popen(
        [sys.executable, "-m", "jgraph", "up", "--ssh", ssh, "--port", port, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Where its certificates stay if it is killed.
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )


def started(running: "subprocess.Popen[str]") -> dict[str, Any]:
    """What the command says of its cluster, once it serves."""
    assert running.stdout is not None
    if not (line := running.stdout.readline()):
        pytest.fail(running.communicate()[1])
    return dict(json.loads(line))


@pytest.mark.nightly
@pytest.mark.procs
def test_a_task_on_a_host_is_started_again_until_it_dies_too_often(
    ssh: str, tmp_path: Path
) -> None:
    options = ("--ps", "1", "--workers", "1", "--restarts", "1", "--json")
    with up(tmp_path, ssh, *options) as running:
        facts = started(running)
        with connect(facts["target"], tls=facts["tls"], timeout_s=30) as cluster:
            assert cluster.session().run(lambda x: x + 1, 1.0) == 2.0
            ps, worker = cluster.status().tasks
            psutil.Process(worker.pid).kill()
            errors = logged_until(running, "worker:0 serves again, without what it")
            assert "worker:0 died (exit code 137); starting it" in errors
            same, again = cluster.status().tasks
            assert same.incarnation == ps.incarnation
            assert again.incarnation != worker.incarnation
            psutil.Process(again.pid).kill()
            logged_until(running, "worker:0 died 2 times in 60 s, at last by exit")
            logged_until(running, "worker:0 listens on")  # the end of its log
            assert [str(t) for t in cluster.status().missing] == [again.task]
        running.send_signal(signal.SIGINT)
        out, _ = running.communicate(timeout=60)
    assert (running.returncode, json.loads(out)) == (0, {"ended": True})
    assert not psutil.pid_exists(ps.pid)
    log = Path(facts["log_dir"], "worker-0.log").read_text(encoding="utf-8")
    assert log.count("/job:worker/task:0 serves at ") == 2
    assert not list(tmp_path.glob("jgraph-*")), "nor are certificates left"


def logged_until(running: "subprocess.Popen[str]", end: str) -> str:
    assert running.stderr is not None
    lines = []
    for line in running.stderr:
        lines.append(line)
        if end.replace("worker:0", "/job:worker/task:0") in line:
            return "".join(lines).replace("/job:worker/task:0", "worker:0")
    return pytest.fail("".join(lines))


@pytest.mark.nightly
@pytest.mark.procs
def test_workers_join_and_leave_as_the_hosts_file_says(
    ssh: str, tmp_path: Path
) -> None:
    with up(tmp_path, ssh, "--ps", "1", "--workers", "1", "--json") as running:
        facts, hosts = started(running), tmp_path / "hosts.txt"
        lines = hosts.read_text()

        def become(text: str) -> None:
            hosts.write_text(text)
            running.send_signal(signal.SIGHUP)

        with connect(facts["target"], tls=facts["tls"], timeout_s=30) as cluster:

            def are(workers: int) -> bool:
                cluster.refresh()
                return len(cluster.tasks("worker")) == workers

            become(f"{lines}one 127.0.0.1\n")
            wait_until(lambda: are(2), 60)
            become("-F one\n")
            logged_until(running, "the cluster stays as it is")
            assert are(2)
            become(lines)
            wait_until(lambda: are(1), 60)
            become(f"{lines}two 127.0.0.1\n" * 2)  # a line twice is two workers
            wait_until(lambda: are(5), 60)
            there = {str(task.task): task.pid for task in cluster.status().tasks}
            psutil.Process(there["/job:worker/task:2"]).kill()
            become(lines)  # the one that was lost has no line any more either
            wait_until(lambda: are(1), 60)
            become("one 127.0.0.1\n")
            logged_until(running, "two keeps its tasks")
            assert are(1)
        running.send_signal(signal.SIGINT)
        out, said = running.communicate(timeout=60)
    assert running.returncode == 0, said
    assert json.loads(out) == {"ended": True}
    for log in Path(facts["log_dir"]).glob("worker-[1-9].log"):
        assert log.read_text(encoding="utf-8").count(" serves at ") == 1


@pytest.mark.nightly
@pytest.mark.procs
def test_a_worker_leaves_whose_line_went_before_it_was_there(
    ssh: str, tmp_path: Path
) -> None:
    with up(tmp_path, ssh, "--ps", "1", "--workers", "1", "--json") as running:
        facts, hosts = started(running), tmp_path / "hosts.txt"
        lines = hosts.read_text()
        for text, end in [
            (f"{lines}one 127.0.0.1\n", "worker/task:1 joins on one"),
            (lines, "worker/task:1 is told to leave"),
        ]:
            hosts.write_text(text)
            running.send_signal(signal.SIGHUP)
            logged_until(running, end)
        with connect(facts["target"], tls=facts["tls"], timeout_s=30) as cluster:
            wait_until(lambda: len(cluster.renewed_tasks("worker")) == 1, 60)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert running.returncode == 0, said


@pytest.mark.procs
def test_tasks_on_hosts_end_when_their_command_is_killed(
    ssh: str, tmp_path: Path
) -> None:
    with up(tmp_path, ssh, "--ps", "1", "--workers", "1", "--json") as running:
        facts = started(running)
        with connect(facts["target"], tls=facts["tls"], timeout_s=30) as cluster:
            assert cluster.session().run(lambda x: x + 1, 1.0) == 2.0
            servers = [psutil.Process(task.pid) for task in cluster.status().tasks]
        running.kill()
    _, alive = psutil.wait_procs(servers, timeout=30)
    assert (len(servers), alive) == (2, [])


def test_a_process_that_is_left_on_a_host_is_told(tmp_path: Path) -> None:
    (tmp_path / "jgraph-1.abc").mkdir()
    left = [sys.executable, "-c", "input()", "jgraph-1.abc/cluster.toml"]
    with subprocess.Popen(left, stdin=subprocess.PIPE) as process:
        out = look(tmp_path, "jgraph-1")
        assert process.stdin is not None
        process.stdin.close()
    assert out.split() == [str(process.pid)]
    assert not list(tmp_path.iterdir())
    assert not look(tmp_path, "jgraph-1")


def look(directory: Path, run: str) -> str:
    return subprocess.run(
        ["sh", "-c", look_command(run)],
        env={"PATH": os.environ["PATH"], "TMPDIR": str(directory)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


@pytest.mark.procs
def test_a_host_without_jgraph_is_named_with_what_it_said(
    ssh: str, tmp_path: Path
) -> None:
    running = up(tmp_path, ssh, "--workers", "1", remote="no-such-command")
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (1, "")
    sentence = next(line for line in err.splitlines() if line.startswith("JG-134 "))
    assert "ended with exit code 127" in sentence
    assert "no-such-command" in err
