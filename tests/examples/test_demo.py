"""The demonstration does what the first screen of the README says."""

import io
import re
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from rich.console import Console

from jgraph.examples.demo import load_digits, main


def test_split_is_decided_by_the_seed_and_loses_nothing() -> None:
    train, test = load_digits(3)
    assert train["image"].shape == (1437, 8, 8, 1)
    assert test["label"].shape == (360,)
    assert train["image"].max() == 1.0
    again, _ = load_digits(3)
    other, _ = load_digits(4)
    assert np.array_equal(train["label"], again["label"])
    assert not np.array_equal(train["label"], other["label"])


@pytest.mark.slow
@pytest.mark.procs
@pytest.mark.parametrize(
    ("ps", "steps", "least"),
    [(1, 120, 0.8), pytest.param(2, 600, 0.97, marks=pytest.mark.nightly)],
)
def test_demonstration_learns_the_digits_and_leaves_its_files(
    ps: int, steps: int, least: float, tmp_path: Path
) -> None:
    out = io.StringIO()
    console = Console(file=out, width=120)
    accuracy = main(ps=ps, workers=ps, steps=steps, output=tmp_path, console=console)
    assert accuracy >= least
    text = out.getvalue()
    assert re.fullmatch(r"test accuracy: 0\.\d{4}", text.splitlines()[-1])
    assert "params/dense1/kernel" in text
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "checkpoint")
    assert int(tree["global_step"]) == steps
