"""Steps of one task that run in the thread that asks for them."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jgraph as jg
from jgraph.errors import FeedError, RowIdError
from jgraph.graph.device import device
from jgraph.graph.ir import TaskName
from jgraph.graph.rows.rows import NO_ID, unique_rows
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.plan.plan import plan
from jgraph.plan.program.nodes import LookupNode, ValueType
from jgraph.plan.program.program import Program, StoredVariable
from jgraph.runtime.at_once import SHORT_BYTES, SHORT_S
from jgraph.runtime.task import TaskRuntime
from tests.support.tasks import Tasks

HERE, OTHER = TaskName("/job:worker/task:0"), TaskName("/job:worker/task:1")
W = StoredVariable("w", ValueType((2,), "float32"))
LARGE = np.arange(512, dtype=np.float32)


def _program(sine_on: TaskName = HERE) -> Program:
    """Doubles w, then adds what is fed; fetches a large constant and a feed too."""
    w = Variable("w", jnp.ones(2), device=HERE)
    kept = jnp.asarray(LARGE)

    def step(x: Any) -> Any:
        before = w[...]
        w[...] = before * 2 + x
        with device(sine_on):
            return jnp.sin(x), before, kept, x

    graph, _ = trace(step, jnp.zeros(2, jnp.float32))
    return plan(graph, tasks=[HERE, OTHER], driver=HERE).program


def _runtime(program: Program, seconds: float | None = SHORT_S / 10) -> TaskRuntime:
    tasks = Tasks(HERE, OTHER)
    tasks.register("h", program)
    runtime = tasks.runtimes[HERE]
    runtime.store.write([W], [np.ones(2, np.float32)])
    for cost in runtime._programs["h"].loaded.costs:
        cost.seconds = seconds
    return runtime


def test_short_step_of_one_task_gives_the_results_of_any_step() -> None:
    runtime = _runtime(_program())
    x = np.array([1, 2], np.float32)
    fetched = runtime.run_at_once("h", [x])
    assert fetched is not None
    sine, before, kept, fed = fetched
    np.testing.assert_allclose(sine, np.sin(x), rtol=1e-6)
    assert before.tolist() == [1, 1]
    assert kept.tolist() == LARGE.tolist()
    assert fed.tolist() == [1, 2]
    assert runtime.store.read([W])[0].tolist() == [3, 4]


def test_step_over_a_mesh_is_called_for() -> None:
    """Its values lie on several devices: whoever takes them is to know."""
    w = Variable("w", jnp.ones(2), device=HERE)
    halves = NamedSharding(jg.mesh(model=2), PartitionSpec("model"))

    def step(x: Any) -> Any:
        with device(HERE):
            w[...] = jax.lax.with_sharding_constraint(w[...], halves) + x
        return x

    graph, _ = trace(step, jnp.zeros(2, jnp.float32))
    runtime = _runtime(plan(graph, tasks=[HERE], driver=HERE).program)
    assert runtime.run_at_once("h", [np.zeros(2, np.float32)]) is None


def test_what_follows_the_fetches_runs_as_well() -> None:
    w = Variable("w", jnp.ones(2), device=HERE)

    def step(x: Any) -> Any:
        w[...] = x
        return x

    graph, _ = trace(step, jnp.zeros(2, jnp.float32))
    program = plan(graph, tasks=[HERE], driver=HERE).program
    (part,) = program.partitions
    feed, *others, fetch = part.nodes
    part = replace(part, nodes=(feed, fetch, *others))
    runtime = _runtime(replace(program, partitions=(part,)))
    x = np.array([1, 2], np.float32)
    fetched = runtime.run_at_once("h", [x])
    assert fetched is not None
    assert fetched[0].tolist() == [1, 2]
    assert runtime.store.read([W])[0].tolist() == [1, 2]


def test_results_belong_to_the_caller_alone() -> None:
    runtime = _runtime(_program())
    x = np.array([1, 2], np.float32)
    for _ in range(2):
        fetched = runtime.run_at_once("h", [x])
        assert fetched is not None
        for array in fetched:
            array[...] = 0
        assert x.tolist() == [1, 2]
    again = runtime.run_at_once("h", [x])
    assert again is not None
    assert again[1].tolist() == [7, 10]
    assert again[2].tolist() == LARGE.tolist()


def test_step_that_may_be_long_or_has_other_parts_is_not_run_at_once() -> None:
    x = [np.zeros(2, np.float32)]
    for seconds in (None, 2 * SHORT_S):
        runtime = _runtime(_program(), seconds)
        assert runtime.run_at_once("h", x) is None
        assert runtime.store.read([W])[0].tolist() == [1, 1]
    assert _runtime(_program(sine_on=OTHER)).run_at_once("h", x) is None


def test_wrong_feed_changes_nothing() -> None:
    runtime = _runtime(_program())
    with pytest.raises(FeedError, match=r"is float32\[3\]"):
        runtime.run_at_once("h", [np.zeros(3, np.float32)])
    assert runtime.store.read([W])[0].tolist() == [1, 1]


def test_step_that_reads_much_is_not_run_at_once() -> None:
    count = SHORT_BYTES // 4 + 1
    for size, at_once in ((count - 1, True), (count, False)):
        w = Variable("w", ((size,), jnp.float32, jnp.zeros), device=HERE)
        graph, _ = trace(lambda w=w: w[...], variables=[w])
        program = plan(graph, tasks=[HERE, OTHER], driver=HERE).program
        tasks = Tasks(HERE, OTHER)
        tasks.register("h", program)
        runtime = tasks.runtimes[HERE]
        stored = StoredVariable("w", ValueType((size,), "float32"))
        runtime.store.write([stored], [np.zeros(size, np.float32)])
        assert (runtime.run_at_once("h", []) is not None) == at_once


TABLE = StoredVariable("table", ValueType((5, 2), "float32"))


def _lookup(rows: int = 5) -> Program:
    """Looks up to three rows of a table up, by their ids."""
    table = Variable("table", jnp.zeros((rows, 2)), device=HERE)

    def step(wanted: Any) -> Any:
        ids, _ = unique_rows(wanted, rows=rows, feature="id")
        return table[ids]

    graph, _ = trace(step, jnp.zeros(3, jnp.int32))
    return plan(graph, tasks=[HERE], driver=HERE).program.peeking()


def test_rows_are_looked_up_at_once_and_nothing_is_compiled_for_it() -> None:
    program = _lookup()
    assert not program.segments
    runtime = _runtime(program)
    runtime.store.write([TABLE], [np.arange(10, dtype=np.float32).reshape(5, 2)])
    fetched = runtime.run_at_once("h", [np.array([1, 4, NO_ID], np.int32)])
    assert fetched is not None
    assert fetched[0].tolist() == [[2, 3], [8, 9], [0, 0]]
    fetched[0][...] = 0  # the caller's own
    assert runtime.store.read([TABLE])[0][4].tolist() == [8, 9]
    with pytest.raises(RowIdError, match="id"):
        runtime.run_at_once("h", [np.array([1, 5, NO_ID], np.int32)])


def test_lookups_that_bring_keys_in_or_may_be_long_are_not_run_at_once() -> None:
    ids = [np.zeros(3, np.int32)]
    program = _lookup()
    (part,) = program.partitions
    nodes = tuple(
        replace(n, peeks=False) if isinstance(n, LookupNode) else n for n in part.nodes
    )
    changing = replace(program, partitions=(replace(part, nodes=nodes),))
    assert _runtime(changing).run_at_once("h", ids) is None
    assert _runtime(program, 2 * SHORT_S).run_at_once("h", ids) is None
