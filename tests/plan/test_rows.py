"""Steps that move rows do what one jit does, and move no more than rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgraph as jg
from jgraph.errors import GraphError, RowIdError
from jgraph.graph.rows.rows import (
    PAST_THE_END,
    Layout,
    merge_rows,
    route_rows,
    split_rows,
    unique_rows,
)
from jgraph.plan.plan import Plan, plan
from jgraph.plan.program.nodes import (
    LookupNode,
    MergeNode,
    RouteNode,
    SegmentNode,
    SplitNode,
    ValueType,
)
from jgraph.plan.program.row_values import merge, route, split
from tests.support.plans import (
    DRIVER,
    EXACT,
    PS,
    TASKS,
    assert_same,
    check_program,
    graph_of,
    initial_values,
    nodes_of,
    reference,
    simulated,
)

WIDTH, COUNT = 3, 6
LAYOUTS = [Layout((10,)), Layout((6, 4)), Layout((5, 5), "mod")]


def shards(layout: Layout, name: str = "table") -> list[jg.Variable]:
    made = []
    for n, size in enumerate(layout.sizes):
        values = jnp.arange(float(size * WIDTH)).reshape(size, WIDTH) + 100 * n
        home = PS[n % len(PS)]
        made.append(jg.Variable(f"{name}_{n}", values, device=str(home)))
    return made


def adagrad(layout: Layout, *, drop: bool = False) -> Any:
    """Returns a step of Adagrad on the rows of a sharded table, and its variables."""
    tables, sums = shards(layout), shards(layout, "sums")

    def step(ids: jax.Array, target: jax.Array) -> jax.Array:
        with jg.device(str(DRIVER)):
            positions, local = route_rows(
                ids, layout=layout, feature="colour", drop=drop
            )
        rows = [table[part] for table, part in zip(tables, local, strict=True)]
        with jg.device(str(DRIVER)):
            merged = merge_rows(local, rows, layout=layout)

            def loss(merged: jax.Array) -> jax.Array:
                taken = merged.at[positions].get(mode="fill", fill_value=0)
                return ((taken - target) ** 2).sum()

            value: jax.Array
            value, gradient = jax.value_and_grad(loss)(merged)
            parts = split_rows(gradient, local, layout=layout)
        for table, total, part, g in zip(tables, sums, local, parts, strict=True):
            new_total = total[part] + g * g
            total[part] = new_total
            table[part] = table[part] - 0.1 * g / jnp.sqrt(new_total + 1.0)
        return value

    return step, [*tables, *sums]


def planned_step(layout: Layout, **kwargs: Any) -> tuple[Plan, list[jg.Variable]]:
    step, variables = adagrad(layout, **kwargs)
    args = jnp.zeros(COUNT, jnp.int32), jnp.zeros((COUNT, WIDTH))
    graph = graph_of(step, *args, variables=variables)
    planned = plan(graph, tasks=TASKS, driver=DRIVER)
    check_program(planned.program)
    return planned, variables


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_on_rows_is_what_one_jit_gives(layout: Layout) -> None:
    planned, variables = planned_step(layout)
    values = initial_values(variables)
    args = jnp.array([9, 2, 2, 0, 7, 9], jnp.int32), jnp.ones((COUNT, WIDTH))
    wanted = reference(planned.graph, values, args, EXACT)
    assert_same(simulated(planned, values, args, EXACT), wanted, exact=False)


def test_dropped_ids_have_no_row_and_change_none() -> None:
    planned, variables = planned_step(LAYOUTS[1], drop=True)
    values = initial_values(variables)
    args = jnp.array([9, -3, 10, 0, 7, 9], jnp.int32), jnp.ones((COUNT, WIDTH))
    wanted = reference(planned.graph, values, args, EXACT)
    assert_same(simulated(planned, values, args, EXACT), wanted, exact=False)


def test_an_id_out_of_range_is_named_with_its_feature() -> None:
    planned, variables = planned_step(LAYOUTS[1])
    args = jnp.array([9, 2, 10, -1, 7, 9], jnp.int32), jnp.ones((COUNT, WIDTH))
    with pytest.raises(
        RowIdError, match=r"'colour' has the id 10 at position 2 and 1 "
    ):
        simulated(planned, initial_values(variables), args, EXACT)


def test_rows_are_routed_and_merged_on_the_worker_and_looked_up_on_the_ps() -> None:
    planned, _ = planned_step(LAYOUTS[1])
    for kind in (RouteNode, MergeNode, SplitNode):
        assert len(nodes_of(planned, DRIVER, kind)) == 1
    for ps in PS:
        (lookup,) = nodes_of(planned, ps, LookupNode)
        assert len(lookup.rows) == 1  # the sums stay where they are
        assert not [n for n in nodes_of(planned, ps, SegmentNode) if n.updates]


def test_an_update_takes_the_rows_again_at_the_moment_of_its_write() -> None:
    planned, _ = planned_step(LAYOUTS[0])
    (update,) = nodes_of(planned, PS[0], SegmentNode)
    partition = planned.program.partition(PS[0])
    written = {partition.variables[r.variable].name for r in update.row_updates}
    assert written == {"table_0", "sums_0"}
    assert (update.updates, update.reads, update.row_reads) == ((), (), ())
    # Beside the rows it takes the gradient and nothing that was read before.
    assert len(update.inputs) == 1


def test_the_size_of_a_table_is_not_in_the_code_of_a_step() -> None:
    digests = []
    for size in (10, 1000):
        planned, _ = planned_step(Layout((size,)))
        digests.append({s.digest for s in planned.program.segments})
    assert digests[0] == digests[1]


def test_two_lookups_of_one_table_are_taken_whole_and_stay_exact() -> None:
    (table,) = shards(Layout((10,)))
    layout = Layout((10,))

    def step(a: jax.Array, b: jax.Array) -> jax.Array:
        _, (first,) = route_rows(a, layout=layout)
        _, (second,) = route_rows(b, layout=layout)
        table[first] = table[first] + 1.0
        table[second] = table[second] * 2.0
        return a.sum()

    args = jnp.array([1, 2, 3], jnp.int32), jnp.array([3, 9, 9], jnp.int32)
    graph = graph_of(step, *args, variables=[table])
    planned = plan(graph, tasks=TASKS, driver=DRIVER)
    values = initial_values([table])
    wanted = reference(graph, values, args, EXACT)
    assert_same(simulated(planned, values, args, EXACT), wanted, exact=True)


def test_rows_written_twice_in_one_step_are_read_between() -> None:
    (table,) = shards(Layout((10,)))

    def step(ids: jax.Array) -> jax.Array:
        _, (rows,) = route_rows(ids, layout=Layout((10,)))
        table[rows] = table[rows] + 1.0
        table[rows] = table[rows] * 2.0
        return ids.sum()

    args = (jnp.array([1, 2, 2], jnp.int32),)
    graph = graph_of(step, *args, variables=[table])
    planned = plan(graph, tasks=TASKS, driver=DRIVER)
    values = initial_values([table])
    wanted = reference(graph, values, args, EXACT)
    assert_same(simulated(planned, values, args, EXACT), wanted, exact=True)
    (update,) = nodes_of(planned, PS[0], SegmentNode)
    assert len(update.row_updates) == 1


def test_fetched_routes_have_their_full_length() -> None:
    planned, variables = planned_routes()
    args = (jnp.array([4, 4, 1], jnp.int32),)
    (positions, local), _ = simulated(planned, initial_values(variables), args, EXACT)
    assert np.asarray(positions).tolist() == [1, 1, 0]
    assert np.asarray(local)[:2].tolist() == [1, 4]
    assert np.asarray(local).shape == (3,)


def planned_routes() -> tuple[Plan, list[jg.Variable]]:
    def step(ids: jax.Array) -> Any:
        positions, (rows,) = route_rows(ids, layout=Layout((10,)))
        return positions, rows

    graph = graph_of(step, jnp.zeros(3, jnp.int32))
    return plan(graph, tasks=TASKS, driver=DRIVER), []


def test_rows_read_for_the_forward_pass_are_read_again_for_an_ordinary_update() -> None:
    table = shards(Layout((10,)))[0]

    def step(ids: jax.Array, target: jax.Array) -> jax.Array:
        rows = table[ids]
        with jg.device(str(DRIVER)):
            gradient = jax.grad(lambda r: ((r - target) ** 2).sum())(rows)
        table[ids] = rows - 0.1 * gradient
        total: jax.Array = gradient.sum()
        return total

    args = jnp.array([1, 5, 7], jnp.int32), jnp.ones((3, WIDTH))
    graph = graph_of(step, *args, variables=[table])
    planned = plan(graph, tasks=TASKS, driver=DRIVER)
    check_program(planned.program)
    values = initial_values([table])
    wanted = reference(graph, values, args, EXACT)
    assert_same(simulated(planned, values, args, EXACT), wanted, exact=False)
    *_, update = nodes_of(planned, PS[0], SegmentNode)
    made = {v for n in nodes_of(planned, PS[0], SegmentNode) for v in n.outs}
    assert update.updates
    assert not made & set(update.inputs), "rows that were read before"


def test_one_shards_rows_are_split_and_merged_without_a_copy() -> None:
    local = [np.arange(31, dtype=np.int32)]
    type_ = ValueType((32, WIDTH), "float32")
    rows = np.ones((32, WIDTH), np.float32)
    (given,) = split(rows, local)
    assert given.shape == (31, WIDTH)
    assert not np.shares_memory(merge(local, [rows], type_), rows)
    rows[31] = 0
    assert split(rows, local)[0] is rows
    assert merge(local, [rows], type_) is rows
    assert merge(local, [given], type_).tolist() == rows.tolist()
    assert split(rows, [local[0][:20]])[0].shape == (20, WIDTH)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_padding_of_merged_ids_is_no_id_in_a_graph_and_on_a_server(
    layout: Layout,
) -> None:
    for ids in ([0, 0, 3], [0] * 3, [9, 0, -1], [-1] * 3):
        check_padding(layout, ids)


def check_padding(layout: Layout, ids: list[int]) -> None:
    given = np.array(ids, np.int32)
    _, padded = route_rows(jnp.array(given), layout=layout, drop=True)
    there = len({i for i in ids if i >= 0})
    in_graph = merge_rows(padded, padded, layout=layout)
    _, local = route(given, layout, drop=True)
    type_ = ValueType((3,), "int32")
    for merged in (in_graph, merge(local, list(map(np.asarray, padded)), type_)):
        assert (np.asarray(merged)[there:] == PAST_THE_END).all()
        assert (np.asarray(merged)[:there] < 10).all()


@pytest.mark.parametrize("rows", [1, 7, 4096, 4097])
@pytest.mark.parametrize("kind", ["one", "div", "mod"])
def test_a_route_is_the_same_whether_rows_are_marked_or_sorted(
    kind: str, rows: int
) -> None:
    shards = 1 if kind == "one" else min(rows, 3)
    sizes = [rows // shards + (s < rows % shards) for s in range(shards)]
    layout = Layout(tuple(sizes), "mod" if kind == "mod" else "div")
    ids = np.random.default_rng(rows).integers(-2, rows + 2, 200).astype(np.int32)
    positions, local = route(ids, layout, drop=True)
    starts = np.cumsum([0, *sizes[:-1]])
    for part in local:
        assert part.dtype == np.int32
        assert (np.diff(part) > 0).all()  # ascending, each once
    if kind == "mod":
        needed = [part * shards + s for s, part in enumerate(local)]
    else:
        needed = [part + start for part, start in zip(local, starts, strict=True)]
    merged = np.concatenate(needed)
    has_row = (ids >= 0) & (ids < rows)
    assert positions.dtype == np.int32
    assert (positions[~has_row] == len(ids)).all()
    assert (merged[positions[has_row]] == ids[has_row]).all()
    assert set(merged) == set(ids[has_row])  # and none that nobody needs


def test_a_table_of_more_rows_than_int32_counts_is_refused() -> None:
    ids = np.zeros(1, np.int32)
    most = Layout((2**30, 2**30 - 1))
    assert [len(part) for part in route(ids, most)[1]] == [1, 0]
    for layout in (Layout((2**31,)), Layout((2**31, 2**31), "mod")):
        with pytest.raises(GraphError, match="row numbers are int32"):
            route(ids, layout)
        with pytest.raises(GraphError, match=r"'colour' has .* at most 2,147,483,647"):
            unique_rows(jnp.array(ids), rows=layout.rows, feature="'colour'")
