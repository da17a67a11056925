"""Wide & Deep: reading the census files, their features, and training."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jgraph import cli
from jgraph.client.cluster import Cluster
from jgraph.errors import DataError
from jgraph.examples import wide_deep
from jgraph.examples.census import CROSSES, WIDE_ROWS, load, read_table
from jgraph.examples.options import Options
from tests.support.example_data import real, write_census

LINE = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, ?, Not-in-family, White, "
    "Male, 2174, 0, 40, United-States, <=50K"
)


def read(tmp_path: Path, *lines: str) -> dict[str, object]:
    path = tmp_path / "adult.data"
    path.write_text("\n".join(lines))
    return {name: column.tolist() for name, column in read_table(path).items()}


def test_what_is_no_record_is_left_out(tmp_path: Path) -> None:
    table = read(tmp_path, "age,workclass,…", "|1x3 Cross validator", "", LINE + ".")
    assert table["age"] == [39.0]
    assert table["workclass"] == ["State-gov"]
    assert table["income"] == [0.0]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("39, State-gov", "adult.data:2 has 2 fields; there must be 15"),
        (LINE.replace("<=50K", "50K"), "adult.data:2 has the label '50K'"),
        (
            LINE.replace("39", "old"),
            "adult.data:2 has age 'old', which is not a number",
        ),
    ],
)
def test_a_line_that_is_no_record_is_named(
    tmp_path: Path, line: str, complaint: str
) -> None:
    with pytest.raises(DataError, match=complaint):
        read(tmp_path, LINE, line)


def test_a_file_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no records"):
        read(tmp_path, "|1x3 Cross validator")


def test_a_directory_without_the_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"adult\.data is not there; give --data"):
        load(tmp_path)


def test_a_missing_value_has_no_row_in_the_wide_part_and_one_in_the_deep(
    tmp_path: Path,
) -> None:
    (tmp_path / "adult.test").write_text(LINE)
    (tmp_path / "adult.data").write_text(f"{LINE}\n{LINE.replace('?', 'Sales')}")
    train, test = load(tmp_path)
    missing, known = train["wide"]
    absent = (missing == -1).sum()
    crosses = sum("occupation" in names for names in CROSSES)
    assert absent == 1 + crosses
    assert (known >= 0).all()
    assert known.max() < WIDE_ROWS
    assert np.array_equal(missing[missing >= 0], known[missing >= 0])
    assert (train["deep"] >= 0).all()
    assert np.array_equal(test["wide"][0], missing)


def test_ages_of_one_bucket_share_a_row(tmp_path: Path) -> None:
    (tmp_path / "adult.test").write_text(LINE)
    lines = [LINE.replace("39", age) for age in ("35", "39", "40")]
    (tmp_path / "adult.data").write_text("\n".join(lines))
    train, _ = load(tmp_path)
    assert np.array_equal(train["wide"][0], train["wide"][1])
    assert not np.array_equal(train["wide"][1], train["wide"][2])
    assert train["numbers"][:, 0].mean() == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_it_learns_what_two_columns_say_together_and_moves_only_rows(
    tmp_path: Path, cluster: Cluster
) -> None:
    said: list[str] = []
    options = Options(steps=200, say=said.append)
    figures = wide_deep.run(write_census(tmp_path), cluster, options)
    assert figures["accuracy"] > 0.95 > figures["majority"]
    plan = "\n".join(said)
    assert "params/wide/embedding travels by rows" in plan
    assert "params/deep/embedding travels by rows" in plan
    assert re.search(r"params/wide/embedding .* 2 shards", plan)


@pytest.mark.nightly
@pytest.mark.slow
def test_income_of_the_census_is_told_better_than_by_the_majority() -> None:
    options = Options(steps=800)
    figures = wide_deep.run(real("census"), None, options)
    assert figures["accuracy"] >= 0.845
    assert figures["majority"] == pytest.approx(0.7638)


@pytest.mark.slow
@pytest.mark.procs
def test_the_command_prints_one_line_of_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["--ps", "1", "--workers", "1", "--steps", "3"]
    data = ["--data", str(write_census(tmp_path, 200))]
    with pytest.raises(SystemExit) as stop:
        cli.main(["examples", "wide-deep", *data, *size, "--json"])
    assert not stop.value.code
    (line,) = capsys.readouterr().out.splitlines()
    figures = json.loads(line)
    assert {"accuracy", "loss", "seconds"} <= set(figures)
    assert (figures["example"], figures["ps"], figures["steps"]) == ("wide-deep", 1, 3)
