"""Random programs on a cluster of any shape, against one ``jax.jit``."""

import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import jgraph as jg
from jgraph.client.values import joined, split
from jgraph.graph.ir import TaskName
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.plan.plan import plan
from tests.support.fuzz.recipes import (
    OPS,
    STATE_OPS,
    VARIABLES,
    Recipe,
    Step,
    Values,
    arguments,
    run,
    task_names,
)
from tests.support.in_process import steps
from tests.support.plans import FAST, check_program
from tests.support.run_async import run_async

CASES = int(os.environ.get("JGRAPH_FUZZ_CASES", "24"))
MAX_INSTRUCTIONS = 4 if CASES <= 100 else 12
STEPS = 2


def recipes(tasks: int, most: int = MAX_INSTRUCTIONS) -> st.SearchStrategy[Recipe]:
    """Returns recipes for clusters of this many tasks, of so many instructions."""
    place = st.none() | st.integers(0, tasks - 1)
    number = st.integers(0, 7)
    # Most faults are in the order of reads and writes: every other instruction is one.
    op = st.sampled_from(sorted(OPS)) | st.sampled_from(STATE_OPS)
    step = st.builds(Step, op, number, number, place)
    return st.builds(
        Recipe,
        st.just(tasks),
        st.tuples(*(place for _ in VARIABLES)),
        st.lists(step, min_size=most // 2, max_size=most).map(tuple),
        st.booleans(),
    )


def expected(recipe: Recipe, args: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """What one ``jax.jit`` of the recipe gives, step after step."""

    def alone(values: dict[str, Any], x: Any, n: Any) -> Any:
        store = Values(values)
        fetches = run(recipe, store, x, n, placed=False)
        return fetches, {name: cell.value for name, cell in store.now.items()}

    step = jax.jit(alone, compiler_options=FAST)
    values: dict[str, Any] = dict(VARIABLES)
    for _ in range(STEPS):
        fetches, values = step(values, *args)
        yield fetches, values


def distributed(recipe: Recipe, args: Any) -> list[tuple[Any, dict[str, Any]]]:
    """What an in-process cluster gives, step after step."""
    tasks = [TaskName(name) for name in task_names(recipe.tasks)]
    variables = {
        name: Variable(
            name,
            jnp.asarray(value),
            device="" if home is None else tasks[home % len(tasks)],
            partitioner=jg.fixed_size_partitioner(2)
            if recipe.sharded and name == "table"
            else None,
        )
        for (name, value), home in zip(VARIABLES.items(), recipe.homes, strict=True)
    }

    def placed(x: Any, n: Any) -> Any:
        return run(recipe, variables, x, n, placed=True)

    graph, used = trace(placed, *args)
    planned = plan(graph, tasks=tasks, driver=tasks[0])
    check_program(planned.program)
    parts = {
        part.name: value
        for u in used
        for part, value in zip(u.shards, split(u, VARIABLES[u.name]), strict=True)
    }
    ran = run_async(steps(planned, tasks, parts, args, STEPS), timeout_s=100)
    return [
        (
            jax.tree.unflatten(graph.out_tree, fetches),
            {u.name: joined(u, {("", k): x for k, x in after.items()}) for u in used},
        )
        for fetches, after in ran
    ]


def check(recipe: Recipe) -> None:
    args = arguments()
    wanted = expected(recipe, args)
    for (fetches, after), (want, values) in zip(
        distributed(recipe, args), wanted, strict=True
    ):
        assert_close(fetches, want)
        assert_close(after, {name: values[name] for name in after})


def assert_close(got: Any, wanted: Any) -> None:
    structures: list[Any] = [jax.tree.structure(got), jax.tree.structure(wanted)]
    assert structures[0] == structures[1]
    for have, want in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(have), np.asarray(want)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if np.issubdtype(b.dtype, np.floating):
            limit = 2e-5 * max(1.0, float(np.max(np.abs(b), initial=0)))
            np.testing.assert_allclose(a, b, rtol=0, atol=limit)
        else:
            np.testing.assert_array_equal(a, b)
