"""Short steps that a task is asked for: computed as they come, or driven."""

import asyncio
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.graph.ir import TaskName
from jgraph.graph.tracing.trace import trace
from jgraph.plan.plan import plan
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.server import task_service
from jgraph.server.steps.driver import StepDriver
from tests.support.in_process import cluster_of

PS = TaskName("/job:ps/task:0")
BETWEEN_S = 300e-6
"""Short where a thread would only wait for a core, and not where there are many."""


@pytest.mark.parametrize(("cores", "is_driven"), [(2, False), (64, True)])
def test_a_step_is_driven_only_if_it_may_need_a_thread(
    cores: int, is_driven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_service, "available_cores", lambda: cores)
    driven: list[str] = []
    run = StepDriver.run

    async def noted(
        self: StepDriver, handle: str, feeds: Mapping[str, Any], **more: Any
    ) -> Any:
        driven.append(handle)
        return await run(self, handle, feeds, **more)

    monkeypatch.setattr(StepDriver, "run", noted)

    async def ask() -> Any:
        async with cluster_of([PS]) as (client, services):
            runtime = services[PS].runtime
            graph, _ = trace(lambda x: x * 2, jnp.zeros(3, jnp.float32))
            program = plan(graph, tasks=[PS], driver=PS).program
            loaded = runtime.load(program)
            runtime.register("double", program, loaded, [PS])
            for cost in loaded.costs:
                cost.seconds = BETWEEN_S
            order = pb.RunStep(handle="double", timeout_s=10)
            request = frame(run_step=order, tensors=[np.arange(3, dtype=np.float32)])
            at = services[PS].context.address
            return await client.ask(at, "RunStep", request, timeout_s=20)

    reply = asyncio.run(ask())
    (doubled,) = reply.tensors
    assert 0 < reply.header.busy_s < 10  # of the task, with what it computes
    assert np.asarray(doubled).tolist() == [0, 2, 4]
    assert bool(driven) == is_driven
