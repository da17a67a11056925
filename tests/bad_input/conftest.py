"""A cluster that bad inputs must leave as it was."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.client.cluster import Cluster, connect
from jgraph.graph.device import device
from jgraph.graph.ir import TaskName
from jgraph.graph.variable import Variable
from tests.support.servers import Servers

PS, WORKER = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:0")
X = np.ones((3, 2), np.float32)
w = Variable("w", jnp.zeros((3, 2)), device=PS)


def step(x: Any) -> Any:
    """Takes 2x off the variable; the difference crosses from the worker to the ps."""
    with device(WORKER):
        change = 2 * x + 0 * w[...]
    w[...] = w[...] - change
    return change.sum()


class Served:
    """A cluster that has run a step, and must be as it was after what a test does."""

    def __init__(self, servers: Servers, cluster: Cluster) -> None:
        self.servers = servers
        self.cluster = cluster
        self.session = cluster.session()
        self.session.run(step, X)

    def state(self) -> tuple[Any, ...]:
        value = self.session.read([w])["w"].tolist()
        tasks = self.cluster.status().tasks
        return value, [(t.task, t.state, sorted(t.programs)) for t in tasks]


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
