"""Contributing and averaging: programs rewritten, and means that are reproducible."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jgraph.errors import InternalError
from jgraph.graph.device import device
from jgraph.graph.ir import TaskName
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.plan.plan import plan
from jgraph.plan.program.accumulate import (
    averaging,
    contributing,
    gated,
    mean,
    shards_of,
)
from jgraph.plan.program.nodes import AggregateNode, ContributeNode
from jgraph.plan.program.program import Program
from jgraph.rpc.wire.program_codec import decode_program, encode_program
from tests.support.graph_interpreter import run_program

PS = [TaskName("/job:ps/task:0"), TaskName("/job:ps/task:1")]
WORKER = TaskName("/job:worker/task:0")


def variable(name: str, task: str, value: Any = None) -> Variable:
    init: Any = ((3,), jnp.float32, None) if value is None else value
    return Variable(name, init, device=task)


def programs() -> tuple[Program, Program]:
    """Two weights on two ps, a gradient that is their sum times the feed."""
    weights = [variable(f"w{i}", task) for i, task in enumerate(PS)]
    means = [variable(f"mean/w{i}", task) for i, task in enumerate(PS)]
    slots = [
        Variable(f"slot/{i}", ((), jnp.int32, None), device=task)
        for i, task in enumerate(PS)
    ]

    def gradient(x: Any, slot: Any) -> Any:
        with device(WORKER):
            total = (weights[0][...] + weights[1][...]) * x
            slot = slot + 0
        for target in means:
            target[...] = total
        for target in slots:
            target[...] = slot
        return total

    def apply_mean() -> Any:
        norm = jnp.sqrt(sum(jnp.sum(m[...] ** 2) for m in means))
        for weight, target in zip(weights, means, strict=True):
            weight[...] = weight[...] - target[...] / norm
        return norm

    avals = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    tasks = [*PS, WORKER]
    first, _ = trace(gradient, *avals, variables=[*weights, *means, *slots])
    second, _ = trace(apply_mean, variables=[*weights, *means])
    return (
        contributing(plan(first, tasks=tasks, driver=WORKER).program, "gate"),
        averaging(plan(second, tasks=tasks, driver=PS[0]).program, "gate", PS),
    )


def test_contributions_of_several_steps_are_averaged_and_applied_once() -> None:
    gradient, update = programs()
    store: dict[tuple[str, str], Any] = {
        ("", f"w{i}"): np.array([1, 2, 3], np.float32) for i in range(2)
    }
    for slot, x in [(1, 3.0), (0, 1.0)]:
        run_program(gradient, store, {"x": np.float32(x), "slot": np.int32(slot)})
    np.testing.assert_array_equal(store["", "w0"], [1, 2, 3])
    (norm,) = run_program(update, store, {})
    due = np.array([4, 8, 12], np.float32)
    assert norm == pytest.approx(np.sqrt(2 * (due**2).sum()))
    np.testing.assert_allclose(
        store["", "w1"], np.array([1, 2, 3], np.float32) - due / norm
    )
    assert not [key for key in store if "@" in key[1]]


def test_each_shard_contributes_and_averages_once() -> None:
    gradient, update = programs()
    assert shards_of(gradient) == shards_of(update) == PS
    for task in PS:
        kinds = [type(n) for n in gradient.partition(task).nodes]
        assert kinds.count(ContributeNode) == 1
        assert isinstance(update.partition(task).nodes[0], AggregateNode)


@pytest.mark.parametrize("which", [0, 1])
def test_programs_with_gates_travel_unchanged(which: int) -> None:
    program = programs()[which]
    assert decode_program(*encode_program(program)) == program


def test_asynchronous_program_passes_the_gate_where_variables_are() -> None:
    w = variable("w", PS[0])

    def step(x: Any) -> Any:
        with device(WORKER):
            total = w[...] * x
        w[...] = w[...] - total
        return x

    aval = jax.ShapeDtypeStruct((), jnp.float32)
    graph, _ = trace(step, aval, variables=[w])
    program = plan(graph, tasks=[*PS, WORKER], driver=WORKER).program
    assert shards_of(gated(program, "gate")) == [PS[0]]


def test_write_of_something_else_is_a_fault_of_the_graph() -> None:
    w = variable("w", PS[0])

    def step(x: Any) -> Any:
        w[...] = jnp.ones(3) * x
        return x

    aval = jax.ShapeDtypeStruct((), jnp.float32)
    program = plan(
        trace(step, aval, variables=[w])[0], tasks=[*PS, WORKER], driver=WORKER
    ).program
    with pytest.raises(InternalError, match="writes \\['w'\\]"):
        contributing(program, "gate")


@given(
    count=st.integers(1, 4),
    size=st.sampled_from([0, 1, 7, 70_000]),
    dtype=st.sampled_from(["float32", "float64", "complex64"]),
)
def test_mean_is_the_sum_in_order_over_the_count(
    count: int, size: int, dtype: str
) -> None:
    rng = np.random.default_rng(count)
    values = [rng.normal(size=size).astype(dtype) for _ in range(count)]
    total = values[0].copy()
    for value in values[1:]:
        total += value
    np.testing.assert_array_equal(mean(values), total / np.array(count, dtype))


def test_half_types_are_summed_as_float32() -> None:
    values = [np.array([256.0, 1.0], ml_dtypes.bfloat16)] * 3
    result = mean(values)
    assert result.dtype == ml_dtypes.bfloat16
    assert result.astype(np.float32).tolist() == [256.0, 1.0]


def test_mean_keeps_shape_and_is_aligned_for_jax() -> None:
    result = mean([np.ones((2, 3, 4), np.float32)])
    assert result.shape == (2, 3, 4)
    assert result.ctypes.data % 64 == 0
