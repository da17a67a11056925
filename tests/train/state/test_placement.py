"""Programs of a Trainer fit every task of a job, whatever its device."""

from typing import Any

import jax.numpy as jnp
import pytest

import jgraph as jg
from jgraph.client.cluster import connect
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName
from jgraph.graph.tracing.trace import trace
from jgraph.train.state.placement import plan_on
from tests.support.servers import Servers

PS, FIRST, SECOND = map(
    TaskName, ["/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"]
)


def graph() -> Graph:
    w = jg.Variable("w", jnp.zeros(3), device=PS)

    def step(x: Any) -> Any:
        w[...] = w[...] + x
        return jnp.sin(x).sum()

    return trace(step, jnp.ones(3))[0]


@pytest.mark.parametrize("driver", [FIRST, SECOND])
def test_the_step_of_one_worker_is_compiled_for_the_devices_of_all(
    driver: TaskName,
) -> None:
    servers = Servers(ps=1, worker=2)
    with connect(servers.server(PS).target, timeout_s=20) as cluster:
        cluster.platforms[SECOND] = ("cuda",)
        joins = TaskName("/job:ps/task:1")
        program = plan_on(cluster, graph(), driver, ps=[PS, joins]).program
        platforms = {
            task: {code.platforms for code in program.only(task).segments}
            for task in (PS, driver)
        }
        assert platforms == {PS: {("cpu",)}, driver: {("cpu", "cuda")}}
    servers.stop()
