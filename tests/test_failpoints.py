"""Points at which tests break a process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import jgraph
from jgraph import failpoints
from jgraph.errors import ConfigError
from jgraph.failpoints import CRASHED, POINTS, VARIABLE, armed, fail, failpoint

CODE = "from jgraph.failpoints import failpoint as f\n"


def test_a_point_does_nothing_unless_it_is_armed() -> None:
    reached = []
    failpoint("prune.renamed")
    with armed("prune.renamed", lambda: reached.append(1)):
        failpoint("prune.removed")
        failpoint("prune.renamed")
    failpoint("prune.renamed")
    assert reached == [1]


def test_a_failing_disk_is_an_error_of_the_system() -> None:
    with armed("prune.renamed", fail), pytest.raises(OSError, match="a failpoint"):
        failpoint("prune.renamed")


def test_a_process_crashes_the_second_time_and_cleans_nothing_up() -> None:
    code = CODE + "\n".join(
        ["try: f('prune.renamed'); print(1); f('prune.renamed')", "finally: print(2)"]
    )
    ended = subprocess.run(
        [sys.executable, "-uc", code],
        env={VARIABLE: "prune.renamed=crash@2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (CRASHED, "1\n")


def test_a_process_is_slow_at_a_point() -> None:
    code = CODE + "from jgraph.clock import SystemClock as C\nc = C(); t = c.now()\n"
    code += "f('prune.renamed'); f('prune.renamed'); print(0.3 < c.now() - t < 0.6)"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={VARIABLE: "prune.renamed=sleep:0.3@2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "True\n"


@pytest.mark.parametrize(
    "wrong",
    [
        "nowhere=crash",
        "prune.renamed",
        "prune.renamed=x@1",
        "prune.renamed=sleep",
        "prune.renamed=sleep:-1",
    ],
)
def test_a_point_or_action_that_there_is_not_is_refused(wrong: str) -> None:
    with pytest.raises(
        ConfigError, match=r"there is no failpoint|JGRAPH_FAILPOINTS has"
    ):
        failpoints.arm(wrong)


def test_every_point_is_at_one_place() -> None:
    root = Path(jgraph.__file__).parent
    code = [path.read_text() for path in root.rglob("*.py")]
    calls = r"^ +failpoint\(\"([a-z_.]+)\"\)"
    found = [n for text in code for n in re.findall(calls, text, re.MULTILINE)]
    assert sorted(found) == sorted(POINTS)
