"""Two parameter servers and two workers in this process, for a module of tests."""

from collections.abc import Iterator

import pytest

from jgraph.cluster.client import Cluster
from jgraph.cluster.session import Session
from tests.cluster.conftest import connected


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with connected(ps=2, worker=2) as cluster:
        yield cluster


@pytest.fixture
def session(cluster: Cluster) -> Iterator[Session]:
    cluster.reset()
    with cluster.session() as session:
        yield session
