from collections.abc import Iterator

import pytest

from jgraph.client.cluster import Cluster
from tests.support.servers import connected


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """Two ps and two workers, as servers of this process."""
    with connected(ps=2, worker=2) as cluster:
        yield cluster
