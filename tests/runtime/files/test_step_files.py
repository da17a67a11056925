"""Steps of a directory of checkpoints, made like others."""

from pathlib import Path

import numpy as np
import pytest

from jgraph.errors import CheckpointCorruptError, CheckpointError, CheckpointSpaceError
from jgraph.failpoints import armed, fail
from jgraph.runtime.files import step_files
from jgraph.runtime.files.manifest import FILE, Leaf, Manifest, read_manifest
from jgraph.runtime.files.step_files import (
    begin_step,
    commit_step,
    our_steps,
    prune,
    steps_in,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def step(directory: Path, number: int) -> Path:
    """Makes a step of one array."""
    path = directory / str(number)
    path.mkdir(parents=True)
    leaf = Leaf.of(np.zeros((2, 3), np.float32))
    (path / FILE).write_text(Manifest(number, {"params/w": leaf}).to_json())
    (path / "_METADATA").write_text("a tree")
    return path


def test_step_is_made_like_the_newest_and_is_there_when_it_has_its_name(
    tmp_path: Path,
) -> None:
    step(tmp_path, 3)
    made, like = begin_step(tmp_path)
    assert (made / "params.w" / "0.0").stat().st_size == 24
    assert steps_in(tmp_path) == [3]
    asked: list[list[int]] = []
    manifest = Manifest(5, like.leaves)
    commit_step(made, manifest, lambda: asked.append(steps_in(tmp_path)))
    assert (asked, steps_in(tmp_path)) == ([[3]], [3, 5])
    assert (tmp_path / "5" / "_METADATA").read_text() == "a tree"
    made, _ = begin_step(tmp_path)
    with pytest.raises(CheckpointError, match="5 exists"):
        commit_step(made, manifest, lambda: None)
    prune(tmp_path, 1, lambda: None)
    assert steps_in(tmp_path) == [5]


@pytest.mark.row(25)
@pytest.mark.parametrize(
    ("point", "there"), [("handed.on_disk", [3]), ("handed.committed", [3, 5])]
)
def test_disk_that_fails_at_a_step_of_a_save_leaves_all_or_nothing(
    tmp_path: Path, point: str, there: list[int]
) -> None:
    step(tmp_path, 3)
    made, like = begin_step(tmp_path)
    with armed(point, fail), pytest.raises(OSError, match="a failpoint"):
        commit_step(made, Manifest(5, like.leaves), lambda: None)
    assert steps_in(tmp_path) == there
    assert read_manifest(tmp_path / str(there[-1])).step == there[-1]


@pytest.mark.row(25)
def test_a_step_that_is_replaced_is_there_before_and_after(
    tmp_path: Path,
) -> None:
    step(tmp_path, 3)
    made, like = begin_step(tmp_path)
    with armed("checkpoint.old_put_away", fail), pytest.raises(OSError, match="a fail"):
        commit_step(made, Manifest(3, like.leaves), lambda: None, overwrite=True)
    assert [path.name for path in tmp_path.iterdir() if path.name == "3"] == []
    for name in ("4.old-2024", "3.old-20241231"):
        (tmp_path / name).mkdir()  # the user's own
    assert steps_in(tmp_path) == [3]
    commit_step(made, Manifest(3, like.leaves), lambda: None, overwrite=True)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["3", "3.old-20241231", "4.old-2024"]
    assert (tmp_path / "3" / "params.w").is_dir()  # which the first did not have


def test_a_run_is_saved_though_its_newest_step_is_damaged(tmp_path: Path) -> None:
    step(tmp_path, 3)
    (step(tmp_path, 4) / FILE).write_text("{")
    made, like = begin_step(tmp_path)
    assert (like.step, made.name.partition(".")[0]) == (3, "3")
    (tmp_path / "3" / FILE).write_text("{")
    with pytest.raises(CheckpointCorruptError, match=FILE):
        begin_step(tmp_path)


def test_nothing_is_made_without_a_step_or_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        begin_step(tmp_path)
    step(tmp_path, 3)
    monkeypatch.setattr(step_files, "_ROOM", 1 << 62)
    with pytest.raises(CheckpointSpaceError, match="needs 4,611"):
        begin_step(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


@pytest.mark.parametrize("kind", ["symlink", "hard link"])
def test_files_that_lead_elsewhere_are_not_copied(tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of somebody else")
    path = step(tmp_path / "run", 3) / "_METADATA"
    path.unlink()
    if kind == "symlink":
        path.symlink_to(secret)
    else:
        path.hardlink_to(secret)
    with pytest.raises(OSError, match=r"symbolic links|is not a file"):
        begin_step(tmp_path / "run")
    # A run that goes on asks again and again.
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["3"]


def test_a_directory_that_the_disk_does_not_let_anybody_look_into_is_one_error(
    tmp_path: Path,
) -> None:
    there = tmp_path / ("x" * 300)
    with pytest.raises(CheckpointError, match=r"cannot look for .*name too long"):
        our_steps(there)
