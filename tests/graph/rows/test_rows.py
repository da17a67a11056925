"""Rows of tables: routing to shards and back loses nothing."""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jgraph.graph.rows.rows import (
    Layout,
    have_rows,
    merge_rows,
    route_rows,
    split_rows,
    unique_rows,
)

LAYOUTS = [Layout((5,)), Layout((3, 2)), Layout((2, 2, 1), "mod"), Layout((1, 1, 3))]
ids_of_five = st.lists(st.integers(0, 4), min_size=6, max_size=6)


def shards_of(table: np.ndarray[Any, Any], layout: Layout) -> list[jax.Array]:
    if layout.kind == "mod":
        return [jnp.asarray(table[n :: layout.shards]) for n in range(layout.shards)]
    return [jnp.asarray(part) for part in np.split(table, np.cumsum(layout.sizes)[:-1])]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@settings(max_examples=10)
@given(ids=ids_of_five)
def test_routed_and_merged_rows_are_the_rows_of_the_ids(
    layout: Layout, ids: list[int]
) -> None:
    table = np.arange(10.0, dtype=np.float32).reshape(5, 2)
    positions, local = route_rows(jnp.array(ids), layout=layout)
    rows = [
        shard.at[part].get(mode="fill", fill_value=-1)
        for shard, part in zip(shards_of(table, layout), local, strict=True)
    ]
    merged = merge_rows(local, rows, layout=layout)
    assert np.array_equal(merged[positions], table[np.array(ids)])
    back = split_rows(merged, local, layout=layout)
    for part, row in zip(back, rows, strict=True):
        count = int(np.sum(np.asarray(row)[:, 0] >= 0))
        assert np.array_equal(part[:count], row[:count])
        assert not np.any(part[count:])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_id_out_of_range_has_the_position_past_the_end(layout: Layout) -> None:
    positions, local = route_rows(jnp.array([-1, 4, 5, 4]), layout=layout, drop=True)
    assert positions.tolist() == [4, 0, 4, 0]
    found = [
        np.asarray(p)[np.asarray(p) < s]
        for p, s in zip(local, layout.sizes, strict=True)
    ]
    assert sum(map(len, found)) == 1


@settings(max_examples=10)
@given(ids=ids_of_five)
def test_unique_rows_are_each_once_and_ascending(ids: list[int]) -> None:
    unique, positions = unique_rows(jnp.array(ids), rows=5)
    assert np.array_equal(unique[positions], ids)
    assert unique.tolist() == sorted(set(ids)) + [5] * (len(ids) - len(set(ids)))


def test_row_operations_can_be_compiled_and_exported() -> None:
    def fn(ids: jax.Array, table: jax.Array) -> jax.Array:
        positions, local = route_rows(ids, layout=Layout((3, 2)))
        rows = [table[:3][local[0]], table[3:][local[1]]]
        return merge_rows(local, rows, layout=Layout((3, 2)))[positions]

    ids, table = jnp.array([4, 1, 4]), jnp.arange(5.0)
    assert jax.jit(fn)(ids, table).tolist() == [4.0, 1.0, 4.0]
    exported = jax.export.export(jax.jit(fn))(ids, table)
    assert exported.call(ids, table).tolist() == [4.0, 1.0, 4.0]


@pytest.mark.parametrize("rows", [1, 13, 128, 129, 200, 256, 257, 2**31 - 1])
@pytest.mark.parametrize(
    "dtype",
    ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"],
)
def test_integers_have_rows_where_they_count_them(dtype: str, rows: int) -> None:
    kind: Any = np.iinfo(dtype)
    near = {n + more for n in (0, 128, 256, rows, 2**31) for more in (-1, 0, 1)}
    for number in {*near, int(kind.min), int(kind.max)}:
        if kind.min <= number <= kind.max:
            ids = np.array([[0, number]], dtype)
            assert have_rows(ids, rows) == (0 <= number < rows), number
    assert have_rows(np.zeros(0, dtype), rows)
