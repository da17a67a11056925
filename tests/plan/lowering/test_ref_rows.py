"""Rows of variables that a function takes by ids are moved as rows."""

import re
from typing import Any

import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jgraph as jg
from jgraph.plan.plan import plan
from tests.support.plans import DRIVER, PS, TASKS, check_plan, graph_of


def table() -> jg.Variable:
    rows = jnp.arange(60, dtype=jnp.float32).reshape(10, 6)
    return jg.Variable("table", rows, device=PS[0])


def test_whole_rows_are_gathered_and_scattered_not_their_numbers() -> None:
    t = table()

    def step(ids: Any) -> Any:
        rows = t[ids]
        t[ids] = rows * 2
        return rows.sum()

    ids = np.array([3, 1], np.int32)
    program = plan(graph_of(step, ids, variables=[t]), tasks=TASKS, driver=DRIVER)
    code = "".join(
        jax.export.deserialize(bytearray(s.exported)).mlir_module()
        for s in program.program.segments
    )
    assert re.findall(r"slice_sizes = array<i64: ([\d, ]+)>", code) == ["1, 6"]
    assert "update_window_dims = [1]" in code


@pytest.mark.parametrize("ids", [[3, 1], [-1, 0], [9]])
def test_rows_are_those_that_jax_takes(ids: list[int]) -> None:
    t = table()

    def step(ids: Any, x: Any) -> Any:
        old = t[ids]
        t[ids] = x
        t[ids] = t[ids] * 2 + old
        t[2, 1:3] = x[0, :2]
        return old, t[ids], t[...]

    taken = np.array(ids, np.int32)
    check_plan(step, taken, np.ones((len(ids), 6), np.float32), variables=[t])
