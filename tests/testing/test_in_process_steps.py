"""Whole training steps through services, executors and the in-process transport."""

import functools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from jgraph.client.no_handler import NoHandler
from jgraph.clock import SystemClock
from jgraph.cluster.spec import ClusterSpec
from jgraph.graph.device import DeviceSpec, device
from jgraph.graph.ir import TaskName
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.plan.plan import Plan, plan
from jgraph.plan.program.types import from_plain, to_plain
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame, kind_of
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.program_codec import encode_program
from jgraph.server.master import Master
from jgraph.server.task_service import TaskService
from jgraph.testing.in_process_transport import InProcessNetwork, InProcessTransport
from tests.plan.test_plan import scattered, traced
from tests.support.plans import Values, reference
from tests.support.programs import EXAMPLES
from tests.support.run_async import run_async

Services = dict[TaskName, TaskService]


@asynccontextmanager
async def cluster_of(
    tasks: Sequence[TaskName],
) -> AsyncIterator[tuple[InProcessTransport, Services]]:
    """Yields a client's transport and the service of each task."""
    network = InProcessNetwork()
    transports = {task: network.transport(task) for task in tasks}
    services = {
        task: TaskService(task, transport, SystemClock(), lambda grace_s: None)
        for task, transport in transports.items()
    }
    masters = [
        Master(s, transports[task], SystemClock()) for task, s in services.items()
    ]
    client = network.transport(None)
    async with AsyncExitStack() as stack:
        for task, service in services.items():
            service.address = await transports[task].start(service)
            stack.callback(service.shell.close)
            stack.push_async_callback(transports[task].close)
        spec = cluster_spec({task: s.address for task, s in services.items()})
        for master, transport in zip(masters, transports.values(), strict=True):
            master.set_cluster(spec)
            transport.set_peers({task: spec.address(task) for task in tasks})
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


async def one_step(
    planned: Plan, tasks: Sequence[TaskName], values: Values, args: Any
) -> tuple[list[Any], Values]:
    """Returns (fetches, new values of the variables) of one step of a new cluster."""
    return (await steps(planned, tasks, values, args, 1))[0]


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
        master = services[program.driver].address
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


@functools.cache
def wanted(name: str) -> tuple[list[Any], Values]:
    example, graph, values = traced(name)
    return reference(graph, values, example.args, {})


def assert_close(got: Any, wanted: Any) -> None:
    """Within 1e-6 of each array's largest; what is zero but for rounding counts as 0.1.

    Servers compile each segment in their own way, with all of XLA's fusions.
    """
    structures: list[Any] = [jax.tree.structure(got), jax.tree.structure(wanted)]
    assert structures[0] == structures[1]
    paths = jax.tree_util.tree_flatten_with_path(wanted)[0]
    for (path, want), have in zip(paths, jax.tree.leaves(got), strict=True):
        a, b = np.asarray(to_plain(have)), np.asarray(to_plain(want))
        limit = 1e-6 * float(np.max(np.abs(b), initial=0.1))
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=0, atol=limit, err_msg=name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if "transformer" in name else ())
        for name in EXAMPLES
    ],
)
# A seed has nothing to shrink to, and each try compiles anew.
@settings(
    max_examples=1,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(seed=st.integers(0, 2**16))
def test_a_step_over_the_transport_computes_what_one_jit_computes(
    name: str, seed: int
) -> None:
    example, graph, values = traced(name)
    stamped, tasks, homes = scattered(graph, seed)
    planned = plan(stamped, tasks=tasks, driver=tasks[0], variable_tasks=homes)
    got = run_async(one_step(planned, tasks, values, example.args), timeout_s=100)
    assert_close(got, wanted(name))


@pytest.mark.parametrize(
    ("size", "kinds"), [(4, ["values"]), (1 << 18, ["start_step", "values"])]
)
def test_order_to_begin_a_step_travels_with_small_values(
    size: int, kinds: list[str]
) -> None:
    driver, ps = TaskName("/job:worker/task:0"), TaskName("/job:ps/task:0")
    total = Variable("total", jnp.zeros(()), device=ps)

    def add(x: Any) -> None:
        with device(ps):
            total[...] = total[...] + x.sum()

    x = np.ones(size, np.float32)
    graph, _ = trace(add, x, variables=[total])
    planned = plan(graph, tasks=[driver, ps], driver=driver)
    got: list[str] = []

    def watch(service: TaskService) -> None:
        take = service.frame_received

        def received(src: TaskName, received: Frame) -> None:
            got.append(kind_of(received))
            take(src, received)

        service.frame_received = received  # type: ignore[method-assign]

    run_async(steps(planned, [driver, ps], {"total": 0.0}, x, 2, watch=watch))
    assert got == kinds * 2
