from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings, strategies as st

from jgraph.errors import GraphError
from jgraph.graph.rows.find_keys import find_keys
from jgraph.graph.rows.hash_keys import (
    NO_KEY,
    as_pairs,
    join_keys,
    route_keys,
    shard_of,
    split_keys,
)
from jgraph.graph.rows.hash_spec import TableOptions
from jgraph.train.hash_tables.hash_table import HashTable

HOMES = [2, 2, 4, 4, 0, 3, 3, 0, 0, 1, 0, 4, 2, 0, 0, 2]
OPTIONS = TableOptions(4, 1 << 20)
KEYS = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3)


@given(st.lists(KEYS, max_size=20))
def test_splitting_and_joining_gives_the_keys_back(keys: list[int]) -> None:
    array = np.array(keys, np.int64)
    pairs = split_keys(array)
    assert pairs.dtype == np.uint32
    assert join_keys(pairs).tolist() == keys


def test_strided_keys_of_any_shape_are_split() -> None:
    keys = np.arange(-6, 6).reshape(3, 4)
    assert join_keys(split_keys(keys[:, ::2])).tolist() == keys[:, ::2].tolist()


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_an_id_is_the_same_key_in_every_dtype(dtype: str) -> None:
    ids = np.array([-7, 0, 100], dtype)
    expected = split_keys(ids.astype(np.int64)).tolist()
    assert as_pairs(ids).tolist() == expected
    assert as_pairs(jnp.asarray(ids)).tolist() == expected
    assert split_keys(ids).tolist() == expected


def test_pairs_stay_what_they_are() -> None:
    pairs = split_keys(np.array([[2**40, 3]]))
    for ids in (pairs, jnp.asarray(pairs)):
        assert as_pairs(ids).tolist() == pairs.tolist()


@pytest.mark.parametrize("ids", [np.array([1.5]), jnp.array([2.0]), np.array([True])])
def test_ids_that_are_no_whole_numbers_are_refused(ids: Any) -> None:
    with pytest.raises(GraphError, match="a key is a whole number") as caught:
        as_pairs(ids)
    assert caught.value.code == "JG-223"


def test_unsigned_ids_that_are_no_pairs_are_refused() -> None:
    ids = np.arange(3, dtype=np.uint32)
    for numbers in (ids, jnp.asarray(ids)):
        with pytest.raises(GraphError, match=r"\[3\]; unsigned ids are given as pairs"):
            as_pairs(numbers)


@settings(deadline=None, max_examples=50)
@given(st.sets(KEYS, min_size=5, max_size=5), st.lists(KEYS, min_size=6, max_size=6))
def test_keys_are_found_in_order_of_their_pairs(
    known: set[int], keys: list[int]
) -> None:
    ordered = np.sort(np.array(sorted(known), np.int64).view(np.uint64)).view(np.int64)
    rows = {key: row for row, key in enumerate(ordered.tolist(), 1)}
    found = find_keys(
        jnp.asarray(split_keys(np.concatenate([[0], ordered]))),
        jnp.asarray(split_keys(np.array(keys, np.int64))),
        options=OPTIONS,
    )
    assert found.tolist() == [rows.get(key, 0) for key in keys]


def test_finding_works_under_jit_vmap_and_grad() -> None:
    known = as_pairs(jnp.array([0, 2, 5]))
    ids = jnp.array([[5, 4], [2, 2]])

    def loss(rows: Any, ids: Any) -> Any:
        return rows[find_keys(known, as_pairs(ids), options=OPTIONS)].sum()

    rows = jnp.arange(3.0)
    assert jax.jit(jax.vmap(loss, (None, 0)))(rows, ids).tolist() == [2.0, 2.0]
    assert jax.grad(loss)(rows, ids).tolist() == [1.0, 2.0, 1.0]


def test_stacked_tables_are_refused_and_the_way_out_works() -> None:
    table = HashTable(4, 1 << 20)
    ids = jnp.array([[5, 4], [2, 2]])
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), nnx.state(table))
    with pytest.raises(GraphError, match=r"axis 0 of the keys .*in_axes=\(None, 0\)"):
        nnx.vmap(lambda table, ids: table(ids))(
            nnx.merge(nnx.graphdef(table), stacked), ids
        )
    rows = nnx.vmap(lambda table, ids: table(ids), in_axes=(None, 0))(table, ids)
    assert rows.shape == (2, 2, 4)


@given(st.lists(KEYS | st.just(NO_KEY), max_size=30), st.integers(1, 4))
def test_routed_rows_are_those_of_the_keys(keys: list[int], shards: int) -> None:
    array = np.array(keys, np.int64)
    positions, local = route_keys(array, shards)
    assert len(local) == shards
    for number, part in enumerate(local):
        assert part.tolist() == sorted(part.tolist())
        assert (shard_of(part, shards) == number).all()
    merged = [*np.concatenate(local).tolist()]
    assert len(set(merged)) == len(merged) == len(set(keys) - {NO_KEY})
    merged += [NO_KEY] * (len(keys) + 1 - len(merged))
    assert [merged[p] for p in positions] == keys


def test_home_of_a_key_never_changes() -> None:
    """Checkpoints and all tasks of a cluster agree on it."""
    assert shard_of(np.arange(-8, 8), 5).tolist() == HOMES
