"""The page of faults names tests that are there, and every row."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
EN_DASH = "\N{EN DASH}"
PAGE = (ROOT / "docs/reliability.md").read_text("utf-8")


def test_each_test_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE))
    assert len(named) > 50
    missing = [
        f"{file}::{name}"
        for file, name in sorted(named)
        if f"def {name}(" not in (ROOT / file).read_text("utf-8")
    ]
    assert not missing


def test_after_each_file_of_a_fault_it_is_looked_for_what_is_left() -> None:
    faults = PAGE.split("\n## Faults\n")[1].split("\n## Bad inputs\n")[0]
    files = set(re.findall(r"`(tests/[\w/]+\.py)::", faults))
    begin_nothing = ("tests/coordination/", "tests/simulation/")
    here = "tests/faults/"  # after each test: conftest.py
    others = {file for file in files if not file.startswith((here, *begin_nothing))}
    assert len(others) > 20
    looks = 'pytest.mark.usefixtures("nothing_is_left")'
    assert not [f for f in others if looks not in (ROOT / f).read_text("utf-8")]


def test_each_row_is_there_and_has_a_test_or_says_why_not() -> None:
    faults, inputs = PAGE.split("\n## Faults\n")[1].split("\n## Bad inputs\n")
    rows = {
        int(number): line
        for numbers, line in re.findall(r"^\| ([\d, ]+) (\|.*)$", faults, re.M)
        for number in numbers.split(",")
    }
    assert list(rows) == list(range(1, 31))
    absent = f"| {EN_DASH} |"
    assert all(re.search(r"::|as \d|the same", r) or absent in r for r in rows.values())
    rows = {int(n): r for n, r in re.findall(r"^\| (\d+) (\|.*)$", inputs, re.M)}
    assert list(rows) == list(range(1, 27))
    assert all(re.search(r"::|not there|there is no", r) for r in rows.values())
