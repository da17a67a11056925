"""The script of the README that starts the tasks of a host."""

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from jgraph.client.cluster import connect
from jgraph.cluster.spec import ClusterSpec
from jgraph.rpc.security.certificates import make_certificates

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/start_host.py"
HOSTS = ("127.0.0.1", "localhost")
ENVIRON = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def test_the_readme_shows_the_script_as_it_is() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert SCRIPT.read_text(encoding="utf-8") in shown


def cluster_file(directory: Path) -> Path:
    """A ps and a worker, on two names of this machine."""
    free = [socket.socket() for _ in HOSTS]
    for one in free:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in free]
    for one in free:
        one.close()
    a, b = HOSTS
    path = directory / "cluster.toml"
    path.write_text(
        f'[cluster]\nps = ["{a}:{ports[0]}"]\nworker = ["{b}:{ports[1]}"]\n'
        '[tls]\ndir = "certs"\n'
    )
    return path


def start(file: Path, host: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(file), host],
        env=ENVIRON,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_server(script: "subprocess.Popen[str]") -> None:
    assert script.stderr is not None
    if not any("listens on" in line for line in script.stderr):
        pytest.fail(f"the script ended with {script.wait()}")


@pytest.mark.slow
@pytest.mark.procs
def test_the_script_on_two_hosts_makes_a_cluster_and_ends_its_tasks(
    tmp_path: Path,
) -> None:
    file = cluster_file(tmp_path)
    spec = ClusterSpec.from_toml(file)
    make_certificates(tmp_path / "certs", spec.tasks())
    with start(file, HOSTS[0]) as one, start(file, HOSTS[1]) as two:
        for script in (one, two):
            wait_for_server(script)
        target = f"jgraphs://{spec.address('/job:worker/task:0')}"
        try:
            with connect(target, tls=tmp_path / "certs", timeout_s=60) as cluster:
                assert cluster.session().run(lambda x: x + 1, 1.0) == 2.0
                tasks = [psutil.Process(t.pid) for t in cluster.status().tasks]
        except BaseException:
            one.kill()
            two.kill()
            raise
        assert len(tasks) == 2
        one.send_signal(signal.SIGTERM)  # asked to end
        two.kill()  # died
        _, alive = psutil.wait_procs(tasks, timeout=40)
        assert not alive
        assert one.wait(10) == 0, one.communicate()[1]


def test_a_host_that_the_file_does_not_name_is_told(tmp_path: Path) -> None:
    done = start(cluster_file(tmp_path), "nodeX")
    said = done.communicate(timeout=60)[1]
    assert (done.returncode, "no task on 'nodeX'" in said) == (1, True)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.procs
def test_the_commands_of_the_guide_for_several_hosts_start_servers(
    tmp_path: Path,
) -> None:
    guide = (ROOT / "docs/cluster.md").read_text(encoding="utf-8")
    part = guide.partition("## On several hosts")[2]
    file, commands = (
        re.findall(rf"^```{language}\n(.*?)^```", part, re.DOTALL | re.MULTILINE)[0]
        for language in ("toml", "bash")
    )
    path = cluster_file(tmp_path)
    ports = re.findall(r":(\d+)", path.read_text(encoding="utf-8"))
    path.write_text(
        file.replace("nodeA:8470", f"127.0.0.1:{ports[0]}").replace(
            "nodeD:8470", f"localhost:{ports[1]}"
        )
    )
    make, *starts = (line.partition("#")[0].split() for line in commands.splitlines())
    subprocess.run([sys.executable, "-m", *make], cwd=tmp_path, env=ENVIRON, check=True)
    for start_one in starts:
        with subprocess.Popen(
            [sys.executable, "-m", *start_one],
            cwd=tmp_path,
            env=ENVIRON,
            stdout=subprocess.PIPE,
        ) as server:
            assert server.stdout is not None
            said = server.stdout.readline().decode()
            server.kill()
        job, task = start_one[3], start_one[5]
        assert said.startswith(f"/job:{job}/task:{task} serves at jgraphs://")
