"""Two parameter servers and two workers in this process, for a module of tests."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jgraph import cli
from jgraph.client.cluster import Cluster
from jgraph.client.session import Session
from jgraph.runtime.files.step_files import steps_in
from jgraph.train.checkpoint import checkpoint
from tests.support.servers import connected


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with connected(ps=2, worker=2) as cluster:
        yield cluster


@pytest.fixture
def session(cluster: Cluster) -> Iterator[Session]:
    cluster.reset()
    with cluster.session() as session:
        yield session


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs ``jgraph ckpt``; returns the exit code and what it said."""

    def run(*args: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["ckpt", *map(str, args)])
        out = capsys.readouterr()
        return int(ended.value.code or 0), out.out + out.err

    return run


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
