"""Packed variables lie in one array, and each still goes its own way."""

import gc
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jgraph.errors import (
    InternalError,
    MalformedMessageError,
    VariableMismatchError,
)
from jgraph.graph.ir import TaskName
from jgraph.plan.program.nodes import ValueType
from jgraph.plan.program.program import StoredVariable
from jgraph.plan.program.row_values import cuts_of, packed, unpacked
from jgraph.runtime.store.entry import RowsOf
from jgraph.runtime.store.groups import VariableGroup
from jgraph.runtime.store.store import VariableStore

MANY = [StoredVariable(f"v{n}", ValueType((n + 1, 3), "float32")) for n in range(5)]
ALONE = StoredVariable("alone", ValueType((2,), "int32"))
NOTHING = VariableGroup([])


def values(factor: float = 1) -> list[np.ndarray[Any, Any]]:
    return [np.full(v.type.shape, n * factor, np.float32) for n, v in enumerate(MANY)]


@pytest.fixture
def store() -> VariableStore:
    store = VariableStore(TaskName("/job:ps/task:0"))
    store.write([*MANY, ALONE], [*values(), np.ones(2, np.int32)])
    return store


def group(variables: Sequence[StoredVariable] = MANY) -> VariableGroup:
    """All of them as one flat array, and one beside it."""
    return VariableGroup([*variables, ALONE], [len(variables)])


def fill_with(n: int, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
    arrays[0].fill(n)


def incremented(*old: jax.Array) -> list[jax.Array]:
    return [value + 1 for value in old]


def do(store: VariableStore, mine: VariableGroup, what: str, n: int, step: int) -> None:
    """A step of a story: ``what`` is done with all variables, or with one."""
    one, value = MANY[n], np.full(MANY[n].type.shape, step, np.float32)
    if what == "p":
        store.update(mine, NOTHING, incremented)
    elif what == "u":
        store.update([one], [], lambda old: [jnp.asarray(old * 2)])
    elif what == "w":
        store.write([one], [value])
    elif what == "r":
        store.update([one], [MANY[n - 1]], lambda v, r: [v + jnp.max(r)])
    elif what == "x":
        store.fill([one], partial(fill_with, n))


doubled = jax.jit(lambda flat, alone: (flat * 2, alone + 1), donate_argnums=(0, 1))


def stored(store: VariableStore) -> list[list[float]]:
    return [value.ravel().tolist() for value in store.read(MANY)]


def test_an_update_of_all_is_of_one_array(store: VariableStore) -> None:
    store.update(group(), NOTHING, doubled)
    assert stored(store) == [v.ravel().tolist() for v in values(2)]
    assert store.read([ALONE])[0].tolist() == [2, 2]
    versions = {row.name: row.version for row in store.table()}
    assert versions == dict.fromkeys(["alone", "v0", "v1", "v2", "v3", "v4"], 1)
    flat, alone = store.read(group())
    types = [v.type for v in MANY]
    cut = unpacked(flat, cuts_of(types))
    assert [v.ravel().tolist() for v in cut] == stored(store)
    assert alone.tolist() == [2, 2]


def test_all_are_updated_in_place_once_nobody_holds_a_view(
    store: VariableStore,
) -> None:
    mine = group()
    store.update(mine, NOTHING, doubled)
    view = store.read(mine)[0]
    store.update(mine, NOTHING, doubled)
    assert view.max() == 8
    del view
    gc.collect()
    before = store.read(mine)[0].__array_interface__["data"][0]
    store.update(mine, NOTHING, doubled)
    assert store.read(mine)[0].__array_interface__["data"][0] == before
    assert stored(store) == [v.ravel().tolist() for v in values(8)]


def test_rows_of_one_are_looked_at_where_it_lies(store: VariableStore) -> None:
    mine = group()
    store.update(mine, NOTHING, doubled)
    slab = store._entries["", "v3"].slab
    rows = RowsOf(MANY[3], np.array([0, 2], np.int32), ValueType((3, 3), "float32"))
    (found,) = store.lookup([rows], peeks=True)
    assert found[:2].tolist() == np.full((2, 3), 6).tolist()
    assert slab is not None
    assert store._entries["", "v3"].slab is slab
    wrong = replace(rows, ids=np.array([4], np.int32))
    with pytest.raises(MalformedMessageError):
        store.lookup([wrong], peeks=True)


def test_an_update_never_changes_what_a_reader_of_one_holds(
    store: VariableStore,
) -> None:
    mine = group()
    store.update(mine, NOTHING, doubled)
    (view,) = store.read([MANY[3]])
    store.update(mine, NOTHING, doubled)
    store.write([MANY[3]], [np.zeros((4, 3), np.float32)])
    assert view.tolist() == np.full((4, 3), 6).tolist()
    assert not store.read([MANY[3]])[0].any()


def test_a_write_never_changes_what_a_reader_holds(store: VariableStore) -> None:
    mine = group()
    store.update(mine, NOTHING, doubled)
    (view,), flat = store.read([MANY[3]]), store.read(mine)[0]
    before = flat.copy()
    store.write([MANY[3]], [np.zeros((4, 3), np.float32)])
    assert view.tolist() == np.full((4, 3), 6).tolist()
    np.testing.assert_array_equal(flat, before)
    assert not store.read([MANY[3]])[0].any()


def flat_of(factor: float) -> np.ndarray[Any, Any]:
    return packed(values(factor), [v.type for v in MANY])


@pytest.mark.parametrize("owned", [(), range(2)])
def test_all_are_written_as_one_array(
    store: VariableStore, owned: Sequence[int]
) -> None:
    mine, (view,), flat = group(), store.read([MANY[3]]), flat_of(1)
    for factor in (2, 3):  # those that are there, then the slab that they are in
        flat, told = flat_of(factor), list[int]()
        one_more = partial(told.append, factor)
        store.write(mine, [flat, np.full(2, factor, np.int32)], owned, one_more)
        assert told == [factor]
    assert stored(store) == [v.ravel().tolist() for v in values(3)]
    assert store.read([ALONE])[0].tolist() == [3, 3]
    assert view.tolist() == np.full((4, 3), 3).tolist()
    assert {row.version for row in store.table()} == {2}
    if not owned:
        flat[:] = 0  # it was copied
    store.update(mine, NOTHING, doubled)
    assert stored(store) == [v.ravel().tolist() for v in values(6)]


def test_variables_that_are_absent_are_made_of_one_array() -> None:
    empty = VariableStore(TaskName("/job:ps/task:0"))
    empty.write(group(), [flat_of(2), np.ones(2, np.int32)])
    assert stored(empty) == [v.ravel().tolist() for v in values(2)]
    assert empty.read([ALONE])[0].tolist() == [1, 1]


def test_one_array_for_variables_of_other_types_is_refused(
    store: VariableStore,
) -> None:
    other = [*MANY[:4], StoredVariable("v4", ValueType((15,), "float32"))]
    with pytest.raises(VariableMismatchError, match=r"v4.* is float32\[5,3\]"):
        store.write(group(other), [flat_of(9), np.ones(2, np.int32)])
    assert stored(store) == [v.ravel().tolist() for v in values()]


def test_one_is_written_and_updated_among_the_others(store: VariableStore) -> None:
    mine = group()
    store.update(mine, NOTHING, doubled)
    (neighbour,) = store.read([MANY[1]])
    store.write([MANY[2]], [np.full((3, 3), 9, np.float32)])
    store.update(
        [MANY[3]], [MANY[2]], lambda old, read: [jnp.asarray(old + read.max())]
    )
    assert neighbour.max() == 2
    wanted = values(2)
    wanted[2][:], wanted[3][:] = 9, 15
    assert stored(store) == [v.ravel().tolist() for v in wanted]
    store.update(mine, NOTHING, doubled)
    assert stored(store) == [(v * 2).ravel().tolist() for v in wanted]
    versions = {row.name: row.version for row in store.table()}
    assert [versions[f"v{n}"] for n in range(5)] == [2, 2, 3, 3, 2]


def test_all_are_written_at_once(store: VariableStore) -> None:
    mine = group()
    store.update(mine, NOTHING, doubled)
    flat = store.read(mine)[0]
    before = flat.copy()
    store.write(MANY[::-1], values(3)[::-1])
    assert stored(store) == [v.ravel().tolist() for v in values(3)]
    np.testing.assert_array_equal(flat, before)
    store.update(mine, NOTHING, doubled)
    assert stored(store) == [v.ravel().tolist() for v in values(6)]


def test_rows_of_one_are_updated_among_the_others(store: VariableStore) -> None:
    mine = group()
    store.update(mine, NOTHING, doubled)
    ids = np.array([1, 3], np.int32)
    rows = RowsOf(MANY[4], ids, ValueType((2, 3), "float32", ragged=True))
    store.update([], [], lambda rows: [jnp.asarray(rows * 0)], [rows])
    assert store.read([MANY[4]])[0][:, 0].tolist() == [8, 0, 8, 0, 8]
    store.update(mine, NOTHING, doubled)
    assert store.read([MANY[4]])[0][:, 0].tolist() == [16, 0, 16, 0, 16]


def test_another_order_and_another_choice_find_the_same_values(
    store: VariableStore,
) -> None:
    first, other = group(), group(MANY[3:0:-1])
    for each in (first, other, first, other):
        store.update(each, NOTHING, doubled)
    twice, four = values(4), values(16)
    wanted = [twice[0], *four[1:4], twice[4]]
    assert stored(store) == [v.ravel().tolist() for v in wanted]


def test_what_is_only_read_is_one_array_too(store: VariableStore) -> None:
    read = group()
    (total,) = store.update([], read, lambda flat, alone: [jnp.sum(flat) + alone[0]])
    assert total == sum(v.sum() for v in values()) + 1
    assert stored(store) == [v.ravel().tolist() for v in values()]


def test_all_are_put_back(store: VariableStore) -> None:
    back: list[Any] = []
    mine = group()
    for _ in range(2):
        store.update(mine, NOTHING, doubled, undo=back.append)
    store.write([MANY[0]], [np.full((1, 3), 7, np.float32)], undo=back.append)
    for put_back in reversed(back):
        put_back()
    assert stored(store) == [v.ravel().tolist() for v in values()]
    assert store.read([ALONE])[0].tolist() == [1, 1]


def test_all_are_filled(store: VariableStore) -> None:
    store.update(group(), NOTHING, doubled)

    def fill(arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        for n, array in enumerate(arrays):
            array[:] = n + 10

    store.fill(MANY[1:3], fill)
    assert [v.max() for v in store.read(MANY)] == [0, 10, 11, 6, 8]


def test_a_failure_before_the_start_changes_nothing(store: VariableStore) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        store.update(group(), NOTHING, fail)
    assert stored(store) == [v.ravel().tolist() for v in values()]


def test_a_failure_that_took_the_array_says_what_was_lost(store: VariableStore) -> None:
    def fail(flat: jax.Array, alone: jax.Array) -> Any:
        doubled(flat, alone)
        raise RuntimeError("no")

    with pytest.raises(InternalError, match="v0, v1, v2, v3, v4"):
        store.update(group(), NOTHING, fail)
    assert store.table() == []


def test_writers_of_neighbours_do_not_disturb_one_another(
    store: VariableStore,
) -> None:
    mine = group()
    store.update(mine, NOTHING, doubled)

    def write(n: int) -> None:
        for value in range(200):
            store.write([MANY[n]], [np.full(MANY[n].type.shape, value, np.float32)])
            (view,) = store.read([MANY[n]])
            assert (view == value).all()

    threads = [threading.Thread(target=write, args=(n,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [v.max() for v in store.read(MANY)] == [199] * 5


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("puvwrx"), st.integers(0, 4)), max_size=12))
def test_a_store_with_packs_is_a_store_without(story: list[tuple[str, int]]) -> None:
    """Any story of updates, writes and reads leaves the same values."""
    stores = [VariableStore(TaskName("/job:ps/task:0")) for _ in range(2)]
    groups = [VariableGroup(MANY, [5]), VariableGroup(MANY)]
    views: list[list[Any]] = []
    for store in stores:
        store.write(MANY, values())
    for step, (what, n) in enumerate(story):
        for store, mine in zip(stores, groups, strict=True):
            do(store, mine, what, n, step)
        if what == "v":
            views.append([[np.array(v), v] for s in stores for v in s.read([MANY[n]])])
    flat, apart = stores[0].read(groups[0])[0], stores[1].read(groups[1])
    cut = unpacked(flat, cuts_of([v.type for v in MANY]))
    assert all(map(np.array_equal, cut, apart))
    assert all(np.array_equal(copy, view) for pair in views for copy, view in pair)
    assert stores[0].table() == stores[1].table()
