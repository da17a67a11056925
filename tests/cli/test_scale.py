"""The commands that change how many workers a cluster has."""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest

from tests.support.cli import Shell
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.procs, pytest.mark.timeout(150)]


@pytest.fixture
def jgraph(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    if any((tmp_path / "clusters").glob("*.json")):
        shell("down")


Here: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def here(jgraph: Shell, capsys: pytest.CaptureFixture[str]) -> Here:
    return partial(jgraph.here, capsys)


def workers(here: Here, *words: str) -> list[str]:
    """Scales a cluster; returns its workers then."""
    told = here("scale", *words, "--json", "--timeout", "90")
    assert told.returncode == 0, told.stderr
    return [task.rpartition(":")[2] for task in json.loads(told.stdout)["workers"]]


def joined_as(server: subprocess.Popen[str]) -> str:
    """Waits until a server has joined; returns as which task."""
    assert server.stdout is not None
    return str(json.loads(server.stdout.readline())["task"])


def ended(server: subprocess.Popen[str]) -> int:
    """Waits for the end of a server; returns its exit code."""
    server.communicate(timeout=60)
    return server.returncode


def test_a_cluster_of_this_machine_has_more_workers_and_fewer(
    jgraph: Shell, here: Here, tmp_path: Path
) -> None:
    started = jgraph("up", "--ps", "1", "--workers", "2", "--json")
    assert started.returncode == 0, started.stderr
    target = json.loads(started.stdout)["target"]

    def pids() -> dict[str, int]:
        state = json.loads(next((tmp_path / "clusters").glob("*.json")).read_text())
        return dict(state["pids"])

    psutil.Process(pids()["/job:worker/task:1"]).kill()
    assert workers(here, "--workers", "1") == ["0"]
    # Nor is it started again: it has left.
    wait_until(lambda: "/job:worker/task:1" not in pids())
    assert workers(here, "--workers", "2") == ["0", "1"]
    assert "/job:worker/task:1" in pids()
    more = jgraph.start("server", "--job", "worker", "--join", target, "--json")
    assert joined_as(more) == "/job:worker/task:2"
    shown = json.loads(here("status", "--json").stdout)
    assert len(shown["tasks"]) == 4
    assert shown["arrangement"] == 4  # one was told to leave, and left, and two joined
    assert workers(here, target, "--workers", "-1") == ["0", "1"]
    assert ended(more) == 0
    assert workers(here, "--workers", "1") == ["0"]
    moved = here("scale", "--ps", "2", "--json", "--timeout", "90")
    assert json.loads(moved.stdout)["ps"] == ["/job:ps/task:0", "/job:ps/task:1"]
    moved = here("scale", "--ps", "-1", "--timeout", "90")
    assert moved.stdout.startswith("1 ps after"), moved.stderr
    refused = here("scale", target, "--workers", "3")
    assert refused.returncode == 1
    assert refused.stderr.startswith("JG-144")
    assert f"--join {target}" in refused.stderr
    joins = jgraph("server", "--join", target, "--task", "3")
    assert joins.stderr.startswith("JG-124 --join does not go with --task")


@pytest.mark.nightly
def test_one_that_joins_ends_when_it_is_told_to_and_has_left_then(
    jgraph: Shell,
) -> None:
    started = jgraph("up", "--ps", "1", "--workers", "0", "--json")
    target = json.loads(started.stdout)["target"]
    more = jgraph.start("server", "--join", target, "--json")
    assert joined_as(more) == "/job:worker/task:0"
    more.send_signal(signal.SIGTERM)
    assert ended(more) == 0
    shown = json.loads(jgraph("status", "--json").stdout)
    assert [task["task"] for task in shown["tasks"]] == ["/job:ps/task:0"]
    assert shown["missing"] == []


def test_certificates_of_workers_that_may_join_are_made_with_the_others(
    here: Here, tmp_path: Path
) -> None:
    made = here(
        *("certs", str(tmp_path / "made"), "--ps", "1", "--workers", "2"),
        *("--spare", "2", "--json"),
    )
    assert made.returncode == 0, made.stderr
    names = {Path(file).name for file in json.loads(made.stdout)}
    assert {"worker-2.crt", "worker-3.key", "ps-0.crt"} <= names
    assert "worker-4.crt" not in names
