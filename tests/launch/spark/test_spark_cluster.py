"""Clusters on Spark: a real one on this machine, in a process of its own."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from jgraph.errors import ConfigError
from jgraph.launch.spark.cluster import SparkCluster

ROOT = Path(__file__).parents[3]
SESSION = ROOT / "tests/support/spark_session.py"

pytestmark = [pytest.mark.procs, pytest.mark.timeout(400)]


def test_without_pyspark_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(ConfigError, match=r"pip install 'jgraph\[spark\]'"):
        SparkCluster(None)


def needs_spark() -> None:
    if importlib.util.find_spec("pyspark") is None:
        pytest.skip("needs PySpark: pip install 'jgraph[spark]'")
    if shutil.which("java") is None:
        pytest.skip("needs Java: apt-get install default-jre-headless")


def start(
    directory: Path, master: str, *scenarios: str, **settings: str
) -> "subprocess.Popen[str]":
    needs_spark()
    temporary = directory / "temporary"
    temporary.mkdir(exist_ok=True)
    told = {"spark.local.dir": str(temporary), **settings}
    with (directory / "errors").open("w") as errors:
        return subprocess.Popen(
            [sys.executable, str(SESSION), master, *scenarios],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=directory,
            env={
                **os.environ,
                "TMPDIR": str(temporary),
                "PYTHONPATH": str(ROOT),
                "SCENARIO_DIRECTORY": str(directory / "saved"),
                "SCENARIO_SETTINGS": json.dumps(told),
            },
        )


def facts_of(process: "subprocess.Popen[str]", directory: Path) -> dict[str, Any]:
    out, _ = process.communicate()
    errors = (directory / "errors").read_text()
    assert process.returncode == 0, errors
    found = {}
    for line in out.splitlines():
        facts = json.loads(line)
        assert "failure" not in facts, facts["failure"] + errors[-4000:]
        found[facts["scenario"]] = facts
    return found


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What was seen in one session of three slots."""
    directory = tmp_path_factory.mktemp("spark")
    process = start(directory, "local[3]", "train", "refusals", "stop_inside")
    with process:
        yield facts_of(process, directory)
    left = [str(path) for path in (directory / "temporary").rglob("*jgraph*")]
    assert not left


def test_a_model_is_trained_on_spark_and_nothing_is_left(day: dict[str, Any]) -> None:
    found = day["train"]
    assert found["steps"] == 300
    assert found["result"] == pytest.approx(3, abs=0.01)
    assert found["ready_s"] < 60
    assert found["target"].startswith("jgraphs://127.0.0.1:")
    assert "/job:ps/task:0 listens on 127.0.0.1:" in found["log"]
    assert sorted(found["pids"]) == sorted(found["running"])
    assert found["left_s"] < 10
    assert found["jobs_left"] == 0
    assert not found["secrets_left"]


def test_no_private_key_of_a_task_is_on_the_driver(day: dict[str, Any]) -> None:
    keys = {"client.key", "launcher.key"}
    assert {f for f in day["train"]["files"] if f.endswith(".key")} == keys


def test_a_server_that_is_killed_is_started_again_in_its_spark_task(
    day: dict[str, Any],
) -> None:
    found = day["train"]
    assert found["killed"] == ["/job:worker/task:1"]
    assert found["same_address"]
    assert found["back_s"] < 30
    assert (
        "died: /job:worker/task:1 died (SIGKILL); starting it again"
        in (found["events"])
    )


def test_a_server_ends_with_its_spark_task_and_gets_another(
    day: dict[str, Any],
) -> None:
    found = day["train"]
    assert found["server_outlives_its_spark_task_s"] < 10
    assert found["lost"] == ["/job:worker/task:1"]
    assert any("the loss of its Spark task on " in event for event in found["events"])


def test_what_cannot_be_a_cluster_on_spark_is_refused_in_words(
    day: dict[str, Any],
) -> None:
    found = day["refusals"]
    assert found["nobody"].startswith("JG-124 a cluster needs at least one task")
    assert "takes a SparkSession, not 'local[2]'" in found["no_session"]
    assert "the master local[3] has 3; make the session with" in found["too_many"]
    assert "write workers=2" in found["misspelled"]
    assert "../other" in found["unsafe_job"]
    assert found["left"] == found["jobs_left"] == 0


def test_executors_without_jgraph_are_named_in_a_table(day: dict[str, Any]) -> None:
    found = day["refusals"]
    assert found["no_python"].startswith("JG-141 ")
    assert "there is no program /no/such/python" in found["no_python"]
    assert "jax is not installed" in found["bare_python"]
    lines = found["bare_python"].splitlines()
    assert lines[1].split() == ["host", "program", "python", "jgraph", "jax"]
    assert lines[2].split()[:2] == ["the", "driver"]
    assert "/usr/bin/python3" in lines[3]
    assert lines[3].split()[-1] == "none"


def test_servers_end_when_spark_is_stopped_and_the_cluster_says_so(
    day: dict[str, Any],
) -> None:
    found = day["stop_inside"]
    assert found["there"] == 2
    assert found["left_s"] < 10
    assert found["error"].startswith("JG-131 ")
    assert "the Spark application has ended" in found["error"]
    assert "make a new jg.SparkCluster" in found["error"]
    assert "was given a session that was stopped" in found["stopped"]
    assert not found["secrets_left"]


@pytest.mark.nightly
def test_servers_end_when_the_driver_is_killed(tmp_path: Path) -> None:
    with start(tmp_path, "local[2]", "leave_open") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (tmp_path / "errors").read_text()
        found = json.loads(line)
        family = [psutil.Process(pid) for pid in found["servers"] + found["family"]]
        process.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive


@pytest.mark.nightly
def test_missing_slots_are_named_and_two_clusters_share_an_application(
    tmp_path: Path,
) -> None:
    with start(tmp_path, "local[3]", "crowded") as process:
        found = facts_of(process, tmp_path)["crowded"]
    assert (
        "Spark has started 1 of 2 tasks; it has 3 slots in all within 8 s"
        in (found["missing"])
    )
    assert found["missing"].startswith("JG-134 ")
    assert found["took_s"] < 30
    assert found["sums"] == pytest.approx([2.2847824, 2.2847824])


@pytest.mark.nightly
def test_a_run_goes_on_when_its_ps_is_at_another_address(tmp_path: Path) -> None:
    with start(tmp_path, "local[3]", "moved") as process:
        found = facts_of(process, tmp_path)["moved"]
    assert found["moved"]
    assert found["lost"] == [["/job:ps/task:0"]]
    assert found["result"] == pytest.approx(3, abs=0.01)
