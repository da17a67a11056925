"""Rows in the memory of arrays, of every dtype that XLA has."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jgraph.errors import MalformedMessageError
from jgraph.graph.ir import TaskName
from jgraph.plan.program.nodes import ValueType
from jgraph.plan.program.program import StoredVariable
from jgraph.runtime.store.entry import RowsOf
from jgraph.runtime.store.store import VariableStore
from jgraph.runtime.store.tables import table_of
from tests.support.dtypes import DTYPES, WIDE

# XLA's CPU cannot hold these.
STORED = [n for n in DTYPES if n not in {"int1", "uint1"} and "float6" not in n]
PACKED = [n for n in STORED if n.endswith(("nt2", "nt4")) or "float4" in n]


def _values(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int) -> Any:
    low = -2 if jnp.issubdtype(dtype, jnp.signedinteger) else 0
    return np.random.default_rng(seed).integers(low, low + 4, shape).astype(dtype)


def _check_same(one: Any, other: Any) -> None:
    # Of a narrow one numpy has bits to spare, which need not be equal.
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(
        one.astype(np.complex128), other.astype(np.complex128)
    )


def _wide(name: str) -> AbstractContextManager[Any]:
    return jax.enable_x64(True) if name in WIDE else nullcontext()


@pytest.mark.combined
@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("width", [(), (3,)])
def test_rows_are_looked_up_and_updated_in_every_dtype(
    name: str, width: tuple[int, ...]
) -> None:
    dtype = DTYPES[name]
    store = VariableStore(TaskName("/job:ps/task:0"))
    w = StoredVariable("w", ValueType((7, *width), name))
    value = _values(dtype, (7, *width), 0)
    store.write([w], [value])
    ids = np.array([6, 0, 3], np.int32)
    rows = RowsOf(w, ids, ValueType((3, *width), name))
    _check_same(store.lookup([rows])[0], value[ids])
    view, new = store.read([w])[0], _values(dtype, (3, *width), 1)
    with _wide(name):
        made = jnp.asarray(new)
    store.update([], [], lambda _: [made], row_updates=[rows])
    _check_same(view, value)
    value[ids] = new
    _check_same(store.read([w])[0], value)
    _check_same(store.lookup([rows])[0], new)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(PACKED),
    rows=st.integers(1, 9),
    width=st.integers(0, 5),
    data=st.data(),
)
def test_packed_rows_change_their_own_bits_only(
    name: str, rows: int, width: int, data: st.DataObject
) -> None:
    dtype = DTYPES[name]
    seed = data.draw(st.integers(0, 99))
    ids = data.draw(st.lists(st.integers(0, rows - 1), unique=True, max_size=rows))
    value = _values(dtype, (rows, width), seed)
    array = jnp.array(value, copy=True)
    table, new = table_of(array), _values(dtype, (len(ids), width), seed + 1)
    table.update(np.array(ids, np.int32), new)
    value[ids] = new
    _check_same(np.asarray(array), value)
    out = np.empty((rows, width), dtype)
    table.lookup(np.arange(rows), out)
    _check_same(out, value)


@pytest.mark.parametrize("name", ["int4", "float32"])
def test_row_that_is_not_there_is_refused_and_nothing_changes(name: str) -> None:
    array = jnp.ones((3, 2), name)
    table = table_of(array)
    for row in (-1, 3):
        with pytest.raises(MalformedMessageError, match="of a table of 3 rows"):
            table.update(np.array([0, row]), np.zeros((2, 2), array.dtype))
    assert np.asarray(array).tolist() == np.ones((3, 2)).tolist()
