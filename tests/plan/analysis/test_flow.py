"""Dataflow of a function: what is read, written, forwarded, dropped and repeated."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jgraph as jg
from jgraph._compat import Var
from jgraph.plan.analysis.axes import operand_axes, result_axis
from jgraph.plan.analysis.flow import Flow, analyze
from tests.support.plans import graph_of

VECTOR = np.arange(6, dtype=np.float32)


def variable(name: str = "w", size: int = 6) -> jg.Variable:
    return jg.Variable(name, jnp.zeros(size), device="/job:ps/task:0")


def flow_of(fn: Callable[..., Any], *args: Any) -> Flow:
    return analyze(graph_of(fn, *args))


def names(flow: Flow) -> list[str]:
    return [op.equation.primitive.name for op in flow.ops.values()]


def test_a_read_after_a_write_gives_what_was_written() -> None:
    w = variable()

    def step(x: Any) -> Any:
        w[...] = x
        return w[...]

    flow = flow_of(step, VECTOR)
    (write,) = flow.ops.values()
    assert write.is_whole_write
    assert flow.fetches == tuple(flow.feeds)


def test_two_reads_of_one_version_are_one() -> None:
    w = variable()
    flow = flow_of(lambda: (w[...], w[...]))
    (read,) = flow.ops.values()
    assert read.is_whole_read
    assert len(set(flow.fetches)) == 1


def test_a_read_of_the_old_version_is_not_that_of_the_new_one() -> None:
    w = variable()

    def step(x: Any) -> Any:
        before = w[...]
        w[...] = before + x
        return before, w[...]

    flow = flow_of(step, VECTOR)
    assert names(flow) == ["get", "add", "swap"]
    assert len(set(flow.fetches)) == 2


def test_what_no_fetch_and_no_variable_needs_is_dropped() -> None:
    w = variable()

    def step(x: Any) -> Any:
        w[...] = jnp.tanh(x)  # overwritten before anybody could see it
        jnp.sin(x)
        w[...] = jnp.cos(x)

    assert names(flow_of(step, VECTOR)) == ["cos", "swap"]


def test_rows_that_are_written_keep_the_order_of_other_accesses() -> None:
    w = variable()

    def step(ids: Any) -> Any:
        first = w[ids]
        w[ids] = first + 1
        return w[...]

    flow = flow_of(step, np.array([1, 3], np.int32))
    write = next(op for op in flow.ops.values() if op.writes)
    read = next(op for op in flow.ops.values() if op.is_whole_read)
    assert not write.is_whole_write
    assert read.reads == ((0, write.index),)


def test_only_what_is_made_of_single_numbers_is_repeated_by_whoever_needs_it() -> None:
    def step(x: Any, rate: Any) -> Any:
        mask = jnp.arange(6) < 3
        return jnp.where(mask, x, 0.0) * (1.0 - rate)

    flow = flow_of(step, VECTOR, np.float32(0.5))
    free = {flow.ops[n].equation.primitive.name: flow.ops[n] for n in flow.free}
    assert {"iota", "lt", "sub"} <= free.keys()
    assert "mul" not in free  # of x
    _, rate = flow.feeds
    assert flow.sources(free["lt"].equation.outvars) == []
    assert flow.sources(free["sub"].equation.outvars) == [rate]
    fetched = [v for v in flow.fetches if isinstance(v, Var)]
    assert flow.sources(fetched) == fetched


@pytest.mark.parametrize(
    ("fn", "axis", "operands"),
    [
        (lambda a, b: a + b, 0, [0, 0]),
        (lambda a, b: a @ b, 0, [0, None]),
        (lambda a, b: a @ b, 1, [None, 1]),
    ],
    ids=["add", "rows of a product", "columns of a product"],
)
def test_a_cut_of_a_result_says_how_to_cut_its_operands(
    fn: Callable[..., Any], axis: int, operands: list[int | None]
) -> None:
    square = np.ones((4, 4), np.float32)
    (op,) = flow_of(fn, square, square).ops.values()
    assert operand_axes(op.equation, axis) == operands
    for number, cut in enumerate(operands):
        if cut is not None:
            assert result_axis(op.equation, number, cut) == axis


def test_a_sum_over_the_axis_of_a_cut_cannot_be_done_by_shards() -> None:
    flow = flow_of(lambda a: a.sum(axis=0), np.ones((4, 4), np.float32))
    (total,) = flow.ops.values()
    assert operand_axes(total.equation, 0) == [1]
    assert result_axis(total.equation, 0, 0) is None
