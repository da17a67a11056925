"""Wide & Deep on Spark: from DataFrames to a scored DataFrame, as one types it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jgraph import cli
from tests.support.example_data import real, write_census
from tests.support.spark_driver import ROOT, needs_spark


@pytest.mark.nightly
@pytest.mark.procs
@pytest.mark.timeout(400)
@pytest.mark.parametrize("data", ["small", "census"])
def test_the_command_trains_and_scores_by_spark(tmp_path: Path, data: str) -> None:
    needs_spark()
    small = data == "small"
    directory = write_census(tmp_path) if small else real("census")
    steps = "200" if small else "800"
    command = ["-m", "jgraph", "examples", "wide-deep", "--data", str(directory)]
    done = subprocess.run(
        [sys.executable, *command, "--spark", "local[3]", "--steps", steps, "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    figures = json.loads(line)
    assert figures["rows"] == (100 if small else 16281)
    assert figures["accuracy"] > (0.95 if small else 0.84) > figures["majority"]
    assert (figures["ps"], figures["workers"]) == (1, 2)


def test_without_pyspark_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    data = ["--data", str(write_census(tmp_path, 20))]
    with pytest.raises(SystemExit) as stop:
        cli.main(["examples", "wide-deep", *data, "--spark", "local[3]"])
    assert stop.value.code
    assert "pip install 'jgraph[spark]'" in capsys.readouterr().err
