"""Sharded variables mean what whole ones mean, whatever a graph does with them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import jgraph as jg
from jgraph.errors import ShardingError
from jgraph.graph.graph import Graph
from jgraph.graph.tracing.trace import trace
from jgraph.plan.plan import plan
from jgraph.plan.sharding.shard import shard
from tests.support.plans import DRIVER, TASKS, WORKERS, check_program
from tests.support.sharded import check_shard

W = np.linspace(-1, 1.5, 24, dtype=np.float32).reshape(6, 4)
X = np.linspace(0.5, 1, 24, dtype=np.float32).reshape(6, 4)


def variable(counts: list[int], name: str = "w", **options: Any) -> jg.Variable:
    return jg.Variable(name, W, partitioner=lambda shape, dtype: counts, **options)


def sharded(fn: Callable[..., Any], *args: Any) -> Graph:
    """Checks a function of variables that are all ``W``."""
    graph, variables = trace(fn, *args)
    return check_shard(graph, [W] * len(variables), *args)


# Operations on a 6 x 4 value; some can be done by shards along an axis, some cannot.
OPERATIONS: list[Callable[[Any], Any]] = [
    jnp.tanh,
    lambda v: v * 0.5 + X,
    lambda v: jnp.where(v > 0, v, -2 * v),
    lambda v: v - 0.5 * v.mean(axis=0),  # the whole mean would leave rounding errors
    lambda v: v / (1 + abs(v).max(axis=1, keepdims=True)),
    lambda v: v / (1 + jnp.linalg.norm(v)),
    lambda v: v.T.reshape(4, 6).T,
    lambda v: (v @ X.T) @ v / 10,
    lambda v: v @ (v.T @ v) / 10,
    lambda v: jnp.cumsum(v, axis=1) / 4,
    lambda v: jnp.cumsum(v, axis=0) / 6,
    lambda v: jnp.sort(v, axis=1),
    lambda v: v[::-1] + v[:, ::-1],
    lambda v: v.reshape(3, 2, 4).sum(axis=1).repeat(2, axis=0),
    lambda v: v.reshape(6, 2, 2).transpose(0, 2, 1).reshape(6, 4),
    lambda v: jnp.concatenate([v[:, 2:], v[:, :2]], axis=1),
    lambda v: jnp.pad(v, ((0, 0), (1, 1)))[:, 1:-1],
    lambda v: v + jnp.argmax(v, axis=0) - jnp.argmin(v, axis=1)[:, None],
    lambda v: v + jax.lax.optimization_barrier((v, v.sum()))[1],
    lambda v: jax.lax.cond(v.sum() > 0, lambda a: a * 2, lambda a: a - 1, v),
    lambda v: jax.lax.fori_loop(0, 2, lambda _, a: jnp.tanh(a), v),
    lambda v: v + jax.random.normal(jax.random.key(0), (6, 4)),
    lambda v: jnp.arange(24.0).reshape(6, 4) * v,
]


@pytest.mark.combined
@pytest.mark.parametrize("counts", [[4, 1], [1, 3]], ids=str)
@pytest.mark.parametrize("strategy", ["div", "mod"])
def test_each_operation_means_the_same(counts: list[int], strategy: str) -> None:
    w = variable(counts, partition_strategy=strategy)

    def step() -> Any:
        results = [operation(w[...]) for operation in OPERATIONS]
        w[...] = sum(results) / len(results)
        return results

    sharded(step)


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.sampled_from(OPERATIONS), min_size=3, max_size=6),
    st.sampled_from([[4, 1], [1, 3], [2, 1]]),
    st.sampled_from([[6, 1], [1, 2], [1, 1]]),
    st.sets(st.integers(0, 5)),
)
def test_operations_after_one_another_mean_the_same(
    operations: list[Callable[[Any], Any]],
    counts: list[int],
    others: list[int],
    placed: set[int],
) -> None:
    w, v = variable(counts), variable(others, "v")

    def step(x: Any) -> Any:
        value = w[...]
        for number, operation in enumerate(operations):
            with jg.device("/job:worker/task:0" if number in placed else ""):
                value = operation(value)
            v[...] = value * x
        w[...] = value - v[...]
        return value

    sharded(step, X)


def test_an_update_and_a_norm_run_by_shards() -> None:
    w = variable([3, 1])

    def step(x: Any) -> Any:
        with jg.device("/job:worker/task:0"):
            gradient = jax.grad(lambda value: jnp.sum((value * x) ** 2))(w[...])
        norm = jnp.linalg.norm(gradient)
        w[...] = w[...] - 0.1 * gradient / norm
        return norm

    graph = sharded(step, X)
    assert graph.gathered == ()
    assert [v.name for v in graph.variables] == ["w/part_0", "w/part_1", "w/part_2"]
    shapes = {
        v.aval.shape
        for e, stamp in zip(graph.equations, graph.stamps, strict=True)
        if stamp.job is None and e.primitive.name != "concatenate"
        for v in e.outvars
    }
    assert (6, 4) not in shapes


def test_a_gradient_leaves_the_worker_in_slices() -> None:
    w = variable([2, 1], shard_devices=["/job:ps/task:0", "/job:ps/task:1"])

    def step(x: Any) -> None:
        with jg.device("/job:worker/task:0"):
            gradient = jnp.sin(w[...]) * x
        w[...] = w[...] - jnp.clip(gradient, -0.1, 0.1)

    graph, _ = trace(step, X)
    planned = plan(graph, tasks=TASKS, driver=DRIVER)
    check_program(planned.program)
    sent = {(e.src, e.dst): e.nbytes for e in planned.edges}
    half = W.nbytes // 2
    assert sent == {
        (TASKS[0], WORKERS[0]): half,
        (TASKS[1], WORKERS[0]): half,
        (WORKERS[0], TASKS[0]): half,
        (WORKERS[0], TASKS[1]): half,
    }
    assert "w  float32[6,4]  96 B  2 shards along axis 0" in str(planned)


def test_what_is_gathered_is_named_in_the_plan() -> None:
    w = variable([2, 1])

    def step() -> None:
        w[...] = jnp.cumsum(w[...], axis=0)

    planned = plan(trace(step)[0], tasks=TASKS, driver=DRIVER)
    lines = str(planned).splitlines()
    start = lines.index("gathered on one task, as it cannot be done by shards")
    assert "'cumsum' at " in lines[start + 1]
    assert lines[start + 1].endswith("of 'w'  96 B")


def test_parts_of_a_sharded_variable_can_be_read_and_written() -> None:
    w, b = variable([4, 1]), jg.Variable("b", W)

    def step(i: Any) -> Any:
        w[i] = w[2] + w[1:3].sum(axis=0)
        w[:, 1] = w[:, 2] * 2
        b[...] = w[...] + b[...]
        return w[i], b[0]

    assert {g.variable for g in sharded(step, np.int32(3)).gathered} == {"w"}


def test_a_loop_over_a_sharded_variable_works_on_all_of_it() -> None:
    w, b = variable([1, 2]), jg.Variable("b", W)

    def step() -> Any:
        def body(i: Any, total: Any) -> Any:
            w[i] = w[i] + b[i]
            return total + w[i].sum()

        return jax.lax.fori_loop(0, 3, body, 0.0)

    sharded(step)


def test_sharded_variables_of_other_cuts_work_together() -> None:
    w, v = variable([3, 1]), variable([1, 2], "v")

    def step() -> None:
        w[...] = w[...] + v[...]

    (gathered,) = sharded(step).gathered
    assert (gathered.primitive, gathered.variable) == ("add", "v")


def test_a_graph_without_shards_is_left_as_it_is() -> None:
    b = jg.Variable("b", W)
    graph, _ = trace(lambda: b[...] * 2)
    assert shard(graph) is graph


@pytest.mark.parametrize(
    ("partitions", "message"),
    [
        ([7, 1], "cannot have 7 shards along axis 0, which has 6 rows"),
        ([2, 2], r"cut along the axes \[0, 1\]; one axis can be cut"),
        ([2], "return a number of shards for each axis"),
        ([0, 1], "at least 1"),
        (None, "the partitioner returned None"),
    ],
)
def test_shards_that_cannot_be_are_refused(partitions: Any, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        variable(partitions)


def test_an_unknown_strategy_and_a_wrong_number_of_devices_are_refused() -> None:
    with pytest.raises(ShardingError, match="partition_strategy is 'modulo'"):
        variable([2, 1], partition_strategy="modulo")
    with pytest.raises(ShardingError, match="has 2 shards and 1 shard_devices"):
        variable([2, 1], shard_devices=["/job:ps/task:0"])


@pytest.mark.parametrize("strategy", ["div", "mod"])
def test_shards_are_initialised_with_their_slices(strategy: str) -> None:
    def make(shape: Any, dtype: Any) -> jax.Array:
        return jnp.arange(24.0, dtype=dtype).reshape(shape)

    for value in (make((6, 4), "float32"), ((6, 4), jnp.float32, make)):
        w = jg.Variable(
            "w",
            value,
            partitioner=lambda shape, dtype: [4, 1],
            partition_strategy=strategy,
        )
        parts = [v.init() for v in w.shards if v.init is not None]
        assert w.spec.sharding is not None
        assert np.array_equal(w.spec.sharding.join(parts), make((6, 4), "float32"))
        assert [p.shape for p in parts] == [v.shape for v in w.shards]
