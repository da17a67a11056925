"""Tests that take nearly as long as they may say where their threads are."""

from pathlib import Path

from tests.support.stacks import told_when_late
from tests.support.waiting import wait_until


def test_one_that_is_late_says_where_it_is(tmp_path: Path) -> None:
    file = tmp_path / "screen"
    with (
        file.open("wb", buffering=0) as screen,
        told_when_late("tests/a.py::test_b", 0.001, screen.fileno()),
    ):
        wait_until(lambda: "in test_one_that_is_late_says" in file.read_text())
    assert "tests/a.py::test_b has taken 0.0009 s of its 0.001 s" in file.read_text()


def test_one_that_is_not_late_says_nothing(tmp_path: Path) -> None:
    file = tmp_path / "screen"
    with (
        file.open("wb", buffering=0) as screen,
        told_when_late("tests/a.py::test_b", 60, screen.fileno()),
    ):
        pass
    assert file.read_text() == ""
