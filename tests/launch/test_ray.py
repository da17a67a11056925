"""Clusters on Ray: a real one on this machine, in a process of its own."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from jgraph.errors import ConfigError
from jgraph.launch.ray_cluster import RayCluster

ROOT = Path(__file__).parents[2]
SESSION = ROOT / "tests/support/ray_session.py"


def test_without_ray_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'jgraph\[ray\]'"):
        RayCluster(ps=1, workers=1)


@pytest.fixture
def directory() -> Iterator[str]:
    """For the files of Ray; short, since sockets are among them."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: pip install 'jgraph[ray]'")
    made = tempfile.mkdtemp(prefix="ray-")
    yield made
    shutil.rmtree(made, ignore_errors=True)


def start(directory: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(SESSION), directory, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "TMPDIR": directory,
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "disabled",  # else a token goes into the user's home
            "RAY_USAGE_STATS_ENABLED": "0",
        },
    )


@pytest.fixture
def session(directory: str) -> Iterator["subprocess.Popen[str]"]:
    with start(directory) as process:
        yield process
        process.kill()


@pytest.mark.nightly
@pytest.mark.procs
@pytest.mark.timeout(240)  # Ray's own processes take their time on a busy machine
def test_a_run_goes_on_when_ray_has_made_its_ps_again(
    directory: str, tmp_path: Path
) -> None:
    with start(directory, str(tmp_path / "run")) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    found = json.loads(out.splitlines()[-1])
    assert found["lost"] == [["/job:ps/task:0"]]
    assert found["result"] == pytest.approx(3, abs=0.01)


@pytest.mark.nightly
@pytest.mark.procs
@pytest.mark.timeout(240)
def test_a_worker_joins_and_leaves_a_cluster_on_ray(directory: str) -> None:
    with start(directory, "scale") as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    found: dict[str, Any] = {}
    for line in out.splitlines():
        found |= json.loads(line)
    workers = ["/job:worker/task:0", "/job:worker/task:1"]
    assert found["grown"] == found["again"] == workers
    assert found["free"] == 0.5
    assert found["shrunk"] == workers[:1]
    states = dict(found["members"])
    assert states == {workers[0]: "takes part", workers[1]: "left"}
    assert found["state"] == "stopped"


@pytest.mark.nightly
@pytest.mark.procs
@pytest.mark.timeout(240)
def test_a_task_whose_node_is_lost_is_not_waited_for(directory: str) -> None:
    with start(directory, "node") as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    *_, said = map(json.loads, out.splitlines())
    assert "was lost with its node of Ray, and does not move to another" in said["lost"]
    assert said["lost"].startswith("JG-131 /job:")
    assert "make a new jg.RayCluster" in said["lost"]


@pytest.mark.nightly
@pytest.mark.procs
@pytest.mark.timeout(240)
def test_a_cluster_on_ray_computes_is_made_again_and_ends_with_its_client(
    session: "subprocess.Popen[str]",
) -> None:
    assert session.stdout is not None
    found: dict[str, Any] = {}
    while "pids" not in found:
        if not (line := session.stdout.readline()):
            pytest.fail(session.communicate()[1])
        found |= json.loads(line)
    assert "4 tasks ask for 4 CPU, Ray has 2" in found["shortage"]
    assert found["shortage"].startswith("JG-134 ")
    assert "resources names 'wroker'" in found["no_such_job"]

    assert found["sum"] == found["again"] == pytest.approx(2.2847824)
    assert found["target"].startswith("jgraphs://")
    assert found["other"] == ["/job:ps/task:0"]
    assert not found["same_process"]
    address = found["log"].rpartition("listens on ")[2]
    assert address.rpartition(":")[2].isdecimal()
    assert found["free"] == 0, "a task that is back has its CPU again"
    assert found["over"].startswith("JG-131 /job:ps/task:0 died. The end of its log:")
    assert "more restarts" in found["over"]

    actors = [psutil.Process(pid) for pid in found["pids"]]
    session.kill()
    _, alive = psutil.wait_procs(actors, timeout=30)
    assert not alive
