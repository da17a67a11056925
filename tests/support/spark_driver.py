"""Drivers of Spark for tests, each in a process of its own."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from jgraph.clock import SystemClock

ROOT = Path(__file__).parents[2]
SESSION = ROOT / "tests/support/spark_session.py"
START_S: Final = 120.0


def needs_spark() -> None:
    if importlib.util.find_spec("pyspark") is None:
        pytest.skip("needs PySpark: pip install 'jgraph[spark]'")
    if shutil.which("java") is None:
        pytest.skip("needs Java: apt-get install default-jre-headless")


def start(
    directory: Path,
    master: str,
    *scenarios: str,
    spark_home: Path | None = None,
    settings: Mapping[str, str] | None = None,
) -> "subprocess.Popen[str]":
    needs_spark()
    temporary = directory / "temporary"
    temporary.mkdir(exist_ok=True)
    chosen = {"spark.local.dir": str(temporary), **(settings or {})}
    home = {} if spark_home is None else {"SPARK_HOME": str(spark_home)}
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
                "SCENARIO_SETTINGS": json.dumps(chosen),
                **home,
            },
        )


class Facts:
    """What scenarios have seen, by name."""

    def __init__(self, of: Mapping[str, dict[str, Any]], errors: str) -> None:
        self._of = of
        self._errors = errors

    def __getitem__(self, name: str) -> dict[str, Any]:
        facts = self._of[name]
        assert "failure" not in facts, facts["failure"] + self._errors[-4000:]
        return facts


def facts_of(process: "subprocess.Popen[str]", directory: Path) -> Facts:
    out, _ = process.communicate()
    errors = (directory / "errors").read_text()
    assert process.returncode == 0, errors
    facts = [json.loads(line) for line in out.splitlines()]
    return Facts({one["scenario"]: one for one in facts}, errors)


@contextmanager
def standalone(directory: Path, workers: int) -> Iterator[str]:
    """Starts Spark's own cluster manager at loopback; yields its address.

    Args:
      directory: for logs, and what executors leave.
      workers: how many, of two cores each.
    """
    needs_spark()
    import pyspark

    program = Path(pyspark.__file__).parent / "bin" / "spark-class"
    package = "org.apache.spark.deploy"
    here = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    daemons: list[subprocess.Popen[bytes]] = []

    def begin(name: str, *arguments: str) -> Path:
        log = directory / f"{name}{len(daemons)}.log"
        with log.open("w") as out:
            command = [str(program), f"{package}.{name.lower()}.{name}", *here]
            daemons.append(
                subprocess.Popen(
                    [*command, *arguments],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "SPARK_DAEMON_MEMORY": "256m"},
                )
            )
        return log

    try:
        master = _said(begin("Master"), r"spark://127\.0\.0\.1:\d+")
        size = ["--cores", "2", "--memory", "1g", "--work-dir", str(directory / "work")]
        logs = [begin("Worker", *size, master) for _ in range(workers)]
        for log in logs:
            _said(log, "Successfully registered with master")
        yield master
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(30)


def _said(log: Path, words: str) -> str:
    """Waits for a line of a log, and returns what of it matches."""
    clock = SystemClock()
    deadline = clock.now() + START_S
    while not (found := re.search(words, log.read_text())):
        assert clock.now() < deadline, log.read_text()[-2000:]
        threading.Event().wait(0.1)
    return found[0]


def spark_home(directory: Path) -> Path:
    """Makes a home of Spark whose executors work below a directory of the test."""
    needs_spark()
    import pyspark

    home = directory / "home"
    home.mkdir()
    for path in Path(pyspark.__file__).parent.iterdir():
        if path.name in {"bin", "jars", "sbin", "python", "data"}:
            (home / path.name).symlink_to(path)
    return home
