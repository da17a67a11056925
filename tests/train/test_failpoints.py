"""A save that ends, or fails, at each of its steps loses nothing saved."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from jgraph.errors import CheckpointError, CheckpointWriterError
from jgraph.failpoints import CRASHED, POINTS, VARIABLE, armed, fail
from jgraph.runtime.files.step_files import TEMPORARY, steps_in
from jgraph.train.checkpoint import checkpoint
from jgraph.train.checkpoint.checkpoints import CheckpointWriter, newest_good
from tests.support.saved_steps import check_kept, tree

pytestmark = pytest.mark.usefixtures("nothing_is_left")

RENEWING = ("lease.renewing", "lease.renewed")
REPLACING = ("checkpoint.old_put_away", "checkpoint.replaced")
OF_STEPS = [
    n
    for n in POINTS
    if n not in (*REPLACING, *RENEWING)
    and n.startswith(("lease.", "checkpoint.", "prune."))
]
SAVES = """
import json, sys
from pathlib import Path
from tests.support.saved_steps import tree
from jgraph.train.checkpoint.checkpoints import CheckpointWriter

for first in (1, 6):
    with CheckpointWriter(Path(sys.argv[1]), keep=2) as writer:
        for step in range(first, first + 5):
            writer.save(step, tree(step))
            print(json.dumps(step), flush=True)
"""


def newest_step(directory: Path) -> int:
    """Returns the step that a run would go back to; its arrays are right."""
    step, restored = newest_good(
        directory, lambda path: checkpoint.restore(path, tree(0))
    )
    np.testing.assert_array_equal(restored["params"]["w"], tree(step)["params"]["w"])
    return step


def check_goes_on(directory: Path, step: int) -> None:
    """A new writer has the directory at once, and finds nothing half done in it."""
    with CheckpointWriter(directory, keep=2) as writer:
        names = [path.name for path in directory.iterdir()]
        unfinished = (TEMPORARY, "going", ".new-", ".old-")
        assert not [n for n in names if any(word in n for word in unfinished)]
        writer.save(step, tree(step))
    assert newest_step(directory) == step
    assert not list(directory.glob("*.corrupt"))


@pytest.mark.row(25)
@pytest.mark.procs
@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [
        pytest.param(name, marks=() if name in OF_STEPS[4:5] else pytest.mark.chaos)
        for name in OF_STEPS
    ],
)
def test_a_writer_that_crashes_at_a_step_of_a_save_loses_no_saved_step(
    tmp_path: Path, point: str
) -> None:
    time = 1 if point == "lease.released" else 2
    child = subprocess.run(
        [sys.executable, "-c", SAVES, str(tmp_path)],
        env={**os.environ, VARIABLE: f"{point}=crash@{time}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == CRASHED, child.stderr
    told = [json.loads(line) for line in child.stdout.splitlines()]
    assert newest_step(tmp_path) in (told[-1], told[-1] + 1)
    check_kept(tmp_path, told, keep=2)
    check_goes_on(tmp_path, 20)


@pytest.mark.row(26)
@pytest.mark.parametrize("point", [n for n in OF_STEPS if not n.startswith("lease")])
def test_a_disk_that_fails_at_a_step_of_a_save_loses_no_saved_step(
    tmp_path: Path, point: str
) -> None:
    with CheckpointWriter(tmp_path, keep=2) as writer:
        for step in (1, 2):
            writer.save(step, tree(step))
        is_saved = point.startswith("prune")  # what is to go may stay for now
        told = nullcontext() if is_saved else pytest.raises(CheckpointError)
        with armed(point, fail), told:
            writer.save(3, tree(3))
        assert newest_step(tmp_path) in (2, 3)
        check_kept(tmp_path, [1, 2], keep=2)
        writer.save(4, tree(4))
        assert newest_step(tmp_path) == 4
    assert steps_in(tmp_path)[-1] == 4
    check_goes_on(tmp_path, 5)


@pytest.mark.row(20)
def test_a_writer_that_is_replaced_during_a_save_commits_nothing(
    tmp_path: Path,
) -> None:
    def take_over() -> None:
        (tmp_path / "jgraph_writer.9.json").write_text("{}")

    with CheckpointWriter(tmp_path) as writer:
        writer.save(1, tree(1))
        with (
            armed("checkpoint.manifest_written", take_over),
            pytest.raises(CheckpointWriterError, match="must not"),
        ):
            writer.save(2, tree(2))
        assert steps_in(tmp_path) == [1]


@pytest.mark.parametrize("point", REPLACING)
def test_a_checkpoint_that_is_replaced_is_there_before_and_after(
    tmp_path: Path, point: str
) -> None:
    target, there = tmp_path / "model", list[int]()

    def look() -> None:
        steps = [checkpoint.restore(p, tree(0)) for p in tmp_path.iterdir()]
        there.extend(int(step["global_step"]) for step in steps)

    checkpoint.save(target, tree(1))
    with armed(point, look):
        checkpoint.save(target, tree(2), overwrite=True)
    assert sorted(there) == [1, 2]  # whole, for who is killed here
    assert checkpoint.restore(target, tree(0))["global_step"] == 2


@pytest.mark.row(25)
@pytest.mark.parametrize("point", REPLACING)
def test_a_writer_that_is_killed_while_it_replaces_a_step_loses_none(
    tmp_path: Path, point: str
) -> None:
    directory, killed = tmp_path / "run", tmp_path / "killed"
    its_lease = shutil.ignore_patterns("*jgraph_writer*")
    with CheckpointWriter(directory) as writer:
        writer.save(1, tree(1))
        with armed(point, lambda: shutil.copytree(directory, killed, ignore=its_lease)):
            writer.save(1, tree(1))
    assert sorted(path.name.partition("-")[0] for path in killed.iterdir()) == (
        ["1.new", "1.old"] if "put_away" in point else ["1", "1.old"]
    )
    assert newest_step(killed) == 1
    check_goes_on(killed, 2)
    assert steps_in(killed) == [1, 2]


@pytest.mark.parametrize("point", REPLACING)
def test_a_checkpoint_whose_writer_was_killed_while_replacing_it_can_be_restored(
    tmp_path: Path, point: str
) -> None:
    target, killed = tmp_path / "there" / "model", tmp_path / "killed"
    checkpoint.save(target, tree(1))
    with armed(point, lambda: shutil.copytree(target.parent, killed)):
        checkpoint.save(target, tree(2), overwrite=True)
    there = 1 if "put_away" in point else 2
    assert checkpoint.restore(killed / "model", tree(0))["global_step"] == there
    checkpoint.save(killed / "model", tree(3), overwrite=True)
    assert checkpoint.restore(killed / "model", tree(0))["global_step"] == 3
    assert not list(killed.glob("*.old-*"))


def test_who_looks_while_a_step_is_replaced_does_not_stop_that(tmp_path: Path) -> None:
    seen = list[list[int]]()

    def look() -> None:
        if not seen:
            seen.append(steps_in(tmp_path))

    with CheckpointWriter(tmp_path) as writer:
        writer.save(1, tree(1))
        with armed("checkpoint.old_put_away", look):
            writer.save(1, tree(2))
        assert seen == [[1]]
        restored = checkpoint.restore(tmp_path / "1", tree(0))
        assert restored["params"]["w"][0, 0] == 2
        assert [p.name for p in tmp_path.iterdir() if "old" in p.name] == []
