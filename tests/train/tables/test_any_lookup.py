"""Lookups drawn at random: what a step makes of a table is what plain JAX makes of it.

Each seed draws a table, types and numbers of ids, operations on these, a way to look
rows up, and an optimizer. Two steps of the graph, whose lookups may be of rows, are
compared with two of ``jax.jit``. Ids out of range may be refused, and those in range
never.
"""

import random
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Final, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jgraph.graph.graph import eval_graph
from jgraph.train.data.data import as_dataset
from jgraph.train.model.adapters import adapt
from jgraph.train.step.applied import id_check_of
from jgraph.train.step.train_step import TrainStep

SEEDS: Final = 200
BLOCK: Final = 5
EXAMPLES: Final = 4
STEPS: Final = 2
# What tests compile with takes numbers of 8 bits wrongly, in plain JAX, too.
_OPTIONS: Final[Any] = (
    {"xla_cpu_use_fusion_emitters": True}
    if version("jaxlib").startswith("0.10.")
    else None
)
Operation: TypeAlias = Callable[[Any], Any]
Lookup: TypeAlias = Callable[[Any, Any], Any]

_OPERATIONS: Final[dict[str, Operation]] = {
    "int8": lambda x: x.astype(jnp.int8),
    "int16": lambda x: x.astype(jnp.int16),
    "int32": lambda x: x.astype(jnp.int32),
    "uint8": lambda x: x.astype(jnp.uint8),
    "uint32": lambda x: x.astype(jnp.uint32),
    "by way of float32": lambda x: x.astype(jnp.float32).astype(jnp.int32),
    "one more": lambda x: x + 1,
    "three less": lambda x: x - 3,
    "halved": lambda x: x // 2,
    "remainder": lambda x: x % 13,
    "clipped": lambda x: jnp.clip(x, 0, 12),
    "abs": abs,
    "small ones are 0": lambda x: jnp.where(x > 5, x, 0),
    "negative ones wrap": lambda x: jnp.where(x < 0, x + 13, x),
    "some columns": lambda x: x[:, 1:] if x.ndim == 2 and x.shape[1] > 1 else x,
    "reversed": lambda x: x[::-1],
    "transposed": lambda x: x.T,
    "repeated": lambda x: jnp.repeat(x, 2, 0),
    "sorted": lambda x: jnp.sort(x, -1),
    "negated": lambda x: -x,
    "flat": lambda x: x.reshape(-1),
    "one more axis": lambda x: x[None],
    "compared": lambda x: x > 3,
    "at least 0": lambda x: jnp.maximum(x, 0),
    "joined with others": lambda x: jnp.concatenate([x, x + 1]),
    "in a jit": jax.jit(lambda y: y[..., :1]),
    "argmax of one_hot": lambda x: jnp.argmax(jax.nn.one_hot(x, 13), -1),
    "unique": lambda x: jnp.unique(x, size=4, fill_value=0),
}
_LOOKUPS: Final[dict[str, Lookup]] = {
    "t[i]": lambda t, i: t[i],
    "t[i, :]": lambda t, i: t[i, :],
    "t[i, 0]": lambda t, i: t[i, 0],
    "a column of t[i]": lambda t, i: t[i][..., :1],
    "take": lambda t, i: jnp.take(t, i, axis=0),
    "take, fill": lambda t, i: jnp.take(t, i, axis=0, mode="fill", fill_value=0),
    "take, clip": lambda t, i: jnp.take(t, i, axis=0, mode="clip"),
    "take, wrap": lambda t, i: jnp.take(t, i, axis=0, mode="wrap"),
    "at, in bounds": lambda t, i: t.at[i].get(mode="promise_in_bounds"),
    "at, fill with 0": lambda t, i: t.at[i].get(mode="fill", fill_value=0),
    "at, fill": lambda t, i: t.at[i].get(mode="fill"),
    "vmap": lambda t, i: jax.vmap(lambda row: t[row])(i),
    "dynamic_index": lambda t, i: jax.vmap(
        lambda row: jax.lax.dynamic_index_in_dim(t, row, 0, keepdims=False)
    )(i.reshape(-1)),
    "of bfloat16": lambda t, i: t.astype(jnp.bfloat16)[i].astype(jnp.float32),
    "of another table": lambda t, i: (2 * t)[i],
    "twice": lambda t, i: t[i] + jnp.take(t, jnp.clip(i, 0, 12), axis=0),
    "in a checkpoint": jax.checkpoint(lambda t, i: jnp.sin(t[i])),
}


class Table(nn.Module):
    """A table with these values, and the ids as they came."""

    values: Any

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        self.param("t", lambda _: jnp.asarray(self.values))
        return ids


class Case:
    """What a seed draws."""

    def __init__(self, seed: int) -> None:
        draw, numbers = random.Random(seed), np.random.default_rng(seed)
        self.rows = draw.choice([300, 40, 13])
        dtype = np.dtype(draw.choice(["int8", "int16", "int32", "uint8", "uint32"]))
        count = draw.choice([0, 1, 1, 2, 3])
        self.chain = [draw.choice(list(_OPERATIONS)) for _ in range(count)]
        self.lookup = draw.choice(list(_LOOKUPS))
        self.optimizer = draw.choice(["sgd", "adam"])
        least, most = draw.choice(
            [(0, 12), (0, self.rows - 1), (-3, self.rows + 2), (0, 13)]
        )
        drawn = numbers.integers(least, most + 1, (EXAMPLES, 3))
        kind: Any = np.iinfo(dtype)
        self.ids = np.clip(drawn, kind.min, kind.max).astype(dtype)
        self.batch = {
            "ids": self.ids,
            "y": numbers.normal(size=EXAMPLES).astype(np.float32),
        }
        self.values = numbers.normal(size=(self.rows, 4)).astype(np.float32)
        self.tx = {"sgd": optax.sgd, "adam": optax.adam}[self.optimizer](0.1)

    def __str__(self) -> str:
        chain = ", ".join(self.chain) or "as they are"
        return (
            f"{self.lookup} of {self.rows} rows by {self.ids.dtype}, {chain}; "
            f"{self.optimizer}"
        )

    def used(self, ids: Any) -> Any:
        """Returns the ids by which rows are looked up."""
        for name in self.chain:
            ids = _OPERATIONS[name](ids)
        return ids.astype(jnp.int32) if ids.dtype == bool else ids

    def loss(self, params: Any, batch: Any) -> Any:
        rows = _LOOKUPS[self.lookup](params["t"], self.used(batch["ids"]))
        return 0.01 * jnp.mean((jnp.sin(rows).sum() - batch["y"]) ** 2)

    def is_allowed(self) -> bool:
        """Whether JAX alone does this."""
        try:
            jax.grad(self.loss)({"t": self.values}, self.batch)
        except (TypeError, ValueError, OverflowError):
            return False
        return True

    def by_hand(self) -> Any:
        """Returns the table after some steps of plain JAX."""
        params: Any = {"t": jnp.asarray(self.values)}
        state = self.tx.init(params)
        gradient = jax.jit(jax.grad(self.loss), compiler_options=_OPTIONS)
        for _ in range(STEPS):
            updates, state = self.tx.update(gradient(params, self.batch), state, params)
            params = optax.apply_updates(params, updates)
        return np.asarray(params["t"])


def by_graph(case: Case, *, alone: bool) -> tuple[Any, bool]:
    """Returns the table after some steps of a graph, and whether ids are refused."""
    data = as_dataset(case.batch)
    adapter = adapt(Table(case.values), case.loss, seed=0, data=as_dataset(case.ids))
    step = TrainStep(adapter, case.tx, alone=alone, sparse="exact")
    avals = data.step_avals(EXAMPLES)
    graph, rows = step.graph(avals), step.row_step(avals)
    leaves, zero = jax.tree.leaves(case.batch), np.int32(0)
    is_refused = False
    if rows is not None and rows.lookups():
        check = id_check_of(step, avals)
        assert check is not None
        is_refused = check.error(check.look(zero, zero, *leaves), 0) is not None
    run = jax.jit(
        lambda values, feeds: eval_graph(graph, values, feeds)[1],
        compiler_options=_OPTIONS,
    )
    values = step.initial_values
    for number in range(STEPS):
        values = run(values, [*leaves, np.int32(number), zero])
    found = dict(zip(step.names, values, strict=True))["params/t"]
    return np.asarray(found), is_refused


@pytest.mark.parametrize(
    "first",
    [
        0,
        *(
            pytest.param(first, marks=pytest.mark.nightly)
            for first in range(BLOCK, SEEDS, BLOCK)
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of JAX, about numbers that do not fit
def test_any_lookup_of_a_table_is_what_plain_jax_makes_of_it(first: int) -> None:
    compared = 0
    for seed in range(first, first + BLOCK):
        case = Case(seed)
        if not case.is_allowed():
            continue
        compared += 1
        wanted, used = case.by_hand(), np.asarray(case.used(jnp.asarray(case.ids)))
        is_in_range = bool(((used >= 0) & (used < case.rows)).all())
        for alone in (True, False):
            found, is_refused = by_graph(case, alone=alone)
            assert not (is_in_range and is_refused), f"seed {seed}: {case}"
            if not is_refused:
                np.testing.assert_allclose(
                    found, wanted, 1e-4, 1e-5, err_msg=f"seed {seed}: {case}"
                )
    assert compared > 0
