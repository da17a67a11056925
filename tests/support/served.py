"""A cluster that has run a step, and what of it no bad input may change."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jgraph.client.cluster import Cluster
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
