"""Large parts of a variable that come from several tasks are joined by the runtime."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jgraph as jg
from jgraph.graph.sharding import PAGE_BYTES, Sharding, at_pages, even_layout
from jgraph.plan.plan import Plan, plan
from jgraph.plan.program.nodes import JoinNode, ReadNode, RecvNode, SegmentNode
from tests.support.plans import (
    DRIVER,
    FAST,
    PS,
    TASKS,
    WORKERS,
    check_program,
    graph_of,
    nodes_of,
    simulated,
)

ROWS = 2 * PAGE_BYTES  # of 64 numbers: 2 MiB


def planned(
    rows: int = ROWS, *, pages: bool = True, axis: int = 0, one_host: bool = True
) -> Plan:
    """Runs a step that takes a variable cut over a worker and a ps; its plan."""
    shape = (rows, 64) if axis == 0 else (64, rows)
    cut = Sharding(even_layout(rows, 2), axis)
    w = jg.Variable(
        "w",
        jnp.ones(shape),
        sharding=at_pages(cut, shape, "float32") if pages else cut,
        shard_devices=[WORKERS[0], PS[0]],
    )

    def step(x: Any) -> Any:
        with jg.device(WORKERS[0]):
            return (w[...] * x).sum()

    graph = graph_of(step, jnp.float32(0.5), variables=[w])
    found = plan(graph, tasks=TASKS, driver=DRIVER, one_host=one_host)
    check_program(found.program)
    whole = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    assert w.spec.sharding is not None
    parts = w.spec.sharding.split(whole)
    values = {f"w/part_{n}": np.asarray(part) for n, part in enumerate(parts)}
    (total,), _ = simulated(found, values, (jnp.float32(0.5),), FAST)
    np.testing.assert_allclose(total, whole.sum() / 2, rtol=1e-3)
    return found


def test_parts_of_two_tasks_are_joined_where_they_are_taken() -> None:
    found = planned(ROWS + 100)
    (join,) = nodes_of(found, WORKERS[0], JoinNode)
    (read,) = nodes_of(found, WORKERS[0], ReadNode)
    received = [node.outs for node in nodes_of(found, WORKERS[0], RecvNode)]
    assert join.values[0] in read.outs
    assert (join.values[1],) in received
    assert nodes_of(found, PS[0], JoinNode) == []
    (segment,) = nodes_of(found, WORKERS[0], SegmentNode)
    assert segment.inputs[0] == join.out or join.out in segment.inputs
    assert segment.reads == (), "the own part is read to be joined"


def test_xla_puts_small_parts_together() -> None:
    found = planned(ROWS // 16)
    assert nodes_of(found, WORKERS[0], JoinNode) == []


def test_xla_puts_together_what_does_not_lie_in_pages() -> None:
    assert nodes_of(planned(ROWS + 4, pages=False), WORKERS[0], JoinNode) == []
    assert nodes_of(planned(axis=1), WORKERS[0], JoinNode) == []


def test_between_hosts_parts_travel_in_buckets_and_xla_puts_them_together() -> None:
    assert nodes_of(planned(one_host=False), WORKERS[0], JoinNode) == []


@pytest.mark.parametrize("shards", [2, 3, 4])
@pytest.mark.parametrize("shape", [(25_000_000,), (99_990, 100), (400_000, 3, 7)])
def test_parts_end_at_pages_and_are_nearly_even(
    shape: tuple[int, ...], shards: int
) -> None:
    even = Sharding(even_layout(shape[0], shards))
    sizes = at_pages(even, shape, "float32").layout.sizes
    row_bytes = int(np.prod(shape[1:])) * 4
    assert sum(sizes) == shape[0]
    assert all(size * row_bytes % PAGE_BYTES == 0 for size in sizes[:-1])
    assert max(sizes) * 0.8 < min(sizes)


def test_where_rows_and_pages_do_not_fit_shards_are_even() -> None:
    for shape, axis in (((128, 38_759), 0), ((64, 4096), 1), ((100, 4), 0)):
        even = Sharding(even_layout(shape[axis], 2), axis)
        assert at_pages(even, shape, "float32") == even
    mod = Sharding(even_layout(100_000, 2, "mod"))
    assert at_pages(mod, (100_000,), "float32") == mod
