"""Rows of gradients on their way: cut by shard, summed over workers, applied."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jgraph.errors import MalformedMessageError
from jgraph.graph.device import device
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName
from jgraph.graph.rows.padded_rows import cut_rows, join_rows
from jgraph.graph.rows.rows import Layout, unique_rows
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.plan.plan import plan
from jgraph.plan.program.accumulate import averaging, contributing, mean_of_rows
from jgraph.plan.program.nodes import AggregateNode, SegmentNode
from jgraph.plan.program.program import Program
from jgraph.rpc.wire.program_codec import decode_program, encode_program
from jgraph.train.tables.row_mean import RowMean
from tests.support.graph_interpreter import run_program
from tests.support.sharded import check_shard

ROWS, COUNT, WORKERS = 7, 5, 3
PS = [TaskName("/job:ps/task:0"), TaskName("/job:ps/task:1")]
WORKER = TaskName("/job:worker/task:0")
LAYOUTS = [Layout((7,)), Layout((4, 3)), Layout((4, 3), "mod")]
some_ids = st.lists(st.integers(0, ROWS - 1), min_size=COUNT, max_size=COUNT)


def table(layout: Layout) -> Variable:
    value = np.arange(2 * ROWS, dtype=np.float32).reshape(ROWS, 2)
    cut = layout.shards > 1
    return Variable(
        "t",
        value,
        device="" if cut else PS[0],
        partitioner=(lambda *_: [layout.shards, 1]) if cut else None,
        partition_strategy=layout.kind,
        shard_devices=PS if cut else (),
    )


def gradient_of(t: Variable, mean: RowMean) -> Graph:
    """Contributes the gradient of ``sum(sin(scale * t[ids]))``."""
    slots = [Variable(f"slot/{n}", ((), jnp.int32, None), device=p) for n, p in _each()]
    slots = slots[: len(t.shards)]

    def step(ids: Any, scale: Any, slot: Any) -> Any:
        with device(WORKER):
            unique, places = unique_rows(ids, rows=ROWS)
        rows = t[unique]
        with device(WORKER):
            loss = lambda rows: jnp.sum(jnp.sin(scale * rows[places]))
            values = mean.cut(unique, jax.grad(loss)(rows))
            slot = slot + 0
        for variable in mean.contributed:
            variable[...] = values[variable.name]
        for variable in slots:
            variable[...] = slot
        return slot

    number = jax.ShapeDtypeStruct((), jnp.int32)
    ids = jax.ShapeDtypeStruct((COUNT,), jnp.int32)
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    variables = [t, *mean.contributed, *slots]
    return trace(step, ids, scale, number, variables=variables)[0]


def update_of(t: Variable, mean: RowMean) -> Graph:
    """Subtracts the mean; gives its norm."""

    def step() -> Any:
        rows, grads = mean.read()
        t[rows.unique] = t[rows.unique] - grads
        return jnp.sqrt(jnp.sum(grads**2))

    return trace(step, variables=[t, *mean.averaged])[0]


def _each() -> Any:
    return enumerate(PS)


def programs(layout: Layout) -> tuple[Program, Program]:
    t = table(layout)
    mean = RowMean(t, COUNT, WORKERS)
    tasks = [*PS, WORKER]
    first = plan(gradient_of(t, mean), tasks=tasks, driver=WORKER).program
    second = plan(update_of(t, mean), tasks=tasks, driver=PS[0]).program
    shards = PS[: layout.shards]
    return contributing(first, "gate"), averaging(second, "gate", shards)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_table_is_updated_as_by_the_mean_of_whole_gradients(layout: Layout) -> None:
    gradient, update = programs(layout)
    t = table(layout)
    assert t.init is not None
    due = np.array(t.init())
    store: dict[tuple[str, str], Any] = {
        ("", part.name): np.array(part.init())  # type: ignore[misc]
        for part in t.shards
    }
    whole = np.zeros_like(due)
    for slot, chosen in [(2, [1, 1, 6, 0, 1]), (0, [6] * 5), (1, [2, 3, 6, 4, 1])]:
        ids, scale = np.array(chosen, np.int32), np.float32(slot)
        feeds = {"ids": ids, "scale": scale, "slot": np.int32(slot)}
        run_program(gradient, store, feeds)
        np.add.at(whole, ids, slot * np.cos(slot * due[ids]) / WORKERS)
    (norm,) = run_program(update, store, {})
    assert norm == pytest.approx(np.sqrt((whole**2).sum()), rel=1e-5)
    after = [store["", part.name] for part in t.shards]
    cut = t.spec.sharding
    joined = cut.joined(after) if cut else after[0]
    np.testing.assert_allclose(joined, due - whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_ps_updates_its_rows_and_none_of_a_whole_table(layout: Layout) -> None:
    gradient, update = programs(layout)
    assert decode_program(*encode_program(gradient)) == gradient
    assert decode_program(*encode_program(update)) == update
    for task in PS[: layout.shards]:
        partition = update.partition(task)
        assert isinstance(partition.nodes[0], AggregateNode)
        segments = [n for n in partition.nodes if isinstance(n, SegmentNode)]
        assert [len(n.row_updates) for n in segments if n.row_updates] == [1]
        taken = {v for n in segments for v in (*n.updates, *n.reads)}
        assert not any(partition.variables[v].name.startswith("t") for v in taken)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_sharding_keeps_the_meaning_of_both_graphs(layout: Layout) -> None:
    t = table(layout)
    mean = RowMean(t, COUNT, WORKERS)
    graph = gradient_of(t, mean)
    values = [np.ones(v.shape, v.dtype) for v in graph.variables]
    ids = np.array([6, 1, 6, 0, 2], np.int32)
    check_shard(graph, values, [ids, np.float32(2), np.int32(0)])
    unique, _ = unique_rows(jnp.asarray(ids), rows=ROWS)
    many = jnp.concatenate([unique, jnp.full(2 * COUNT, ROWS, jnp.int32)])
    rows = jnp.ones((WORKERS * COUNT, 2)).at[4:].set(0)
    cut = cut_rows(many, rows, layout=layout)
    kept: dict[str, Any] = {
        v.name: value for v, value in zip(mean.averaged, cut, strict=True)
    }
    kept["t"] = np.ones((ROWS, 2), np.float32)
    graph = update_of(t, mean)
    check_shard(graph, [kept[v.name] for v in graph.variables])


@given(ids=some_ids, layout=st.sampled_from(LAYOUTS))
@settings(max_examples=10, deadline=None)
def test_joining_gives_back_what_was_cut(ids: list[int], layout: Layout) -> None:
    unique, _ = unique_rows(jnp.array(ids), rows=ROWS)
    there = np.asarray(unique) < ROWS
    rows = jnp.where(there, 10.0 + unique, 0)
    joined, same = join_rows(*cut_rows(unique, rows, layout=layout), layout=layout)
    order = np.argsort(joined, kind="stable")
    np.testing.assert_array_equal(joined[order], unique)
    np.testing.assert_array_equal(same[order], rows)


@given(
    ids=st.lists(st.sets(st.integers(0, 9), max_size=6), min_size=1, max_size=4),
    dtype=st.sampled_from(["float32", "float64", "bfloat16"]),
)
def test_mean_of_rows_is_the_mean_of_whole_gradients(
    ids: list[set[int]], dtype: str
) -> None:
    rng = np.random.default_rng(len(ids))
    type_ = np.dtype(getattr(ml_dtypes, dtype, dtype))
    parts = [np.array(sorted(each), np.int32) for each in ids]
    rows = [rng.normal(size=(len(each), 2)).astype(type_) for each in parts]
    found, means = mean_of_rows(list(zip(parts, rows, strict=True)), 24)
    whole = np.zeros((10, 2), np.float32 if dtype == "bfloat16" else type_)
    for part, values in zip(parts, rows, strict=True):
        whole[part] += values
    count = len(set().union(*ids))
    assert found[:count].tolist() == sorted(set().union(*ids))
    assert (found[count:] > 9).all()
    np.testing.assert_array_equal(
        means[:count], (whole / len(ids)).astype(type_)[found[:count]]
    )
    assert not means[count:].any()
    assert means.ctypes.data % 64 == 0


def test_more_rows_than_there_can_be_are_refused() -> None:
    one = np.arange(4, dtype=np.int32), np.ones(4, np.float32)
    with pytest.raises(MalformedMessageError, match="came where"):
        mean_of_rows([one], 3)
