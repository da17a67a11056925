from collections.abc import Iterator

import pytest

from jgraph.cluster.client import Cluster, connect
from tests.cluster.conftest import Servers


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """Two ps and two workers, as servers of this process."""
    servers = Servers(ps=2, worker=2)
    with connect(servers.servers[-1].target, timeout_s=20) as cluster:
        yield cluster
    servers.stop()
