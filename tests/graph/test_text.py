"""The text of a graph is stable and says what a reader needs."""

from typing import Any

import jax
import jax.numpy as jnp

from jgraph.graph.device import device
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable


def make_step() -> Any:
    w = Variable("w", jnp.ones((3, 2)), device="/job:ps/task:0")
    table = jnp.arange(2.0)

    def step(batch: Any, lr: Any) -> Any:
        with device("/job:worker/task:0"):
            h = jnp.tanh(batch["x"] @ w[...]) + table
        _, rows = jax.lax.scan(lambda c, row: (c, row * lr), 0.0, h)
        w[...] = w[...] - rows.sum()
        return {"loss": rows, "one": 1.0}

    return step


def test_graph_prints_one_line_per_equation_with_its_device() -> None:
    graph, _ = trace(make_step(), {"x": jnp.ones((4, 3))}, 0.5)
    lines = str(graph).splitlines()
    assert lines[:7] == [
        "graph step",
        "  variables",
        "    w: float32[3,2]  @/job:ps/task:0",
        "  feeds",
        "    batch['x']: float32[4,3]",
        "    lr: float32[]",
        "  constants",
    ]
    first, last = lines.index("  equations") + 1, lines.index("  fetches")
    assert last - first == len(graph.equations)
    assert lines[first] == "    %0:float32[3,2] = get w  @/job:worker/task:0"
    assert lines[first + 2] == "    %2:float32[4,2] = tanh %1  @/job:worker/task:0"
    loop = next(line for line in lines if "scan" in line)
    assert "length=4" in loop
    assert loop.endswith("jaxpr={convert_element_type mul}] 0.0 lr %4")
    assert lines[-1] == "    ['one']: 1.0"


def test_two_traces_of_one_function_give_one_text() -> None:
    args = {"x": jnp.ones((4, 3))}, 0.5
    assert str(trace(make_step(), *args)[0]) == str(trace(make_step(), *args)[0])


def test_text_holds_no_identity_of_an_object() -> None:
    def step(x: jax.Array) -> Any:
        x = jax.nn.relu(jnp.linalg.norm(x) * x)
        x = jax.lax.while_loop(lambda y: y.sum() < 9, lambda y: y + 1, x)
        return jax.lax.custom_root(lambda y: y - x, x, lambda f, y: x, lambda g, y: y)

    assert " at 0x" not in str(trace(step, jnp.ones(3))[0])


def test_two_different_functions_give_two_texts() -> None:
    assert str(trace(jnp.sin, 1.0)[0]) != str(trace(jnp.cos, 1.0)[0])
    by_axis = [trace(lambda x, a=a: x.sum(a), jnp.ones((2, 2)))[0] for a in (0, 1)]
    assert str(by_axis[0]) != str(by_axis[1])
