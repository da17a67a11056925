"""Functions traced once for all sizes of their arguments."""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jgraph as jg
from jgraph.errors import (
    ConfigError,
    FeedError,
    GraphError,
    PlacementError,
    VariableMismatchError,
)
from jgraph.graph.sizes import ASSUMED_SIZE, Sizes
from jgraph.plan.plan import plan
from tests.support.plans import DRIVER, PS, TASKS, WORKERS
from tests.support.sizes import batch, check_sizes


def test_one_program_over_several_tasks_serves_any_size() -> None:
    w = jg.Variable("w", jnp.ones((3, 4)) / 7, device=PS[0])

    @jg.function(symbolic="b, ...")
    def step(x: Any) -> Any:
        def loss(value: Any) -> Any:
            with jg.device(WORKERS[1]):
                hidden = jnp.tanh(x @ value)
            with jg.device(WORKERS[2]):
                return (hidden.reshape(-1) ** 2).mean(), hidden.sum(1)

        (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(w[...])
        w[...] = w[...] - 0.1 * gradient
        return {"loss": value, "sums": sums}

    made = check_sizes(step, [w], 4, 1, 7)
    crossing = {str(value) for edge in made.edges for value in edge.values}
    assert {"float32[b,3]", "float32[b,4]", "float32[b]"} <= crossing


def test_a_size_that_no_operand_tells_travels_as_an_array_without_elements() -> None:
    @jg.function(symbolic={"x": "b, _"})
    def step(x: Any) -> Any:
        with jg.device(WORKERS[1]):
            many = jnp.cumsum(jnp.ones((x.shape[0], 2)), axis=0)
            return many.sum() * x.shape[0]

    made = check_sizes(step, [], 3, 5)
    to_worker = [edge for edge in made.edges if edge.dst == WORKERS[1]]
    assert sum(edge.nbytes for edge in to_worker) == 0
    assert [str(v) for edge in to_worker for v in edge.values] == ["float32[b,0]"]


def test_loops_and_random_numbers_may_be_of_any_size() -> None:
    @jg.function(symbolic="b, ...")
    def step(x: Any) -> Any:
        def turn(total: Any, row: Any) -> tuple[Any, Any]:
            return total + row, total.sum()

        with jg.device(WORKERS[1]):
            total, seen = jax.lax.scan(turn, jnp.zeros(3), x)
            noise = jax.random.normal(jax.random.key(1), x.shape)
            return total, seen, (x + noise).max(0)

    check_sizes(step, [], 2, 6)


def test_an_argument_may_have_a_multiple_of_a_size() -> None:
    @jg.function(symbolic="2*b, ...")
    def step(x: Any) -> Any:
        halves = x.reshape(2, -1, 3)
        with jg.device(WORKERS[1]):
            first = halves[0].sum(0)
        with jg.device(WORKERS[2]):
            return first, halves[1]

    check_sizes(step, [], 4, 8)


def test_tracing_is_done_once_for_all_sizes() -> None:
    runs = []

    @jg.function(symbolic="b, ...")
    def step(x: Any) -> Any:
        runs.append(x.shape)
        return x.sum()

    first = step.graph(batch(2))
    assert step.graph(batch(5)) is first
    assert len(runs) == 1
    assert step.graph(np.ones((2, 4), np.float32)) is not first  # another fixed size


def test_shapes_with_names_may_be_given_as_jax_has_them() -> None:
    b = jax.export.symbolic_shape("b, 3")
    graph = jg.function(lambda x: x.sum(0)).graph(jax.ShapeDtypeStruct(b, "float32"))
    made = plan(graph, tasks=TASKS, driver=DRIVER)
    assert [str(type_) for _, type_ in made.program.feeds] == ["float32[b,3]"]
    assert made.program.feeds[0][1].shape == (ASSUMED_SIZE, 3)


def test_a_condition_of_python_on_a_size_is_refused_with_its_line() -> None:
    @jg.function(symbolic="b, ...")
    def step(x: Any) -> Any:
        return x.sum() if x.shape[0] > 2 else x

    with pytest.raises(GraphError, match=r"test_sizes.py:\d+.*leave that argument out"):
        step.graph(batch(3))


def test_an_operation_that_needs_the_number_is_refused_with_its_line() -> None:
    @jg.function(symbolic="b, ...")
    def step(x: Any) -> Any:
        return [x[n] for n in range(x.shape[0])]

    with pytest.raises(GraphError, match=r"test_sizes.py:\d+.*traced for each size"):
        step.graph(batch(3))


@pytest.mark.parametrize(
    ("symbolic", "reason"),
    [
        ("b, 4", "different size 4"),
        ("b, c, d", "dimension"),
        ("b+1, ...", "a number times a name"),
        ({"y": "b, ..."}, "y, which is no argument"),
    ],
)
def test_a_shape_that_the_argument_cannot_have_is_refused(
    symbolic: Any, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        jg.function(lambda x: x, symbolic=symbolic).graph(batch(3))


def test_an_argument_with_fewer_dimensions_than_named_is_refused() -> None:
    with pytest.raises(ConfigError, match="'b, 3': it has more dimensions"):
        jg.function(lambda x: x, symbolic="b, 3").graph(np.zeros(3, np.float32))


def test_rows_are_read_and_written_by_any_number_of_ids() -> None:
    w = jg.Variable("w", jnp.arange(12.0).reshape(6, 2), device=PS[0])

    @jg.function(symbolic="b, ...")
    def step(x: Any) -> Any:
        ids = (jnp.abs(x[:, 0]) * 5).astype(int)
        w[ids] = w[ids] * 0.5 - 1
        w[ids, 0] = 7.0
        return w[ids[::-1]].sum()

    check_sizes(step, [w], 4, 1, 7)


def test_rows_of_another_dtype_are_refused_for_any_number_of_ids() -> None:
    w = jg.Variable("w", jnp.zeros((6, 2)), device=PS[0])

    @jg.function(symbolic="b, ...")
    def step(x: Any) -> None:
        w[x.astype(int)[:, 0]] = jnp.zeros(2, int)

    with pytest.raises(VariableMismatchError, match="cannot take int32"):
        step.trace(batch(3))


def test_an_argument_that_is_not_named_keeps_its_size() -> None:
    step = jg.function(lambda x, y: x["a"].sum() + y.sum(), symbolic={"x": "b, ..."})
    feeds = step.graph({"a": batch(3)}, batch(2)).feeds
    assert [str(f.aval.shape) for f in feeds] == ["(b, 3)", "(2, 3)"]


@pytest.mark.parametrize("shape", [(0, 3), (3, 4), (3,), (3, 3, 3)])
def test_a_feed_that_fits_no_size_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(FeedError, match=r"takes \[b, 3\]"):
        Sizes("step").fit("x", shape, (128, 3), ("b", ""))


def test_sizes_of_one_name_are_equal_in_all_feeds() -> None:
    sizes = Sizes("step")
    sizes.fit("x", (3,), (1,), ("b",))
    sizes.fit("y", (6,), (1,), ("2*b",))
    with pytest.raises(FeedError, match="'z' of 'step' has b=5 where 'x' has b=3"):
        sizes.fit("z", (5,), (1,), ("b",))


def test_rows_of_a_whole_table_are_read_for_any_number_of_ids() -> None:
    table = jg.Variable("t", jnp.arange(12.0).reshape(4, 3), device=PS[0])

    @jg.function(symbolic="b, ...")
    def step(x: Any) -> Any:
        ids = x[:, 0].astype(jnp.int32) % 4
        rows = table[...][ids]
        with jg.device(WORKERS[1]):
            return rows @ x.sum(0)

    check_sizes(step, [table], 2, 5)


def test_a_scan_of_any_length_over_several_tasks_is_refused() -> None:
    @jg.function(symbolic="b, ...")
    def step(x: Any) -> Any:
        def turn(total: Any, row: Any) -> tuple[Any, Any]:
            with jg.device(WORKERS[1]):
                return total + row, ()

        with jg.device(WORKERS[2]):
            return jax.lax.scan(turn, jnp.zeros(3), x)

    with pytest.raises(PlacementError, match="several tasks"):
        step.graph(batch(3))
