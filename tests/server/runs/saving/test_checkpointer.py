"""What a master saves of a detached run: with real variables, in real files."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jgraph.failpoints import CRASHED, POINTS, VARIABLE, armed, fail
from jgraph.runtime.files.manifest import directory_of, read_manifest
from jgraph.runtime.files.shard_files import Slice, read_slice
from jgraph.runtime.files.step_files import TEMPORARY, steps_in
from jgraph.server.runs.saving.checkpointer import STEP
from jgraph.train.checkpoint.checkpoints import CheckpointWriter
from tests.support.saved_run import Ps, restored, saved, saved_at_rest

pytestmark = pytest.mark.usefixtures("nothing_is_left")

HANDED = [name for name in POINTS if name.startswith("handed.")]


def test_a_position_is_never_after_the_updates_that_it_is_saved_with(
    tmp_path: Path,
) -> None:
    saved(tmp_path, Ps())
    steps = steps_in(tmp_path)
    assert len(steps) == 2
    for step in steps:
        position = read_manifest(tmp_path / str(step)).position
        assert position is not None
        assert position["done"] <= step


def test_a_run_that_went_on_while_it_was_copied_is_saved_at_its_end(
    tmp_path: Path,
) -> None:
    ps = Ps()
    ps.stands_still = False
    saved(tmp_path, ps)
    assert len(ps.generations) == 3
    assert steps_in(tmp_path)[:-1] == [0]


def test_the_last_save_says_where_a_run_ended_also_of_a_step_that_is_there(
    tmp_path: Path,
) -> None:
    """A step of the end that was saved before says of what was under way: again."""
    saved(tmp_path, Ps(last=2))
    assert steps_in(tmp_path) == [0, 2]
    assert read_manifest(tmp_path / "2").position == {"done": 2}


def test_nothing_is_saved_before_the_directory_is_the_masters(tmp_path: Path) -> None:
    ps = Ps()
    saved(tmp_path, ps)
    assert ps.generations
    assert all(ps.generations)
    assert read_manifest(tmp_path / str(steps_in(tmp_path)[-1])).generation


def test_the_next_master_clears_what_one_left_that_was_killed_as_it_saved(
    tmp_path: Path,
) -> None:
    (tmp_path / "1.new-0123abcd" / "params.w").mkdir(parents=True)
    (tmp_path / "of_others").mkdir()
    saved(tmp_path, Ps())
    names = {path.name for path in tmp_path.iterdir()}
    assert "of_others" in names
    assert not [name for name in names if ".new-" in name]


@pytest.mark.parametrize("point", HANDED)
def test_a_disk_that_fails_at_any_point_of_a_save_leaves_whole_steps(
    tmp_path: Path, point: str
) -> None:
    reached = list[str]()

    def fail_once() -> None:
        reached.append(point)
        if len(reached) == 1:
            fail()

    with armed(point, fail_once):
        saved(tmp_path, Ps(), keep=1)
    assert reached
    names = [p.name for p in tmp_path.iterdir() if TEMPORARY in p.name]
    assert not names
    check_good(tmp_path)
    assert steps_in(tmp_path)[-1] > 0


def test_run_whose_last_save_failed_is_saved_when_it_is_over_if_it_went_no_further(
    tmp_path: Path,
) -> None:
    saves = iter(["the first", "the one under way as it ended"])

    def fail_once() -> None:
        if next(saves, None):
            fail()

    with armed("handed.snapshot_taken", fail_once):
        saved(tmp_path, Ps(), goes_on=False)
    assert steps_in(tmp_path)[-1] > 0


def check_good(directory: Path) -> None:
    """Each step has what its manifest says; the first one is no more than that."""
    for step in filter(None, steps_in(directory)):
        manifest = read_manifest(directory / str(step))
        leaf = manifest.leaves[STEP]
        rows = Slice.whole(directory_of(STEP), leaf.type, leaf.block_rows)
        fd = os.open(directory / str(step), os.O_RDONLY)
        value, sums = read_slice(fd, rows)
        os.close(fd)
        assert manifest.step == int(np.asarray(value)) == step
        assert leaf.crc32 == rows.blocks.joined([sums])


@pytest.mark.parametrize(
    ("lost_at", "is_saved"),
    [("RunStep", False), ("SaveShards", False), ("Reset", True)],
)
def test_a_ps_that_dies_while_it_is_saved_before_it_ends_is_the_end_of_no_run(
    tmp_path: Path, lost_at: str, is_saved: bool
) -> None:
    """It goes on from the newest checkpoint, which may be this one."""
    ps = Ps()
    ps.lost_at = lost_at
    found = saved_at_rest(tmp_path, ps)
    assert (found is not None) == is_saved
    assert steps_in(tmp_path)[1:] == ([] if found is None else [int(found.path.name)])


def test_a_damaged_step_that_stays_where_it_is_is_looked_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, Ps())
    first, newest = steps_in(tmp_path)
    (file,) = (tmp_path / str(newest) / directory_of(STEP)).glob("[!.]*")
    file.write_bytes(bytes(file.stat().st_size))
    (tmp_path / f"{newest}.corrupt").symlink_to("nowhere")  # so it gets no other name
    found = restored(tmp_path)
    assert found.step == first
    assert f"{tmp_path / str(newest)} is damaged" in caplog.text


@pytest.mark.row(26)
def test_second_save_that_fails_is_loud_and_the_run_is_saved_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reached = list[str]()

    def be_full() -> None:
        reached.append("")
        if len(reached) <= 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with armed("handed.snapshot_taken", be_full):
        saved(tmp_path, Ps())
    told = [(r.levelname, r.getMessage()) for r in caplog.records]
    text = f"not saved in {tmp_path}: [Errno 28] No space left on device"
    assert [level for level, line in told if text in line] == ["WARNING", "ERROR"]
    assert "2 saves failed" in told[-1][1]
    (_, newest_one) = steps_in(tmp_path)
    assert newest_one > 0


@pytest.mark.row(20)
def test_a_master_that_is_replaced_while_it_saves_commits_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def take_over() -> None:
        (tmp_path / "jgraph_writer.9.json").write_text("{}")

    with armed("handed.snapshot_taken", take_over):
        saved(tmp_path, Ps())
    assert steps_in(tmp_path) == [0]
    assert "JG-303 another process writes checkpoints" in caplog.text


SAVES = """
import json, sys
from pathlib import Path
from jgraph.runtime.files.step_files import steps_in
from tests.support.saved_run import Ps, saved, saved_at_rest

class Telling(Ps):
    async def call(self, task, method, request, timeout_s=0.0):
        reply = await super().call(task, method, request, timeout_s)
        if method == "Reset":
            print(json.dumps(steps_in(self.directory)), flush=True)
        return reply

saved(Path(sys.argv[1]), Telling(), keep=1)
"""


@pytest.mark.row(25)
@pytest.mark.procs
@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [
        pytest.param(n, marks=() if n == "handed.committed" else pytest.mark.chaos)
        for n in HANDED
    ],
)
def test_a_master_that_is_killed_at_any_point_of_a_save_loses_no_saved_step(
    tmp_path: Path, point: str
) -> None:
    child = subprocess.run(
        [sys.executable, "-c", SAVES, str(tmp_path)],
        env={**os.environ, VARIABLE: f"{point}=crash@2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == CRASHED, child.stderr
    (before,) = json.loads(child.stdout.splitlines()[-1])
    there = steps_in(tmp_path)
    assert before > 0
    assert before in there or there[0] > before
    check_good(tmp_path)
    with CheckpointWriter(tmp_path):  # the next one has the directory at once
        names = [path.name for path in tmp_path.iterdir()]
    assert not [n for n in names if TEMPORARY in n or n.endswith(".going")]
    assert steps_in(tmp_path) == there


@pytest.mark.parametrize("keep", [1, 2])
def test_the_newest_steps_are_kept(tmp_path: Path, keep: int) -> None:
    ps = Ps()
    saved(tmp_path, ps, keep)
    steps = steps_in(tmp_path)
    assert len(steps) == keep
    assert steps[-1] > 0
