"""Two parameter servers and two workers in this process, for a module of tests."""

from collections.abc import Iterator
from typing import Any

import pytest

from jgraph import cli
from jgraph.client.cluster import Cluster
from jgraph.client.session import Session
from tests.support.servers import connected
from tests.support.small_tables import rows_travel_of_small_tables_too

__all__ = ["rows_travel_of_small_tables_too"]


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
