"""What a plan says of a step's messages, for a simulation of other clusters."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import jgraph as jg
from jgraph.graph.ir import TaskName
from jgraph.plan.plan import Plan, plan
from jgraph.plan.traffic import Held

PS = TaskName("/job:ps/task:0"), TaskName("/job:ps/task:1")
WORKER = TaskName("/job:worker/task:0")


def test_a_plan_is_written_with_its_messages_and_its_work(tmp_path: Path) -> None:
    a = jg.Variable("a", jnp.ones((8, 4)), device=PS[0])
    b = jg.Variable("b", jnp.ones(4), device=PS[1])

    def step(x: Any) -> Any:
        with jg.device("/job:worker"):
            gradient = x.T @ (x @ a[...] + b[...])
        a[...] = a[...] - gradient
        return gradient.sum()

    graph = jg.function(step).graph(np.ones((2, 8), np.float32))
    planned = plan(graph, tasks=[*PS, WORKER], driver=WORKER)
    planned.save(tmp_path / "plan.json")
    found = Plan.load(tmp_path / "plan.json")
    assert found == planned.traffic()
    assert found.on_ps == (Held("a", PS[0], 128), Held("b", PS[1], 16))
    assert found.read == 128 + 16
    assert found.written >= 128
    assert found.work[WORKER].flops >= 2 * 2 * (2 * 8 * 4)
