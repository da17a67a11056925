"""A cluster that bad inputs must leave as it was."""

from collections.abc import Iterator

import pytest

from jgraph.client.cluster import connect
from tests.support.served import WORKER, Served, X, step
from tests.support.servers import Servers


@pytest.fixture(scope="module")
def one() -> Iterator[Served]:
    servers = Servers(ps=1, worker=1)
    with connect(servers.server(WORKER).target, timeout_s=20) as cluster:
        yield Served(servers, cluster)
    servers.stop()


@pytest.fixture
def served(one: Served) -> Iterator[Served]:
    """The cluster, whose state a test may not change."""
    before = one.state()
    yield one
    assert one.state() == before
    assert one.session.run(step, X, timeout_s=20) == 12.0
