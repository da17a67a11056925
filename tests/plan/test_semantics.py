"""Order of state, and programs without segments: plans mean what functions do."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgraph as jg
from jgraph.errors import (
    PlacementError,
)
from jgraph.plan.plan import plan
from jgraph.plan.program.nodes import (
    ConstNode,
    FeedNode,
    FetchNode,
    ReadNode,
    SegmentNode,
    WriteNode,
)
from tests.support.plans import (
    DRIVER,
    PS,
    TASKS,
    WORKERS,
    check_plan,
    graph_of,
    nodes_of,
    segments_per_task,
    variable,
    vector,
)

# ---------------------------------------------------------------- no segment needed


def test_a_feed_that_is_fetched_needs_no_segment() -> None:
    planned = check_plan(lambda x: x, vector())
    assert [type(n) for n in planned.program.partition(DRIVER).nodes] == [
        FeedNode,
        FetchNode,
    ]


def test_numbers_and_arrays_known_beforehand_are_constants() -> None:
    large = np.arange(600, dtype=np.float32)
    planned = check_plan(lambda: (1.5, np.int32(2), jnp.asarray(large), large[:3]))
    assert planned.segments == ()
    assert len(nodes_of(planned, DRIVER, ConstNode)) == 4


def test_a_variable_that_is_only_fetched_is_read_and_sent() -> None:
    w = variable("w", vector())
    planned = check_plan(lambda: w[...], variables=[w])
    assert planned.segments == ()
    assert len(nodes_of(planned, PS[0], ReadNode)) == 1


def test_a_feed_stored_as_it_is_needs_no_segment() -> None:
    w = variable("w", vector())

    def step(x: Any) -> None:
        w[...] = x

    planned = check_plan(step, vector() + 1, variables=[w])
    assert planned.segments == ()
    assert len(nodes_of(planned, PS[0], WriteNode)) == 1


def test_a_variable_that_nothing_reads_need_not_exist_to_be_written() -> None:
    w = variable("w", vector())

    def step(x: Any) -> None:
        w[...] = jnp.sin(x) * 2

    planned = check_plan(step, vector(), variables=[w])
    assert [s.updates for s in planned.segments] == [("w",)]
    assert all(not n.updates for t in TASKS[:3] for n in _segments(planned, t))


def _segments(planned: Any, task: Any) -> list[Any]:
    tasks = {p.task for p in planned.program.partitions}
    return nodes_of(planned, task, SegmentNode) if task in tasks else []


# ---------------------------------------------------------------- order of state


def test_a_read_after_a_write_gives_what_was_written() -> None:
    w = variable("w", vector())

    def step(x: Any) -> Any:
        before = w[...]
        w[...] = before + x
        after = w[...]
        w[...] = after * 2
        return before, after, w[...]

    planned = check_plan(step, vector(), variables=[w])
    assert segments_per_task(planned)[PS[0]] == 1


def test_rows_are_read_and_written_in_program_order() -> None:
    w = variable("w", np.ones((5, 3), np.float32))

    def step(ids: Any, x: Any) -> Any:
        whole = w[...]
        rows = w[ids]
        w[ids] = rows + x
        middle = w[...]
        w[0] = x[0] * 7
        with jg.device(WORKERS[1]):
            late = jnp.sin(w[1:3]) + rows[0]
        w[...] = w[...] * 2
        return whole, middle, late, w[...]

    ids = np.array([3, 1], np.int32)
    check_plan(step, ids, np.full((2, 3), 0.5, np.float32), variables=[w])


def test_a_number_beside_a_slice_that_jumps_is_a_place_of_a_variable() -> None:
    w = variable("w", np.arange(12, dtype=np.float32).reshape(3, 4))

    def step(x: Any) -> Any:
        before = w[1, ::2]
        w[::2, np.int32(3)] = x
        return before, w[...]

    check_plan(step, np.ones(2, np.float32), variables=[w])


def test_a_stored_number_says_which_rows_of_another_task_a_third_one_takes() -> None:
    at = variable("at", np.int32(3), PS[1])
    w = variable("w", np.arange(15, dtype=np.float32).reshape(5, 3))

    def step() -> Any:
        rows = w[jnp.stack([at[...] % 5, (at[...] + 1) % 5])]
        with jg.device(WORKERS[1]):
            return rows.mean(0)

    check_plan(step, variables=[at, w])


def test_an_old_value_used_after_later_rows_were_written_stays_old() -> None:
    w = variable("w", np.ones((5, 3), np.float32))

    def step(ids: Any) -> Any:
        old = w[...]
        w[ids] = jnp.zeros((2, 3), jnp.float32)
        with jg.device(PS[0]):
            return jnp.abs(w[...] - old).sum()

    check_plan(step, np.array([3, 1], np.int32), variables=[w])


def test_the_old_value_that_a_swap_gives_is_the_old_value() -> None:
    w = variable("w", vector())

    def step(x: Any) -> Any:
        old = jax.ref.swap(w._ref(), ..., x)
        return jax.ref.swap(w._ref(), ..., old * 2), old

    check_plan(step, vector() * 3, variables=[w])


def test_a_loop_over_a_variable_runs_on_its_task() -> None:
    w = variable("w", np.zeros(3, np.float32))

    def step(xs: Any) -> Any:
        def body(carry: Any, x: Any) -> tuple[Any, Any]:
            w[...] = w[...] + x
            return carry + x.sum(), w[0]

        return jax.lax.scan(body, jnp.float32(0), xs)

    planned = check_plan(step, np.ones((4, 3), np.float32), variables=[w])
    assert nodes_of(planned, PS[0], SegmentNode)[-1].updates


def test_a_loop_over_a_variable_stamped_elsewhere_is_refused() -> None:
    w = variable("w", np.zeros(3, np.float32), "")

    def step(xs: Any) -> Any:
        def body(carry: Any, x: Any) -> tuple[Any, Any]:
            w[...] = w[...] + x
            return carry + w[0], None

        with jg.device(WORKERS[1]):
            return jax.lax.scan(body, jnp.float32(0), xs)[0]

    graph = graph_of(step, np.ones((4, 3), np.float32))
    with pytest.raises(PlacementError, match=r"'w', which lives on /job:ps/task:0"):
        plan(graph, tasks=TASKS, driver=DRIVER, variable_tasks={("", "w"): PS[0]})


def test_a_loop_over_variables_of_two_tasks_is_refused() -> None:
    a, b = variable("a", vector(3)), variable("b", vector(3), "")

    def step() -> Any:
        def body(i: Any, c: Any) -> Any:
            a[...] = a[...] + b[...]
            return c + b[0]

        return jax.lax.fori_loop(0, 3, body, jnp.float32(0))

    graph = graph_of(step)
    with pytest.raises(PlacementError, match=r"'a' on /job:ps/task:0, 'b' on"):
        plan(graph, tasks=TASKS, driver=DRIVER, variable_tasks={("", "b"): PS[1]})


def test_open_variables_of_one_loop_go_to_one_task() -> None:
    a, b = variable("a", vector(3), "/job:ps"), variable("b", vector(3), "")

    def step() -> Any:
        def body(i: Any, c: Any) -> Any:
            a[...] = a[...] + b[...]
            return c + b[0]

        return jax.lax.fori_loop(0, 3, body, jnp.float32(0))

    planned = check_plan(step, variables=[a, b])
    assert len(set(planned.variable_tasks.values())) == 1
