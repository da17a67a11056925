"""``jgraph ckpt``: what it prints, and what it exits with."""

import json
from pathlib import Path
from typing import Any

import pytest

from jgraph.runtime.files.step_files import steps_in
from jgraph.train.checkpoint import checkpoint
from jgraph.train.checkpoint.checkpoints import CheckpointWriter
from tests.support.saved_steps import damage, filled, tree

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_ls_lists_steps_with_their_bytes(tmp_path: Path, run: Any) -> None:
    filled(tmp_path, 2)
    code, text = run("ls", tmp_path)
    assert code == 0
    assert "262,148 bytes in 2 arrays" in text
    code, text = run("ls", tmp_path, "--json")
    assert [row["step"] for row in json.loads(text)] == [1, 2]
    (tmp_path / "2").rename(tmp_path / "2.corrupt")
    code, text = run("ls", tmp_path)
    assert (code, f"{tmp_path / '2.corrupt'} is damaged" in text) == (0, True)


@pytest.mark.row(27)
def test_verify_fails_and_names_the_damaged(tmp_path: Path, run: Any) -> None:
    filled(tmp_path, 2)
    assert run("verify", tmp_path)[0] == 0
    damage(tmp_path / "2")
    code, text = run("verify", tmp_path)
    assert code == 1
    assert "JG-302" in text
    assert str(tmp_path / "2") in text
    assert steps_in(tmp_path) == [1, 2]


def test_restore_copies_the_newest_good_step(tmp_path: Path, run: Any) -> None:
    filled(tmp_path / "run", 3)
    damage(tmp_path / "run" / "3")
    code, text = run("restore", tmp_path / "run", tmp_path / "copy", "--json")
    assert (code, json.loads(text)["step"]) == (0, 2)
    copied = checkpoint.restore(tmp_path / "copy", tree(0))
    assert int(copied["global_step"]) == 2
    code, text = run("restore", tmp_path / "run", tmp_path / "copy")
    assert (code, "exists" in text) == (1, True)
    code, text = run("restore", tmp_path / "run", tmp_path / "x", "--step", 3)
    assert (code, "JG-302" in text) == (1, True)
    assert not (tmp_path / "x").exists()


def test_prune_keeps_the_newest_and_is_refused_while_somebody_writes(
    tmp_path: Path, run: Any
) -> None:
    filled(tmp_path, 3)
    code, text = run("prune", tmp_path, "--keep", 1, "--dry-run", "--json")
    assert json.loads(text) == {"deleted": [1, 2], "dry_run": True}
    with CheckpointWriter(tmp_path):
        code, text = run("prune", tmp_path, "--keep", 1)
        assert (code, "JG-303" in text) == (1, True)
    code, text = run("prune", tmp_path, "--keep", 1)
    assert (code, steps_in(tmp_path)) == (0, [3])


def test_what_is_no_checkpoint_is_said(tmp_path: Path, run: Any) -> None:
    code, text = run("ls", tmp_path / "nothing")
    assert (code, "JG-301" in text) == (1, True)
    code, text = run("verify", tmp_path)
    assert (code, "no checkpoint of jgraph" in text) == (1, True)
