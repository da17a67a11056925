"""What a task's process takes for a step, measured by the kernel, beside the plan."""

import pathlib
import re
import statistics
import sys
from typing import Any

import jax.numpy as jnp
import pytest

import jgraph as jg
from jgraph.graph.ir import TaskName
from jgraph.launch.local.cluster import LocalCluster
from jgraph.testing.memory_use import held_nbytes

STAGES, MICROBATCHES, ROWS = 3, 8, 64
PART = 4_000_000
WIDTH = PART // 4 // (ROWS // MICROBATCHES)
# What is freed goes back to the kernel, and nothing but the step takes memory.
FREED = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "XLA_FLAGS": "",
    "JAX_NUM_CPU_DEVICES": "1",
}


def stage(w: Any, x: Any) -> Any:
    # All that the derivative of exp needs is its value, in every JAX.
    return jnp.exp(-w * jnp.exp(-w * jnp.exp(-w * x)))


def pipeline_step(schedule: Any) -> tuple[jg.Pipeline, Any]:
    """Returns a step over stages that keep three large values each per microbatch."""
    pipe = jg.Pipeline(
        [stage] * STAGES,
        lambda y, t: ((y - t) ** 2).mean(),
        microbatches=MICROBATCHES,
        schedule=schedule,
    )
    w = [
        jg.Variable(f"w{n}", ((WIDTH,), "float32", jnp.ones), device=device)
        for n, device in enumerate(pipe.devices)
    ]
    x = jg.Variable(
        "x", ((ROWS, WIDTH), "float32", jnp.ones), device=f"/job:worker/task:{STAGES}"
    )

    def step() -> Any:
        data = x[...]
        loss, gradients = pipe.value_and_grad([v[...] for v in w], data, data)
        for v, g in zip(w, gradients, strict=True):
            v[...] = v[...] - g
        return loss

    return pipe, jg.function(step)


def resident(pid: int, what: str) -> int:
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    match = re.search(rf"^{what}:\s+(\d+) kB", status, flags=re.M)
    assert match is not None
    return int(match[1]) * 1024


def grown_by_a_step(
    cluster: LocalCluster, call: Any, tasks: list[TaskName]
) -> list[int]:
    """Returns by how much the memory of each task grew at most during a step."""
    before = {}
    for task in tasks:
        pid = cluster.pid(task)
        pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")  # peak = now
        before[task] = resident(pid, "VmRSS")
    call()
    return [resident(cluster.pid(t), "VmHWM") - before[t] for t in tasks]


@pytest.mark.procs
@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_process_takes_what_the_plan_says_within_a_fifth(schedule: Any) -> None:
    cluster = LocalCluster(ps=0, workers=STAGES + 1, env=FREED, transport="grpc")
    with cluster, cluster.session() as session:
        pipe, step = pipeline_step(schedule)
        call = session.make_callable(step)
        planned = held_nbytes(call.plan.program)
        tasks = [TaskName(device) for device in pipe.devices]
        call()  # threads, and what else is made once
        turns = [grown_by_a_step(cluster, call, tasks) for _ in range(5)]
    for task, *grown in zip(tasks, *turns, strict=True):
        assert statistics.median(grown) == pytest.approx(planned[task], rel=0.2)
