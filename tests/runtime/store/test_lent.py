"""Copies of variables in the memory of the original: what changes, and what stays."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jgraph.errors import MalformedMessageError
from jgraph.graph.ir import TaskName
from jgraph.plan.program.nodes import ValueType
from jgraph.plan.program.program import StoredVariable
from jgraph.runtime.store.lent import LEAST_BYTES, LentArray
from jgraph.runtime.store.store import VariableStore
from jgraph.runtime.store.tables import ArrayTable

ROWS = LEAST_BYTES // 8
TYPE = ValueType((ROWS, 2), "float32")
TABLE = StoredVariable("table", TYPE)
COPY = StoredVariable("table", TYPE, container="snapshot")


def a_store(*copies: StoredVariable) -> VariableStore:
    """Returns a store with a table of zeros, and copies that lie in its memory."""
    store = VariableStore(TaskName("/job:ps/task:0"))
    store.write([TABLE], [np.zeros(TYPE.shape, np.float32)])
    for copy in copies:
        store.write([copy], store.read([TABLE]))
    return store


def address(store: VariableStore, container: str = "") -> int:
    (entry,) = store.entries(container, ["table"]).values()
    return int(entry.value.unsafe_buffer_pointer())


def put(store: VariableStore, *rows: int, value: float = 1.0) -> None:
    store.put_rows(TABLE, np.array(rows, np.int32), np.full((len(rows), 2), value))


def test_a_copy_takes_no_memory_and_keeps_rows_that_are_written_after_it() -> None:
    store = a_store(COPY)
    (entry,) = store.entries("snapshot", ["table"]).values()
    assert entry.borrowed is not None
    where = address(store)
    put(store, 0, 7)
    put(store, 7, 8, value=2.0)
    assert address(store) == where, "rows are written in place"
    assert not store.reader(COPY)(0, ROWS).any()
    assert store.read([TABLE])[0][[0, 7, 8], 0].tolist() == [1.0, 2.0, 2.0]
    assert entry.borrowed is not None, "and rows of it were read without a copy"


def test_a_copy_keeps_its_values_when_the_original_is_computed_anew() -> None:
    store = a_store(COPY)
    store.update([TABLE], [], jax.jit(lambda w: [w + 1], donate_argnums=0))
    put(store, 3, value=5.0)
    assert not store.reader(COPY)(0, ROWS).any()
    assert store.read([TABLE])[0][2:5, 0].tolist() == [1.0, 5.0, 1.0]


def test_a_copy_that_is_used_is_one_of_its_own() -> None:
    store = a_store(COPY)
    store.update([COPY], [], jax.jit(lambda w: [w + 3], donate_argnums=0))
    assert store.read([COPY])[0][0, 0] == 3.0
    assert not store.read([TABLE])[0].any()


def test_a_table_that_is_filled_from_files_leaves_the_copy_alone() -> None:
    store = a_store(COPY)

    def ones(places: Sequence[np.ndarray[Any, Any]]) -> None:
        (place,) = places
        place[:] = 1

    store.fill([TABLE], ones)
    assert not store.reader(COPY)(0, ROWS).any()
    assert store.read([TABLE])[0].all()


def test_without_copies_rows_are_kept_no_more() -> None:
    store = a_store(COPY)
    (entry,) = store.entries("", ["table"]).values()
    assert type(entry.rows(write=True)).__name__ == "LentTable"
    store.drop(["snapshot"])
    assert type(entry.rows(write=True)).__name__ == "ArrayTable"


def test_a_second_copy_is_made_while_there_is_one() -> None:
    again = StoredVariable("table", TYPE, container="again")
    store = a_store(COPY, again)
    put(store, 1)
    (second,) = store.entries("again", ["table"]).values()
    assert second.borrowed is None
    assert not store.read([again])[0].any()


def test_small_variables_are_copied() -> None:
    store = VariableStore(TaskName("/job:ps/task:0"))
    small = StoredVariable("table", ValueType((4, 2), "float32"))
    copy = StoredVariable("table", small.type, container="snapshot")
    store.write([small], [np.zeros((4, 2), np.float32)])
    store.write([copy], store.read([small]))
    assert store.entries("snapshot", ["table"])["table"].borrowed is None


def test_a_row_that_is_not_there_is_refused_and_nothing_is_kept() -> None:
    value = jnp.zeros((4, 2))
    lent, table = LentArray(value), ArrayTable(value)
    with pytest.raises(MalformedMessageError, match="rows 1 to 4"):
        lent.update(table, np.array([1, 4]), np.ones((2, 2)))
    lent.update(table, np.array([1]), np.ones((1, 2)))
    assert lent.rows(0, 4).tolist() == np.zeros((4, 2)).tolist()


@given(
    writes=st.lists(
        st.lists(st.integers(0, 39), min_size=1, max_size=12, unique=True), max_size=12
    ),
    cut=st.integers(1, 40),
)
def test_whatever_is_written_the_copy_is_of_before(
    writes: list[list[int]], cut: int
) -> None:
    value = jnp.arange(80.0).reshape(40, 2)
    lent, table = LentArray(value), ArrayTable(value)
    for number, ids in enumerate(writes):
        lent.update(table, np.array(ids), np.full((len(ids), 2), -number, np.float32))
    pieces = [lent.rows(at, min(at + cut, 40)) for at in range(0, 40, cut)]
    assert np.concatenate(pieces).ravel().tolist() == list(range(80))
