import asyncio
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.errors import CancelledStepError
from jgraph.graph.device import device
from jgraph.graph.ir import TaskName
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.plan.plan import plan
from jgraph.rpc.frames import kind_of
from jgraph.rpc.transport import Frame
from tests.support.in_process import cluster_of
from tests.support.run_async import run_async

WORKER, PS = TaskName("/job:worker/task:0"), TaskName("/job:ps/task:0")


def test_a_step_that_cannot_begin_here_ends_on_all_tasks_that_were_told() -> None:
    weights = Variable("w", jnp.zeros(4), device=PS)

    def step(x: Any) -> Any:
        with device(WORKER):
            return jnp.tanh(weights[...]) + x

    x = np.ones(4, np.float32)
    graph, _ = trace(step, x, variables=[weights])
    program = plan(graph, tasks=[WORKER, PS], driver=WORKER).program

    async def scenario() -> None:
        async with cluster_of([WORKER, PS]) as (_, services):
            ended = asyncio.Event()
            take = services[PS].frame_received

            def noted(src: TaskName, received: Frame) -> None:
                take(src, received)
                if kind_of(received) == "abort_step":
                    ended.set()

            services[PS].frame_received = noted  # type: ignore[method-assign]
            for service in services.values():
                runtime = service.runtime
                runtime.register("h", program, runtime.load(program), [WORKER, PS])
            driver, told = services[WORKER].driver, list[object]()
            services[WORKER].runtime.abort(("h", 1), CancelledStepError("before it"))
            with pytest.raises(CancelledStepError, match="had not begun"):
                driver.start(
                    "h",
                    {program.feeds[0][0]: x},
                    lambda fetches, times: told.append(fetches),
                    told.append,
                    timeout_s=30,
                )
            assert not driver.steps
            async with asyncio.timeout(10):
                await ended.wait()
            assert not services[PS].runtime.steps
            assert not told

    run_async(scenario())
