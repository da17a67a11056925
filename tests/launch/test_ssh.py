"""Clusters on hosts, over a real sshd on loopback with keys of its own."""

import getpass
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from jgraph.cluster.client import connect
from jgraph.cluster.spec import ClusterSpec
from jgraph.errors import ClusterSpecError
from jgraph.launch.hosts import (
    Host,
    RemoteTask,
    cluster_file,
    deal,
    packed,
    read_hosts,
    remote_command,
)

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


def test_words_of_the_remote_command_are_quoted() -> None:
    (task,), _ = deal([Host("a", "a")], {"ps": 1}, 1)
    assert "'my venv/bin/jgraph' server --job ps --task 0 " in remote_command(
        task, 5, "'my venv/bin/jgraph'"
    )
    assert RemoteTask(task.task, task.host).stem == "ps-0"


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


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return min(int(free.getsockname()[1]), 65000)


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


@pytest.mark.slow
@pytest.mark.procs
@pytest.mark.parametrize(
    "end",
    [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.nightly)],
    ids=["Ctrl-C", "killed"],
)
def test_a_cluster_on_hosts_serves_and_ends_with_its_command(
    ssh: str, tmp_path: Path, end: signal.Signals
) -> None:
    with up(tmp_path, ssh, "--ps", "1", "--workers", "1", "--json") as running:
        assert running.stdout is not None
        line = running.stdout.readline()
        if not line:
            pytest.fail(running.communicate()[1])
        facts = json.loads(line)
        with connect(facts["target"], tls=facts["tls"], timeout_s=30) as cluster:
            assert cluster.session().run(lambda x: x + 1, 1.0) == 2.0
            pids = [task.pid for task in cluster.status().tasks]
        servers = [psutil.Process(pid) for pid in pids]
        assert len(servers) == 2
        running.send_signal(end)
        out, _ = running.communicate(timeout=60)
    _, alive = psutil.wait_procs(servers, timeout=30)
    assert not alive
    if end == signal.SIGINT:
        assert (running.returncode, json.loads(out)) == (0, {"ended": True})


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
