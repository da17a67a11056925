"""Checkpoints whose arrays are full of the number of their step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jgraph.runtime.files.step_files import steps_in
from jgraph.train.checkpoint import checkpoint
from jgraph.train.checkpoint.checkpoints import CheckpointWriter


def tree(step: int) -> Any:
    w = np.full((64, 1024), step, np.float32)
    return {"params": {"w": w}, "opt": (), "state": {}, "global_step": np.int32(step)}


def filled(directory: Path, steps: int = 3) -> Path:
    with CheckpointWriter(directory, keep=10) as writer:
        for step in range(1, steps + 1):
            writer.save(step, tree(step), {"again": step})
    return directory


def check_kept(directory: Path, told: Sequence[int], keep: int) -> None:
    """What was told of as saved is good, but for steps that newer ones replaced.

    Args:
      directory: of the steps.
      told: steps, in the order in which they were.
      keep: so many are kept.
    """
    there = steps_in(directory)
    due = sorted({*told, *there})[-keep:]
    assert set(due) <= set(there), f"{set(due) - set(there)} are gone"
    for step in due:
        assert checkpoint.verify(directory / str(step)).step == step


def damage(step: Path) -> None:
    """Flips a bit of the largest array of a checkpoint."""
    file = max(step.glob("*/[0-9]*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)
