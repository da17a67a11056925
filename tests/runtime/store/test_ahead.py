"""Variables are copied while they are used, and the copy is what they are."""

import threading
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.graph.ir import TaskName
from jgraph.graph.rows.hash_spec import Column, HashSpec
from jgraph.plan.program.nodes import ValueType
from jgraph.plan.program.program import StoredVariable
from jgraph.plan.program.replay import KeyedRowsAre, RowsAre
from jgraph.runtime.store.ahead import PART_BYTES, AheadCopy, Part
from jgraph.runtime.store.entry import RowsOf
from jgraph.runtime.store.store import VariableStore

ROWS, WIDTH = 1 << 14, 64
TABLE = StoredVariable("table", ValueType((ROWS, WIDTH), "float32"), "c")
DENSE = StoredVariable("dense", ValueType((ROWS, WIDTH), "float32"), "c")
SMALL = StoredVariable("small", ValueType((8,), "float32"), "c")
ALL = (TABLE, DENSE, SMALL)


class Copied:
    """What somebody has who takes the parts."""

    def __init__(self) -> None:
        self.store = VariableStore(TaskName("/job:ps/task:1"))
        self.nbytes = 0

    def take(self, part: Part) -> None:
        self.nbytes += part.nbytes
        if isinstance(part.what, KeyedRowsAre):
            shard = self.store.hash_table("c", part.what.spec).shard
            put = shard.put_ends if part.what.ends else shard.put_copied
            put(part.arrays)
            return
        if isinstance(part.what, RowsAre):
            ids, rows = part.arrays
            of = {one.name: one for one in ALL}[part.what.name]
            self.store.put_rows(of, ids, rows.copy())
        else:
            of = {one.name: one for one in ALL}[part.what]
            self.store.write([of], [part.arrays[0]])

    def equals(self, other: VariableStore) -> None:
        for ours, theirs in zip(self.store.read(ALL), other.read(ALL), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.fixture
def store() -> VariableStore:
    store = VariableStore(TaskName("/job:ps/task:0"))
    store.write(ALL, [jnp.zeros(one.type.shape) for one in ALL])
    return store


def ahead(store: VariableStore) -> AheadCopy:
    return AheadCopy(store, "c", [one.name for one in ALL])


HASHED = HashSpec("ads", (Column("ads", WIDTH), Column("slot", 0, "int32")), 1 << 23)


def hash_ahead(store: VariableStore) -> AheadCopy:
    return AheadCopy(store, "c", ["ads", "slot"])


def add_to_keys(store: VariableStore, keys: list[int]) -> None:
    """A step of training on some keys."""
    entry, array = store.hash_table("c", HASHED), np.array(keys)
    with entry.lock:
        entry.shard.see(array)
        entry.shard.update(array, lambda rows, count: (rows + 1, count + 1))


def check_keys(there: Copied, store: VariableStore) -> None:
    pairs = [s.hash_table("c", HASHED).shard.state() for s in (there.store, store)]
    assert len(pairs[0]["keys"]) > 0
    for name, ours in pairs[0].items():
        np.testing.assert_array_equal(ours, pairs[1][name])


def add_to(store: VariableStore, ids: list[int]) -> None:
    """An update of rows."""
    array = np.array(ids, np.int32)
    rows = RowsOf(TABLE, array, ValueType((len(ids), WIDTH), "float32"))
    store.update([], [], lambda rows: [jnp.asarray(rows) + 1], [rows])


def add_to_all(store: VariableStore) -> None:
    """An update of whole variables."""
    store.update([DENSE, SMALL], [], lambda *values: [v + 1 for v in values])


def test_rows_that_are_written_meanwhile_are_copied_again_and_no_others(
    store: VariableStore,
) -> None:
    copy, there = ahead(store), Copied()
    add_to_all(store)
    for part in copy.parts():
        there.take(part)
    assert copy.remainder == 0
    assert there.nbytes == TABLE.type.nbytes + ROWS * 4  # not what is written whole
    add_to(store, [5, 7])
    assert copy.remainder == 2 * WIDTH * 4
    before = there.nbytes
    for part in copy.rest():
        there.take(part)
    rest = there.nbytes - before
    assert rest == 2 * (WIDTH + 1) * 4 + DENSE.type.nbytes + SMALL.type.nbytes
    there.equals(store)


def test_a_row_is_copied_again_if_it_is_written_after_its_part_was(
    store: VariableStore,
) -> None:
    copy, there = ahead(store), Copied()
    for number, part in enumerate(copy.parts()):
        there.take(part)
        add_to(store, [0, ROWS - 1, number])
    for part in copy.rest():
        there.take(part)
    there.equals(store)


def test_a_variable_that_is_written_whole_meanwhile_is_copied_whole(
    store: VariableStore,
) -> None:
    copy, there = ahead(store), Copied()
    parts = copy.parts()
    there.take(next(parts))
    store.write([TABLE], [jnp.full(TABLE.type.shape, 3.0)])
    for part in parts:
        assert isinstance(part.what, RowsAre)
        assert part.what.name == DENSE.name
        there.take(part)
    add_to(store, [1])
    for part in copy.rest():
        there.take(part)
    there.equals(store)


def test_a_variable_that_was_made_anew_meanwhile_is_copied_whole(
    store: VariableStore,
) -> None:
    copy, there = ahead(store), Copied()
    for part in copy.parts():
        there.take(part)
    store.forget("c", [TABLE.name])
    store.write([TABLE], [jnp.full(TABLE.type.shape, 2.0)])
    for part in copy.rest():
        there.take(part)
    there.equals(store)


def test_parts_are_small_and_nothing_is_marked_when_all_is_over(
    store: VariableStore,
) -> None:
    copy = ahead(store)
    parts = list(copy.parts())
    assert all(part.nbytes <= PART_BYTES * (WIDTH + 1) / WIDTH for part in parts)
    assert len(parts) == 2 * TABLE.type.nbytes // PART_BYTES
    assert all(e.marks is not None for n, e in store.entries("c", ["table"]).items())
    copy.close()
    names = [one.name for one in ALL]
    assert all(entry.marks is None for entry in store.entries("c", names).values())


def test_a_copy_of_what_threads_change_is_what_they_made_of_it(
    store: VariableStore,
) -> None:
    copy, there, ends = ahead(store), Copied(), threading.Event()

    def change(seed: int) -> None:
        chance = np.random.default_rng(seed)
        while not ends.is_set():
            add_to(store, sorted(chance.choice(ROWS, 16, replace=False).tolist()))

    threads = [threading.Thread(target=change, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            for part in copy.parts():
                there.take(part)
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    for part in copy.rest():
        there.take(part)
    there.equals(store)


def test_rows_of_a_hash_table_that_are_written_meanwhile_are_copied_again(
    store: VariableStore,
) -> None:
    add_to_keys(store, list(range(20_000)))
    copy, there = hash_ahead(store), Copied()
    parts = list(copy.parts())
    assert len(parts) > 2
    assert all(part.nbytes <= PART_BYTES for part in parts)
    for part in parts:
        there.take(part)
    assert copy.remainder == 0
    add_to_keys(store, [5, 2**50])
    assert copy.remainder == 2 * store.hash_table("c", HASHED).shard.row_nbytes
    before = there.nbytes
    for part in copy.rest():
        there.take(part)
    assert there.nbytes - before < 2000
    check_keys(there, store)
    copy.close()
    assert store.hash_table("c", HASHED).shard.marks is None


def test_a_hash_table_that_is_made_while_others_are_copied_is_copied_whole(
    store: VariableStore,
) -> None:
    copy, there = hash_ahead(store), Copied()
    assert list(copy.parts()) == []
    add_to_keys(store, [1, 2])
    for part in copy.rest():
        there.take(part)
    check_keys(there, store)


def test_a_hash_table_that_was_made_anew_meanwhile_is_what_it_is_now(
    store: VariableStore,
) -> None:
    add_to_keys(store, list(range(100)))
    copy, there = hash_ahead(store), Copied()
    for part in copy.parts():
        there.take(part)
    store.forget("c", ["ads"])
    add_to_keys(store, [7, 1000])
    for part in copy.rest():
        there.take(part)
    check_keys(there, store)


def test_a_hash_table_moves_beside_others_and_is_forgotten_by_its_name(
    store: VariableStore,
) -> None:
    add_to_keys(store, [1])
    other = replace(HASHED, name="more")
    kept = store.hash_table("there", other).shard
    store.move("c", "there", beside=True)
    names = {shard.spec.name for _, shard in store.hash_tables()}
    assert names == {"ads", "more"}
    assert store.hash_table("there", other).shard is kept
    assert [t.shard.spec.name for t in store.tables_of("there", ["ads"])] == ["ads"]
    assert store.forget("there", ["ads"]) == 1
    assert [container for container, _ in store.hash_tables()] == ["there"]
