"""The end of a process that loaded much."""

import subprocess
import sys

import pytest

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
