"""What null steps do, as graphs: read on the worker, add on the ps."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

import jgraph as jg
from jgraph.graph.tracing.trace import trace
from jgraph.plan.program.accumulate import SLOT
from jgraph.train.tables.row_mean import RowMean

WIDTH, LOOKUPS = 64, 32
SMALL_BYTES = 1000
"""Of each variable where there are many."""
Kind = Literal["scalar", "dense", "sparse", "many"]


def beside(prefix: str, variable: jg.Variable) -> jg.Variable:
    """Returns the variable for the mean of one, or for the slots of its task."""
    shape, dtype = ((), jnp.int32) if prefix == SLOT else (variable.shape, jnp.float32)
    init: Any = (shape, dtype, None)
    return jg.Variable(prefix + variable.name, init, device=variable.device)


def make_variables(
    kind: Kind, mb: float, rows: int, ps: int, count: int = 0
) -> list[jg.Variable]:
    """Returns what is read and added to: one on each ps, of a table one in all.

    Of ``many`` there are ``count``, in turns on the ps.
    """
    homes = [f"/job:ps/task:{i}" for i in range(ps)] or ["/job:worker/task:0"]
    shape: tuple[int, ...] = ()
    if kind == "dense":
        shape = (int(mb * 1e6 / 4 / len(homes)),)
    if kind == "sparse":
        shape, homes = (rows, WIDTH), homes[:1]
    if kind == "many":
        shape = (SMALL_BYTES // 4,)
        homes = [homes[i % len(homes)] for i in range(count)]
    return [
        jg.Variable(f"v{i}", (shape, jnp.float32, jnp.zeros), device=home)
        for i, home in enumerate(homes)
    ]


def trace_whole(variables: list[jg.Variable]) -> jg.Graph:
    """Reads all variables on the worker, adds one to each on its ps."""

    def step(x: Any) -> Any:
        with jg.device("/job:worker"):
            # Trivial, and not to be folded away: the update depends on what was read.
            updates = [v[...] * 0 + x[0] for v in variables]
        for variable, update in zip(variables, updates, strict=True):
            variable[...] = variable[...] + update
        with jg.device("/job:worker"):
            return x.sum()

    x = jax.ShapeDtypeStruct((1,), jnp.float32)
    return trace(step, x, variables=variables)[0]


def trace_contribution(
    variables: list[jg.Variable], means: list[jg.Variable]
) -> jg.Graph:
    """Reads all variables on the worker, contributes one to the mean for each."""
    slots = [beside(SLOT, v) for v in variables]

    def step(x: Any, slot: Any) -> Any:
        with jg.device("/job:worker"):
            updates = [v[...] * 0 + x[0] for v in variables]
            slot = slot + 0  # a feed stays on the worker, what it computes travels
            total = x.sum()
        for mean, one_slot, update in zip(means, slots, updates, strict=True):
            mean[...] = update
            one_slot[...] = slot
        return total

    x = jax.ShapeDtypeStruct((1,), jnp.float32)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return trace(step, x, number, variables=[*variables, *means, *slots])[0]


def trace_mean(variables: list[jg.Variable], means: list[jg.Variable]) -> jg.Graph:
    """Adds to each variable what is averaged for it."""

    def apply_mean() -> None:
        for variable, mean in zip(variables, means, strict=True):
            variable[...] = variable[...] + mean[...]

    return trace(apply_mean, variables=[*variables, *means])[0]


def trace_row_contribution(mean: RowMean) -> jg.Graph:
    """Reads rows of the table on the worker, contributes one to the mean of each."""
    table, one_slot = mean.table, beside(SLOT, mean.table)

    def step(x: Any, slot: Any) -> Any:
        with jg.device("/job:worker"):
            ids = jnp.sort(x)
        rows = table[ids]
        with jg.device("/job:worker"):
            parts = mean.cut(ids, rows * 0 + 1)
            slot, total = slot + 0, x.sum()
        for part in mean.contributed:
            part[...] = parts[part.name]
        one_slot[...] = slot
        return total

    x = jax.ShapeDtypeStruct((LOOKUPS,), jnp.int32)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    variables = [table, *mean.contributed, one_slot]
    return trace(step, x, number, variables=variables)[0]


def trace_row_mean(mean: RowMean) -> jg.Graph:
    """Adds to the rows of the table what is averaged for them."""
    table = mean.table

    def apply_mean() -> None:
        touched, update = mean.read()
        table[touched.unique] = table[touched.unique] + update

    return trace(apply_mean, variables=[table, *mean.averaged])[0]


def trace_rows(variables: list[jg.Variable]) -> jg.Graph:
    """Reads rows of the table on the worker, adds one to each on its ps."""
    (table,) = variables

    def step(x: Any) -> Any:
        rows = table[x]
        with jg.device("/job:worker"):
            update = rows * 0 + 1
        table[x] = table[x] + update
        with jg.device("/job:worker"):
            return x.sum()

    x = jax.ShapeDtypeStruct((LOOKUPS,), jnp.int32)
    return trace(step, x, variables=variables)[0]
