"""The end of a process that loaded much."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jgraph.loading import module_command

ENDING = """
from jgraph.loading import end_uncollected

class Garbage:
    def __init__(self):
        self.itself = self
    def __del__(self):
        print("looked for garbage")

Garbage()
"""


@pytest.mark.parametrize(
    ("told", "says"), [("", "looked for garbage\n"), ("end_uncollected()", "")]
)
def test_a_process_that_is_told_so_ends_without_a_look_for_garbage(
    told: str, says: str
) -> None:
    command = [sys.executable, "-c", ENDING + told]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == says


@pytest.mark.parametrize(("looks_here", "code"), [(False, 0), (True, 3)])
def test_a_process_takes_modules_from_the_current_directory_only_if_this_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks_here: bool, code: int
) -> None:
    (tmp_path / "this.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    others = [path for path in sys.path if path and path != os.getcwd()]
    monkeypatch.setattr(sys, "path", [*others, *([""] if looks_here else [])])
    command = module_command("this")
    ended = subprocess.run(command, check=False, capture_output=True)
    assert ended.returncode == code
