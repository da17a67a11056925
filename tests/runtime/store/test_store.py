import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgraph.errors import (
    InternalError,
    MalformedMessageError,
    UninitializedError,
    VariableMismatchError,
)
from jgraph.graph.ir import TaskName
from jgraph.graph.rows.hash_spec import HashSpec
from jgraph.plan.program.nodes import ValueType
from jgraph.plan.program.program import StoredVariable
from jgraph.plan.program.replay import RowsAre
from jgraph.runtime.store.entry import RowsOf
from jgraph.runtime.store.store import PART_BYTES, VariableStore

A = StoredVariable("a", ValueType((1000,), "float32"))
B = StoredVariable("b", ValueType((1000,), "float32"))


@pytest.fixture
def store() -> VariableStore:
    store = VariableStore(TaskName("/job:ps/task:0"))
    store.write([A, B], [np.zeros(1000, np.float32), np.zeros(1000, np.float32)])
    return store


def test_variable_without_value_is_named_with_its_task() -> None:
    store = VariableStore(TaskName("/job:ps/task:0"))
    with pytest.raises(UninitializedError, match="'a' on /job:ps/task:0 has no value"):
        store.read([A])


def test_name_with_another_shape_is_refused_and_nothing_changes(
    store: VariableStore,
) -> None:
    other = StoredVariable("b", ValueType((3,), "float32"))
    with pytest.raises(VariableMismatchError, match=r"'b' .* is float32\[1000\]"):
        store.write([A, other], [np.ones(1000, np.float32), np.ones(3, np.float32)])
    assert float(store.read([A])[0].sum()) == 0.0


def test_written_array_is_copied(store: VariableStore) -> None:
    array = np.ones(1000, np.float32)
    store.write([A], [array])
    array[:] = 7
    assert float(store.read([A])[0][0]) == 1.0


def test_containers_keep_equal_names_apart(store: VariableStore) -> None:
    other = StoredVariable("a", ValueType((), "int32"), container="eval")
    store.write([other], [np.int32(5)])
    assert int(store.read([other])[0]) == 5
    assert store.drop(["eval"]) == 1
    assert [row.name for row in store.table()] == ["a", "b"]


def test_readers_of_one_version_have_one_view_and_later_ones_another(
    store: VariableStore,
) -> None:
    bump = jax.jit(lambda a: [a + 1], donate_argnums=0)
    (first,), (second,) = store.read([A]), store.read([A])
    assert first is second
    store.update([A], [], bump)
    (later,) = store.read([A])
    assert later is not first
    assert (first.max(), later.min()) == (0, 1)


def test_update_donates_and_counts_versions(store: VariableStore) -> None:
    bump = jax.jit(lambda a, b: [a + 1, b.sum()], donate_argnums=0)
    (total,) = store.update([A], [B], bump)
    assert float(total) == 0.0
    assert {row.name: row.version for row in store.table()} == {"a": 1, "b": 0}


def test_failing_update_leaves_the_store_as_it_was(store: VariableStore) -> None:
    def fail(*values: jax.Array) -> Sequence[jax.Array]:
        raise FloatingPointError

    with pytest.raises(FloatingPointError):
        store.update([A], [], fail)
    assert float(store.read([A])[0].sum()) == 0.0


def test_update_that_fails_after_taking_the_buffers_says_what_was_lost(
    store: VariableStore,
) -> None:
    def fail(*values: jax.Array) -> Sequence[jax.Array]:
        values[0].delete()
        raise FloatingPointError

    with pytest.raises(InternalError, match="a lost the value"):
        store.update([A], [], fail)
    with pytest.raises(UninitializedError):
        store.read([A])


def test_readers_never_see_half_an_update(store: VariableStore) -> None:
    """Two variables move together; every snapshot of both must agree."""
    bump = jax.jit(lambda a, b: [a + 1, b + 1], donate_argnums=(0, 1))
    rounds = 200

    def update() -> None:
        for _ in range(rounds):
            store.update([A, B], [], bump)

    writers = [threading.Thread(target=update) for _ in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        a, b = map(np.asarray, store.read([A, B]))
        np.testing.assert_array_equal(a, np.full(1000, a[0]))
        np.testing.assert_array_equal(a, b)
    assert float(store.read([A])[0][0]) == 2 * rounds


def address_of_a(store: VariableStore) -> int:
    address: int = store._entries["", "a"].value.unsafe_buffer_pointer()
    return address


def test_update_never_changes_what_a_reader_holds(store: VariableStore) -> None:
    bump = jax.jit(lambda a: [a + 1], donate_argnums=0)
    (held,) = store.read([A])
    before = address_of_a(store)
    store.update([A], [], bump)
    assert address_of_a(store) != before
    assert held.sum() == 0.0
    assert store.read([A])[0].sum() == 1000.0


def test_update_is_in_place_once_nobody_holds_a_view(store: VariableStore) -> None:
    bump = jax.jit(lambda a: [a + 1], donate_argnums=0)
    assert store.read([A])[0].sum() == 0.0  # the view is gone at once
    before = address_of_a(store)
    store.update([A], [], bump)
    assert address_of_a(store) == before


def put_sevens(places: Sequence[np.ndarray]) -> str:
    for place in places:
        place[...] = 7
    return "done"


def test_variables_are_filled_in_their_own_memory(store: VariableStore) -> None:
    new = StoredVariable("new", ValueType((2, 3), "bfloat16"))
    before = address_of_a(store)
    assert store.fill([A, new], put_sevens) == "done"
    assert address_of_a(store) == before
    for variable in (A, new):
        assert (store.read([variable])[0] == 7).all()
    assert {row.name: row.version for row in store.table()} == {
        "a": 1,
        "b": 0,
        "new": 0,
    }


def test_filling_never_changes_what_a_reader_holds(store: VariableStore) -> None:
    (held,) = store.read([A])
    store.fill([A], put_sevens)
    assert held.sum() == 0.0
    assert (store.read([A])[0] == 7).all()


def test_numbers_of_less_than_a_byte_are_filled(store: VariableStore) -> None:
    small = StoredVariable("small", ValueType((3, 3), "int4"))
    store.write([small], [np.zeros((3, 3), small.type.np_dtype)])
    store.fill([small], put_sevens)
    assert (store.read([small])[0].astype(int) == 7).all()


def test_a_variable_of_another_type_is_not_filled(store: VariableStore) -> None:
    other = StoredVariable("b", ValueType((3,), "float32"))
    with pytest.raises(VariableMismatchError, match=r"'b' .* is float32\[1000\]"):
        store.fill([A, other], put_sevens)
    assert float(store.read([A])[0].sum()) == 0.0


def test_views_cannot_be_written(store: VariableStore) -> None:
    (view,) = store.read([A])
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_long_update_holds_up_neither_other_variables_nor_the_table(
    store: VariableStore,
) -> None:
    """A ps that computes must still answer how it is."""
    in_update, go_on = threading.Event(), threading.Event()

    def slow(a: jax.Array) -> Sequence[jax.Array]:
        in_update.set()
        assert go_on.wait(30)
        return [a]

    updating = threading.Thread(target=lambda: store.update([A], [], slow))
    updating.start()
    assert in_update.wait(30)
    assert [row.name for row in store.table()] == ["a", "b"]
    assert store.nbytes == 8000
    assert store.update([B], [], lambda b: [b + 1]) == []
    one = jax.numpy.ones(())
    assert store.update([], [], lambda: [one]) == [one]
    assert store.read([B])[0][0] == 1.0
    go_on.set()
    updating.join(30)
    assert store.read([A])[0][0] == 0.0


def test_updates_that_share_variables_in_any_order_never_lock_up(
    store: VariableStore,
) -> None:
    def swap(a: jax.Array, b: jax.Array) -> Sequence[jax.Array]:
        return [a + 1, b + 1]

    def many(first: StoredVariable, second: StoredVariable) -> None:
        for _ in range(100):
            store.update([first], [second], lambda a, b: [a + 1])
            store.update([first, second], [], swap)

    threads = [
        threading.Thread(target=many, args=pair) for pair in [(A, B), (B, A)] * 2
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    a, b = store.read([A, B])
    assert a[0] == b[0] == 2 * 100 + 4 * 100


def test_a_large_variable_is_told_of_by_rows_and_a_small_one_whole() -> None:
    store = VariableStore(TaskName("/job:ps/task:0"))
    rows = PART_BYTES // 4
    large = StoredVariable("large", ValueType((rows + 3, 1), "float32"), "model")
    small = StoredVariable("small", ValueType((2,), "float32"), "model")
    value = np.arange(rows + 3, dtype=np.float32)[:, None]
    store.write([large, small], [value, np.ones(2, np.float32)])
    other, told = VariableStore(TaskName("/job:ps/task:1")), []

    def tell(what: str | RowsAre | HashSpec, arrays: Sequence[Any]) -> None:
        told.append(what)
        if isinstance(what, RowsAre):
            other.put_rows(large, *arrays)

    store.whole("model", tell)
    assert told == [RowsAre("large", rows + 3)] * 2 + ["small"]
    assert (other.read([large])[0] == value).all()


def test_rows_of_what_several_devices_have_are_looked_at_where_they_lie(
    store: VariableStore,
) -> None:
    table = StoredVariable("table", ValueType((4, 2), "float32"))
    store.write([table], [np.arange(8, dtype=np.float32).reshape(4, 2)])
    halves = NamedSharding(Mesh(jax.devices()[:2], ["model"]), PartitionSpec("model"))
    bump = jax.jit(lambda a: [a + 1], out_shardings=halves)
    store.update([table], [], bump, layouts=[halves])
    entry = store._entries["", "table"]
    for ids, due in (([1, 2, 3], [[3, 4], [5, 6], [7, 8]]), ([], [])):
        wanted = np.array(ids, np.int32)
        rows = RowsOf(table, wanted, ValueType((8, 2), "float32"))
        (found,) = store.lookup([rows], peeks=True)
        assert found[: len(ids)].tolist() == due
    assert entry.layout == halves
    wrong = RowsOf(table, np.array([4], np.int32), ValueType((1, 2), "float32"))
    with pytest.raises(MalformedMessageError):
        store.lookup([wrong], peeks=True)
