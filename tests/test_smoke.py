"""The whole system once, over real processes: also run on the second Python."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from jgraph.graph.device import device
from jgraph.graph.tracing.function import function
from jgraph.graph.variable import Variable
from jgraph.launch.local.cluster import LocalCluster


@pytest.mark.slow
@pytest.mark.procs
def test_a_graph_over_a_ps_and_a_worker_runs_and_leaves_no_process() -> None:
    w = Variable("w", jnp.arange(6.0).reshape(2, 3), device="/job:ps/task:0")

    @function
    def step(x: Any, lr: Any) -> Any:
        with device("/job:worker/task:0"):
            loss = (x @ w[...]).sum()
            gradient = jnp.ones((2, 3)) * x.sum(0)[:, None]
        w[...] = w[...] - lr * gradient
        return loss

    with LocalCluster(ps=1, workers=1) as cluster:
        pids = [cluster.pid(task) for task in cluster.tasks()]
        assert all(psutil.pid_exists(pid) for pid in pids)
        x = np.ones((4, 2), np.float32)
        with cluster.session() as session:
            losses = [session.run(step, x, 0.25) for _ in range(3)]
            value = session.read([w])["w"]
    np.testing.assert_array_equal(losses, [60.0, 36.0, 12.0])
    np.testing.assert_array_equal(value, np.arange(6.0).reshape(2, 3) - 3.0)
    assert not any(psutil.pid_exists(pid) for pid in pids)
