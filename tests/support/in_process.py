"""Steps of a cluster inside this process, and what they leave in its variables."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.client.no_handler import NoHandler
from jgraph.clock import SystemClock
from jgraph.cluster.spec import ClusterSpec
from jgraph.graph.device import DeviceSpec
from jgraph.graph.ir import TaskName
from jgraph.plan.plan import Plan
from jgraph.plan.program.types import from_plain, to_plain
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.wire.program_codec import encode_program
from jgraph.server.master import Master
from jgraph.server.task_context import TaskContext
from jgraph.server.task_service import TaskService
from jgraph.testing.in_process_transport import InProcessNetwork, InProcessTransport
from tests.support.plans import Values

Services = dict[TaskName, TaskService]


@asynccontextmanager
async def cluster_of(
    tasks: Sequence[TaskName],
) -> AsyncIterator[tuple[InProcessTransport, Services]]:
    """Yields a client's transport and the service of each task."""
    network = InProcessNetwork()
    transports = {task: network.transport(task) for task in tasks}
    services = {
        task: TaskService(
            TaskContext(task, transport, SystemClock()), lambda grace_s: None
        )
        for task, transport in transports.items()
    }
    for service in services.values():
        Master(service)
    client = network.transport(None)
    async with AsyncExitStack() as stack:
        addresses = {}
        for task, service in services.items():
            addresses[task] = await transports[task].start(service)
            stack.callback(service.shell.close)
            stack.push_async_callback(transports[task].close)
        for service in services.values():
            service.context.set_cluster(cluster_spec(addresses))
        await client.start(NoHandler())
        stack.push_async_callback(client.close)
        yield client, services


def cluster_spec(addresses: dict[TaskName, str]) -> ClusterSpec:
    jobs: dict[str, dict[int, str]] = {}
    for task, address in addresses.items():
        place = DeviceSpec.from_string(task)
        assert place.job is not None
        assert place.task is not None
        jobs.setdefault(place.job, {})[place.task] = address
    return ClusterSpec(jobs)


async def steps(
    planned: Plan,
    tasks: Sequence[TaskName],
    values: Values,
    args: Any,
    count: int,
    watch: Callable[[TaskService], None] = lambda service: None,
) -> list[tuple[list[Any], Values]]:
    """Returns (fetches, new values of the variables) of each step of a new cluster.

    ``watch`` is shown the service of the last task.
    """
    program = planned.program
    leaves = [np.asarray(to_plain(jnp.asarray(x))) for x in jax.tree.leaves(args)]
    async with cluster_of(tasks) as (client, services):
        watch(services[tasks[-1]])
        for partition in program.partitions:
            stored = partition.variables
            plain = [np.asarray(to_plain(jnp.asarray(values[v.name]))) for v in stored]
            services[partition.task].runtime.store.write(stored, plain)
        master = services[program.driver].context.address
        message, tensors = encode_program(program)
        order = pb.RegisterProgram(handle="step", program=message)
        await client.ask(
            master,
            "Master.RegisterProgram",
            frame(register_program=order, tensors=tensors),
            timeout_s=60,
        )
        feeds = dict(zip([f.name for f in planned.graph.feeds], leaves, strict=True))
        results = []
        for _ in range(count):
            reply = await client.ask(
                master,
                "RunStep",
                frame(
                    run_step=pb.RunStep(handle="step", timeout_s=30),
                    tensors=[feeds[name] for name, _ in program.feeds],
                ),
                timeout_s=60,
            )
            results.append(_result(planned, services, values, reply.tensors))
        return results


def _result(
    planned: Plan, services: Services, values: Values, fetched: Sequence[Any]
) -> tuple[list[Any], Values]:
    graph, after = planned.graph, dict(values)
    for partition in planned.program.partitions:
        stored = partition.variables
        views = services[partition.task].runtime.store.read(stored)
        after |= {v.name: np.array(x) for v, x in zip(stored, views, strict=True)}
    outs = [atom.aval for atom in graph.jaxpr.outvars]
    fetches = [from_plain(x, a) for x, a in zip(fetched, outs, strict=True)]
    avals = {v.name: v.aval for v in graph.variables}
    return fetches, {name: from_plain(after[name], avals[name]) for name in values}
