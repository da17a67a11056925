"""Programs in which one task has the part of another beside its own."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.graph.device import device
from jgraph.graph.ir import TaskName
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.plan.plan import plan
from jgraph.plan.program.accumulate import averaging, contributing
from jgraph.plan.program.nodes import RecvNode, SendNode
from jgraph.plan.program.program import Program
from jgraph.plan.program.stand_in import standing_in
from jgraph.rpc.wire.program_codec import decode_program, encode_program
from tests.support.graph_interpreter import run_program

A, B, C = TASKS = [TaskName(f"/job:worker/task:{n}") for n in range(3)]
PS = TaskName("/job:ps/task:0")
STAND_INS = [{B: C}, {A: B}, {C: A}, {A: C, B: C}, {B: PS}, {A: PS, B: PS, C: PS}]


def programs() -> tuple[Program, Program]:
    """Three workers hold a weight each; the first contributes, and updates take a norm.

    What a weight becomes hangs on all others, by messages in both directions.
    """
    weights = [
        Variable(f"w{n}", ((3,), jnp.float32, None), device=task)
        for n, task in enumerate(TASKS)
    ]
    means = [
        Variable(f"mean/w{n}", ((3,), jnp.float32, None), device=task)
        for n, task in enumerate(TASKS)
    ]
    slots = [
        Variable(f"slot/{n}", ((), jnp.int32, None), device=task)
        for n, task in enumerate(TASKS)
    ]

    def gradient(x: Any, slot: Any) -> Any:
        with device(A):
            total = sum(weight[...] for weight in weights) * x
            slot = slot + 0
        for n, target in enumerate(means):
            target[...] = total * (n + 1)
        for target in slots:
            target[...] = slot
        return total

    def apply_mean() -> Any:
        norm = jnp.sqrt(sum(jnp.sum(target[...] ** 2) for target in means))
        for weight, target in zip(weights, means, strict=True):
            weight[...] = weight[...] - target[...] / norm
        return norm

    avals = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    first, _ = trace(gradient, *avals, variables=[*weights, *means, *slots])
    second, _ = trace(apply_mean, variables=[*weights, *means])
    return (
        contributing(plan(first, tasks=TASKS, driver=A).program, "gate"),
        averaging(plan(second, tasks=TASKS, driver=B).program, "gate", TASKS),
    )


def trained(gradient: Program, update: Program) -> dict[str, Any]:
    """Returns the weights after two contributions and their mean, and the norm."""
    store: dict[tuple[str, str], Any] = {
        ("", f"w{n}"): np.array([1, 2, 3], np.float32) + n for n in range(len(TASKS))
    }
    for slot, x in [(1, 3.0), (0, 1.0)]:
        run_program(gradient, store, {"x": np.float32(x), "slot": np.int32(slot)})
    (norm,) = run_program(update, store, {})
    found = {name: np.asarray(store["", name]) for name in ("w0", "w1", "w2")}
    return {**found, "norm": norm}


@pytest.mark.parametrize("by", STAND_INS, ids=str)
def test_a_stand_in_computes_what_both_did_bit_by_bit(
    by: Mapping[TaskName, TaskName],
) -> None:
    """All orders of who has whose part, that of the driver among them."""
    gradient, update = programs()
    wanted = trained(gradient, update)
    found = trained(standing_in(gradient, by), standing_in(update, by))
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize("by", STAND_INS, ids=str)
def test_nobody_hears_of_who_is_away_and_nothing_new_is_compiled(
    by: Mapping[TaskName, TaskName],
) -> None:
    for program in programs():
        changed = standing_in(program, by)
        assert decode_program(*encode_program(changed)) == changed  # it is checked
        assert {s.digest for s in changed.segments} == {
            s.digest for s in program.segments
        }
        peers = {
            node.dst if isinstance(node, SendNode) else node.src
            for part in changed.partitions
            for node in part.nodes
            if isinstance(node, SendNode | RecvNode)
        }
        assert not peers & by.keys()
        assert changed.driver == by.get(program.driver, program.driver)


def test_one_alone_sends_nothing() -> None:
    for program in programs():
        alone = standing_in(program, {B: A, C: A})
        (part,) = alone.partitions
        assert not [n for n in part.nodes if isinstance(n, SendNode | RecvNode)]
