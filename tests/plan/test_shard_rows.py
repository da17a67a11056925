"""Tables by rows: what a step does to rows is done by the shards that have them."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

from jgraph.graph.device import device
from jgraph.graph.graph import Graph
from jgraph.graph.rows.padded_rows import spread_rows
from jgraph.graph.rows.rows import unique_rows
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.plan.plan import Plan, plan
from jgraph.plan.program.nodes import LookupNode
from jgraph.train.tables.row_mean import row_layout
from tests.support.graph_interpreter import Compiled
from tests.support.plans import (
    DRIVER,
    FAST,
    TASKS,
    assert_same,
    check_program,
    reference,
    simulated,
)
from tests.support.sharded import check_shard, checker, join_values, split_values

ROWS = 7
IDS = np.array([4, 1, 4, 6], np.int32)
CHOICES = [(1, "div"), (3, "div"), (3, "mod")]


def table(
    name: str, shards: int, kind: str = "div", homes: Sequence[str] = ()
) -> Variable:
    value = np.random.default_rng(len(name)).normal(size=(ROWS, 2))
    return Variable(
        name,
        value.astype(np.float32),
        partitioner=lambda shape, dtype: [shards, 1],
        partition_strategy=kind,
        device=homes[0] if homes and shards == 1 else "",
        shard_devices=homes if shards > 1 else (),
    )


def values_of(graph: Graph, *variables: Variable) -> list[Any]:
    by_name = {v.name: v.init() for v in variables if v.init is not None}
    return [by_name[spec.name] for spec in graph.variables]


def primitives(graph: Graph) -> Counter[str]:
    return Counter(e.primitive.name for e in graph.equations)


Step = Callable[..., Any]


def adam_step(tables: list[Variable], slots: list[list[Variable]]) -> Step:
    """A step that trains tables by their rows: one lookup of each, adam on rows."""
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.scale_by_adam())

    def step(*ids: Any) -> Any:
        with device("/job:worker/task:0"):
            found = [unique_rows(i, rows=ROWS) for i in ids]
        now = [t[u] for t, (u, _) in zip(tables, found, strict=True)]

        def loss(rows: Any) -> Any:
            taken = [r[p] for r, (_, p) in zip(rows, found, strict=True)]
            return sum(jnp.sum(jnp.sin(x)) for x in taken)

        with device("/job:worker/task:0"):
            value, grads = jax.value_and_grad(loss)(now)
        state = tx.init(grads)
        pairs = list(zip(slots, found, strict=True))
        mu, nu = ([s[n][u] for s, (u, _) in pairs] for n in (0, 1))
        adam = state[1]._replace(mu=mu, nu=nu)
        updates, (_, adam) = tx.update(grads, (state[0], adam))
        for n, (unique, _) in enumerate(found):
            tables[n][unique] = tables[n][unique] - 0.1 * updates[n]
            slots[n][0][unique] = adam.mu[n]
            slots[n][1][unique] = adam.nu[n]
        return value

    return step


@pytest.mark.parametrize(("shards", "kind"), CHOICES)
def test_an_update_of_rows_is_the_same_in_shards(shards: int, kind: str) -> None:
    t, m, v = (table(name, shards, kind) for name in ("t", "mu", "nunu"))
    graph, _ = trace(adam_step([t], [[m, positive(v)]]), IDS)
    _, check = checker(graph)
    values = values_of(graph, t, m, v)

    @settings(max_examples=10, deadline=None)
    @given(st.lists(st.integers(0, ROWS - 1), min_size=4, max_size=4))
    def holds(ids: list[int]) -> None:
        check(values, np.array(ids, np.int32))

    holds()


def positive(variable: Variable) -> Variable:
    assert variable.init is not None
    value = abs(variable.init())
    variable.init = lambda: value
    return variable


def test_rows_go_by_route_and_come_back_split() -> None:
    t, m, v = (table(name, 3) for name in ("t", "mu", "nunu"))
    graph, _ = trace(adam_step([t], [[m, v]]), IDS)
    sharded = check_shard(graph, values_of(graph, t, m, positive(v)), IDS)
    names = primitives(sharded)
    assert (names["route_rows"], names["merge_rows"], names["split_rows"]) == (1, 1, 1)
    assert not sharded.gathered
    pairs = zip(sharded.equations, sharded.stamps, strict=True)
    placed = [stamp.job for e, stamp in pairs if e.primitive.name.endswith("_rows")]
    assert placed == ["worker"] * 4  # unique_rows too, which nothing needs any more


def test_a_table_of_one_shard_goes_by_route_too() -> None:
    t, m, v = (table(name, 1) for name in ("t", "mu", "nunu"))
    graph, _ = trace(adam_step([t], [[m, v]]), IDS)
    sharded = check_shard(graph, values_of(graph, t, m, positive(v)), IDS)
    assert [s.name for s in sharded.variables] == [s.name for s in graph.variables]
    assert primitives(sharded)["route_rows"] == 1


def test_tables_with_other_ids_and_layouts_are_trained_together() -> None:
    t, u = table("t", 3, "mod"), table("uu", 2)
    slots = [
        [positive(table(f"{n}{s}", c, k)) for s in ("m", "vv")]
        for n, (c, k) in (("t", (3, "mod")), ("uu", (2, "div")))
    ]
    graph, _ = trace(adam_step([t, u], slots), IDS, IDS[::-1])
    every = [t, u, *slots[0], *slots[1]]
    check_shard(graph, values_of(graph, *every), IDS, np.array([0, 0, 5, 6], np.int32))


@pytest.mark.parametrize("kind", ["div", "mod"])
def test_tables_of_several_layouts_share_ids(kind: str) -> None:
    t, u = table("t", 3, kind), table("uu", 2, kind)

    def step(ids: Any) -> Any:
        with device("/job:worker/task:0"):
            unique, positions = unique_rows(ids, rows=ROWS)
        a, b = t[unique], u[unique]
        with device("/job:worker/task:0"):
            both = (a + 2 * b) * jnp.where(unique < ROWS, 1.0, 0.0)[:, None]
            result = both[positions]
        t[unique] = t[unique] + u[unique]
        return result

    graph, _ = trace(step, IDS)
    check_shard(graph, values_of(graph, t, u), IDS)


def test_rows_of_a_mask_by_ids_are_masked_in_each_shard() -> None:
    t = table("t", 3)

    def step(ids: Any) -> Any:
        with device("/job:worker/task:0"):
            unique, _ = unique_rows(ids, rows=ROWS)
        there = (unique < ROWS)[:, None]
        rows = jnp.where(there, t[unique], 0.0)
        norm = jnp.sqrt(jnp.sum(rows**2))
        t[unique] = rows / norm
        return norm

    graph, _ = trace(step, IDS)
    assert not check_shard(graph, values_of(graph, t), IDS).gathered


def test_a_table_that_is_also_read_whole_stays_right() -> None:
    t = table("t", 3)

    def step(ids: Any) -> Any:
        with device("/job:worker/task:0"):
            unique, positions = unique_rows(ids, rows=ROWS)
        rows, whole = t[unique], t[...]
        with device("/job:worker/task:0"):
            result = (rows[positions] @ whole.T).sum()
        t[unique] = rows * 2
        return result, t[ids]

    graph, _ = trace(step, IDS)
    sharded = check_shard(graph, values_of(graph, t), IDS)
    assert [g.variable for g in sharded.gathered] == ["t"]


def run_on_cluster(graph: Graph, variables: Sequence[Variable], *steps: Any) -> Plan:
    """Plans a step of sharded tables, and runs it on ``IDS`` beside one jit.

    Args:
      graph: of the step.
      variables: of the graph.
      steps: other ids to run it on.
    """
    planned = plan(graph, tasks=TASKS, driver=DRIVER)
    check_program(planned.program)
    wholes = dict(
        zip(
            [s.name for s in graph.variables],
            values_of(graph, *variables),
            strict=True,
        )
    )
    parts = split_values(graph, list(wholes.values()))
    names = [spec.name for spec in planned.graph.variables]
    values = dict(zip(names, parts, strict=True))
    compiled: Compiled = {}
    for ids in steps or [IDS]:
        wanted = reference(graph, wholes, ids, FAST)
        fetches, after = simulated(planned, values, ids, FAST, compiled)
        joined = join_values(graph, [after[name] for name in names])
        got = fetches, dict(zip(wholes, joined, strict=True))
        assert_same(got, wanted, exact=False)
    return planned


HOMES = ["/job:ps/task:0", "/job:ps/task:1"]


@pytest.mark.parametrize("kind", ["div", "mod"])
def test_a_planned_update_of_rows_moves_only_rows(kind: str) -> None:
    t, m, v = (table(name, 2, kind, homes=HOMES) for name in ("t", "mu", "nunu"))
    graph, _ = trace(adam_step([t], [[m, positive(v)]]), IDS)
    planned = run_on_cluster(graph, (t, m, v))
    ps = planned.program.partition(TASKS[0])
    assert any(isinstance(node, LookupNode) for node in ps.nodes)


MANY_IDS = [
    np.array(ids, np.int32)
    for ids in ([0, 3, 0, 6], [0] * 4, [6] * 4, [-1, 0, 0, 9], [-1] * 4)
]


@pytest.mark.parametrize(
    ("shards", "kind"),
    [(1, "div"), pytest.param(2, "div", marks=pytest.mark.nightly), (2, "mod")],
)
def test_rows_are_spread_over_the_whole_table_where_its_shards_are(
    shards: int, kind: str
) -> None:
    t = table("t", shards, kind, homes=HOMES)

    def step(ids: Any) -> None:
        with device("/job:worker/task:0"):
            unique, _ = unique_rows(ids, rows=ROWS, drop=True)
        rows = t[unique]
        with device("/job:worker/task:0"):
            rows = jnp.cos(rows)
        t[...] = 0.5 * t[...] + spread_rows(unique, rows, layout=row_layout(t))

    planned = run_on_cluster(trace(step, IDS)[0], (t,), *MANY_IDS)
    assert not planned.graph.gathered
    # The rows that a step may need travel both ways, not the table.
    assert planned.nbytes_per_step <= (4 + 2 * 8) * len(IDS) * shards


def test_what_follows_from_ids_is_put_together_with_the_padding_of_ids() -> None:
    t = table("t", 2, "mod", homes=HOMES)

    def step(ids: Any) -> Any:
        with device("/job:worker/task:0"):
            unique, _ = unique_rows(ids, rows=ROWS, drop=True)
        rows = t[unique]
        with device("/job:worker/task:0"):
            rows = jnp.cos(rows)
        spread = jnp.zeros((ROWS, 2)).at[unique].set(rows, mode="drop")
        t[...] = 0.5 * t[...] + spread
        return jnp.sort(ROWS - 2 * unique)

    run_on_cluster(trace(step, IDS)[0], (t,), *MANY_IDS)


def test_rows_made_of_nothing_but_their_number_are_cut_too() -> None:
    t = table("t", 2, homes=HOMES)

    def step(ids: Any) -> None:
        with device("/job:worker/task:0"):
            unique, _ = unique_rows(ids, rows=ROWS)
        place = jnp.arange(len(IDS), dtype=jnp.float32)
        t[unique] = t[unique] + place[:, None]

    graph, _ = trace(step, IDS)
    run_on_cluster(graph, (t,))
