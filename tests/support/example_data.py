"""Small data in the format of the real files, and where the real ones are."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from jgraph.examples.census import COLUMNS

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("JGRAPH_DATA", ROOT.parent / "shared" / "data"))


def real(name: str) -> Path:
    """The directory of a real data set; the test is skipped where it is not there."""
    path = DATA / name
    if not path.is_dir():
        pytest.skip(f"{name} is not here; set JGRAPH_DATA to the directory that has it")
    return path


def census_line(random: np.random.Generator, *, end: str = "") -> str:
    """A person whose income follows from occupation and education together."""
    job = random.choice(["Sales", "Tech-support", "?"])
    school = random.choice(["Bachelors", "HS-grad"])
    rich = (job == "Sales") == (school == "Bachelors")
    given = {
        **dict.fromkeys(COLUMNS, "?"),
        "age": str(random.integers(17, 90)),
        "education": school,
        "education-num": "9",
        "occupation": job,
        "capital-gain": "0",
        "capital-loss": "0",
        "hours-per-week": str(random.integers(10, 60)),
        "income": (">50K" if rich else "<=50K") + end,
    }
    return ", ".join(given[name] for name in COLUMNS)


def write_census(directory: Path, examples: int = 400) -> Path:
    random = np.random.default_rng(0)
    train = [census_line(random) for _ in range(examples)]
    test = [census_line(random, end=".") for _ in range(examples // 4)]
    directory.mkdir(exist_ok=True)
    (directory / "adult.data").write_text("\n".join([*train, ""]))
    (directory / "adult.test").write_text("\n".join(["|1x3 Cross validator", *test]))
    return directory


def write_criteo(directory: Path, examples: int = 400) -> Path:
    """Clicks that follow from one category, with some fields missing."""
    random = np.random.default_rng(0)
    lines = []
    for _ in range(examples):
        label = int(random.integers(2))
        numbers = [random.choice(["", "-1", "7", "123456"]) for _ in range(13)]
        hashed = [f"{random.integers(2**32):08x}" for _ in range(24)]
        categories = ["05db9164" if label else "68fd1e64", *hashed, ""]
        lines.append("\t".join([str(label), *numbers, *categories]))
    directory.mkdir(exist_ok=True)
    (directory / "train.txt").write_text("\n".join([*lines, ""]))
    return directory


def write_text(directory: Path, repeats: int = 12) -> Path:
    """A text of 600 words in which each follows from the one before."""
    directory.mkdir(exist_ok=True)
    words = ["".join(letters) for letters in itertools.product("bcdefghij", repeat=3)]
    (directory / "input.txt").write_text(" ".join(words[:600] * repeats))
    return directory
