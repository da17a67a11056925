"""Loops whose updates count themselves into a ledger."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.client.cluster import Cluster
from jgraph.client.session import Session
from jgraph.cluster.loop_messages import LoopRequest
from jgraph.graph.device import DeviceSpec, device
from jgraph.graph.ir import TaskName
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.plan.plan import plan

WORKERS = [TaskName("/job:worker/task:0"), TaskName("/job:worker/task:1")]
BATCH = 4


def ledger() -> Variable:
    """One cell per (replica, step): every applied update adds 1 to its own."""
    return Variable("ledger", jnp.zeros((2, 64)), device="/job:ps/task:0")


def requests(session: Session, cluster: Cluster, steps: int) -> list[LoopRequest]:
    """A program whose update counts into the ledger, registered for both workers."""
    cells = ledger()
    count = Variable("count", jnp.int32(0), device="/job:ps/task:1")
    session.initialize([cells, count])

    def step(x: Any, step: Any, replica: Any) -> Any:
        with device("/job:worker"):
            read = cells[...]
            # Depends on what was read, as a gradient does, and is exactly one.
            one = jnp.where(jnp.isfinite(read.sum()), 1.0, jnp.nan)
            update = jnp.zeros((2, 64)).at[replica, step].set(one)
            seen = x.sum()
        cells[...] = cells[...] + update
        count[...] = count[...] + 1
        return seen

    number = jax.ShapeDtypeStruct((), jnp.int32)
    graph, _ = trace(
        step,
        jax.ShapeDtypeStruct((BATCH,), jnp.float32),
        number,
        number,
        variables=[cells, count],
    )
    planned = plan(
        graph,
        tasks=cluster.tasks(),
        driver=WORKERS[0],
        default=DeviceSpec.from_string(WORKERS[0]),
    )
    orders = []
    for replica, worker in enumerate(WORKERS):
        data = {"x": np.arange(16, dtype=np.float32) + 100 * replica}
        session.put_data(worker, "train", data)
        program = planned.program.rename_task(WORKERS[0], worker)
        orders.append(
            LoopRequest(
                task=worker,
                handle=session.register(program),
                data="train",
                steps=steps,
                batch_size=BATCH,
                replica=replica,
                step_feed="step",
                replica_feed="replica",
                step_timeout_s=20,
                report_every_s=0.02,
            )
        )
    return orders
