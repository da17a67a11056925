"""Drivers of Spark for tests, each in a process of its own."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SESSION = ROOT / "tests/support/spark_session.py"


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
