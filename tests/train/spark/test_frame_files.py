"""Where a DataFrame may be written, and which of its columns, without a JVM."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jgraph.client.spark.slots import held_slots, hold, is_local
from jgraph.errors import ConfigError
from jgraph.train.spark.frame_files import _directory, check_columns

FRAME = SimpleNamespace(columns=["dense", "ids", "label"])


def test_a_new_or_empty_directory_by_its_whole_path_will_do(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        assert _directory(FRAME, tmp_path / name) == tmp_path / name
        assert _directory(FRAME, (tmp_path / name).as_uri()) == tmp_path / name


@pytest.mark.bad_input_row(30)
@pytest.mark.parametrize(
    ("directory", "complaint"),
    [
        ("hdfs:///data/x", "mount hdfs on all hosts"),
        ("s3a://bucket/x", "mount s3a on all hosts"),
        ("data", "write a whole path from / on"),
        ("/data/../etc", "write a whole path from / on"),
        ("/data/*", "write a whole path from / on"),
        ("/data/[ab]", "write a whole path from / on"),
        ("/data/{ab}", "write a whole path from / on"),
        ("/data/a\\b", "write a whole path from / on"),
    ],
)
def test_a_directory_that_will_not_do_is_refused(
    directory: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        _directory(FRAME, directory)


@pytest.mark.bad_input_row(30)
def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.parquet").touch()
    with pytest.raises(ConfigError, match=r"read it as jg\.Source\.parquet"):
        _directory(FRAME, tmp_path)
    with pytest.raises(ConfigError, match="there is something in"):
        _directory(FRAME, tmp_path / "mine.parquet")


def test_columns_are_those_that_are_named_or_all() -> None:
    assert check_columns(FRAME, None) == ["dense", "ids", "label"]
    assert check_columns(FRAME, ["label", "ids"]) == ["label", "ids"]


@pytest.mark.bad_input_row(30)
@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        (["lable"], "did you mean 'label'"),
        (["ids", "ids"], "'ids' comes twice"),
        ([], "no column is named"),
        (["LABEL"], "did you mean 'label'"),
        ("ids", r"write a list of names: columns=\['ids'\]"),
        (5, r"columns is 5; write a list of names: columns=\['dense', 'ids'\]"),
        ([1], r"columns is \[1\]; write a list of names"),
    ],
)
def test_columns_that_are_not_there_are_refused(columns: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_columns(FRAME, columns)


def test_slots_of_two_clusters_add_up_and_are_given_back() -> None:
    hold("an application", 3)
    hold("an application", 2)
    assert held_slots("an application") == 5
    hold("an application", -5)
    assert held_slots("an application") == 0


@pytest.mark.parametrize(
    ("master", "expected"),
    [("local", True), ("local[*]", True), ("local-cluster[2,1,512]", False)],
)
def test_a_local_master_is_one_process(master: str, expected: bool) -> None:
    assert is_local(master) is expected
