"""Who waits for the sockets of gRPC in a process of ours."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jgraph.server import process_setup
from jgraph.server.process_setup import EXPERIMENTS, wait_where_asked
from tests.support.exported import half_plus_three


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXPERIMENTS, "")  # it is put back, whatever a test sets
    monkeypatch.delenv(EXPERIMENTS)


@pytest.mark.parametrize(
    ("installed", "holds"), [("1.85.3", True), ("1.81.0rc1", True), ("2.0", False)]
)
def test_only_a_grpc_that_knows_the_other_way_is_told(
    monkeypatch: pytest.MonkeyPatch, installed: str, holds: bool
) -> None:
    """A newer one would print a line of an unknown name in each process."""
    monkeypatch.setattr(process_setup, "installed_version", lambda _: installed)
    assert wait_where_asked() is holds
    assert (os.environ.get(EXPERIMENTS) == "-event_engine_listener") is holds


def test_what_somebody_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXPERIMENTS, "")
    assert not wait_where_asked()
    assert os.environ[EXPERIMENTS] == ""


@pytest.mark.procs
def test_a_model_server_starts_and_grpc_finds_nothing_to_say(tmp_path: Path) -> None:
    half_plus_three(tmp_path / "models")
    words = ["serve", str(tmp_path / "models"), "--http-port", "-1", "--grpc-port", "0"]
    with subprocess.Popen(
        [sys.executable, "-m", "jgraph", *words, "--drain-s", "0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        assert json.loads(server.stdout.readline())["grpc"]
        server.terminate()
        _, said = server.communicate(timeout=60)
    assert server.returncode == 0
    assert "experiment" not in said
