"""The page of faults names tests that carry its rows' markers, and every such test."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.transcripts import rows_of

ROOT = Path(__file__).parents[2]
EN_DASH = "\N{EN DASH}"
PAGE = (ROOT / "docs/reliability.md").read_text("utf-8")
FAULTS, _, REST = PAGE.partition("\n## Faults\n")[2].partition("\n## Bad inputs\n")
INPUTS, _, BUGS = REST.partition("\n## Bugs that these tests found\n")
TABLES = {"row": FAULTS, "bad_input_row": INPUTS}
Test = tuple[str, str]
"""A file and a function; a transcript has none."""


class Line(NamedTuple):
    """One line of a table.

    Attributes:
      rows: its numbers; none, if it has none.
      tests: which it names.
      others: rows whose tests it takes over: "as 4".
    """

    rows: set[int]
    tests: set[Test]
    others: set[int]


def lines_of(table: str) -> list[Line]:
    return [
        Line(
            {int(row) for row in re.findall(r"\d+", numbers)},
            named_in(text),
            {int(row) for row in re.findall(r"\bas (\d+)", text)},
        )
        for numbers, text in re.findall(r"^\| ([\d, ]*)\|(.*)$", table, re.M)
    ]


def named_in(text: str) -> set[Test]:
    scripts = re.findall(r"`(tests/[\w/]+\.txt)`", text)
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    return {*tests, *((script, "") for script in scripts)}


def marked_in(path: Path, marker: str) -> Iterator[tuple[Test, set[int]]]:
    """Tests of a file that carry a marker, and the rows in it."""
    text = path.read_text("utf-8")
    if f"@{marker}(" not in text:  # to parse all files takes seconds
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == marker:
                    rows = {ast.literal_eval(row) for row in mark.args}
                    yield (str(path.relative_to(ROOT)), node.name), rows


@cache
def marked(name: str) -> dict[Test, set[int]]:
    """Every test that carries a marker of one of the tables."""
    scripts = (ROOT / "tests/coordination").glob("*/testdata/*/*.txt")
    shown = {
        (str(path.relative_to(ROOT)), ""): rows
        for path in scripts
        if name == "row" and (rows := rows_of(path.read_text("utf-8")))
    }
    return shown | {
        test: rows
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for test, rows in marked_in(path, f"pytest.mark.{name}")
    }


def test_each_test_that_the_page_names_is_there() -> None:
    named = named_in(PAGE)
    assert len(named) > 50
    missing = [
        f"{file}::{name}"
        for file, name in sorted(named)
        if (f"def {name}(" if name else "") not in (ROOT / file).read_text("utf-8")
    ]
    assert not missing


@pytest.mark.parametrize("marker", TABLES)
def test_each_test_that_a_row_names_carries_the_marker_of_the_row(marker: str) -> None:
    rows_of = marked(marker)
    lines = [line for line in lines_of(TABLES[marker]) if line.rows]
    wrong = [
        (sorted(line.rows), test)
        for line in lines
        for test in sorted(line.tests)
        if not rows_of.get(test, set()) & line.rows
    ]
    assert not wrong
    for line in lines:
        taken = [other.tests for other in lines if other.rows & line.others]
        tests = line.tests.union(*taken)
        shown = set().union(*(rows_of[test] for test in tests))
        assert not tests or line.rows <= shown, line


@pytest.mark.parametrize("marker", TABLES)
def test_each_test_with_the_marker_of_a_row_is_named_in_that_table(marker: str) -> None:
    lines = lines_of(TABLES[marker])
    numbers = set().union(*(line.rows for line in lines))
    for test, rows in marked(marker).items():
        assert rows <= numbers, test
        assert any(test in line.tests and rows & line.rows for line in lines), test


def test_each_row_of_a_command_has_a_test_with_its_marker_there() -> None:
    asked = re.findall(r"`pytest (tests[\w/.]*) --([a-z-]*row) (\d+)", BUGS)
    assert len(asked) > 10
    for where, option, row in asked:
        there = [
            file
            for (file, _), rows in marked(option.replace("-", "_")).items()
            if int(row) in rows and f"{file}/".startswith(f"{where}/")
        ]
        assert there, f"no test of {where} carries {option} {row}"
    assert not re.search(r"-k \S*row", BUGS)


def test_after_each_file_of_a_fault_it_is_looked_for_what_is_left() -> None:
    files = {file for file, _ in named_in(FAULTS)}
    begin_nothing = ("tests/coordination/", "tests/simulation/")
    here = "tests/faults/"  # after each test: conftest.py
    others = {file for file in files if not file.startswith((here, *begin_nothing))}
    assert len(others) > 20
    looks = 'pytest.mark.usefixtures("nothing_is_left")'
    assert not [f for f in others if looks not in (ROOT / f).read_text("utf-8")]


def test_each_row_is_there_and_has_a_test_or_says_why_not() -> None:
    rows = {
        int(number): line
        for numbers, line in re.findall(r"^\| ([\d, ]+) (\|.*)$", FAULTS, re.M)
        for number in numbers.split(",")
    }
    assert list(rows) == list(range(1, 64))
    for row in (line.removeprefix("|").rstrip(" |") for line in rows.values()):
        _, state, what_happens, tests = row.split(" | ")
        assert what_happens
        assert re.search(r"::|as \d", tests) or state == EN_DASH
    rows = {int(n): r for n, r in re.findall(r"^\| (\d+) (\|.*)$", INPUTS, re.M)}
    assert list(rows) == list(range(1, 34))
    assert all(re.search(r"::|not there|there is no", r) for r in rows.values())
