"""Lists of record batches as bytes, and read again, without a JVM."""

import sys
from typing import Any

import numpy as np
import pytest

from jgraph.runtime.data.packed_lists import unpacked
from jgraph.train.spark.list_packing import lacking, packer

pa = pytest.importorskip("pyarrow", reason="needs jgraph[data]")

TYPES = ["int16", "int32", "int64", "float32", "float64"]


def packed(rows: Any, dtype: str = "float32", first: int = 0) -> Any:
    """Returns a column of lists, from a row on, as Spark's Python packs it."""
    kind = pa.list_(pa.from_numpy_dtype(np.dtype(dtype)))
    batch = pa.record_batch({"x": pa.array(rows, kind), "y": pa.nulls(len(rows))})
    width = np.dtype(dtype).itemsize
    (done,) = packer([width, 0])(iter([batch.slice(first)]))
    assert done.column("y").equals(batch.slice(first).column("y"))
    return done.column("x")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("first", [0, 3])
def test_lists_are_what_they_were_once_they_are_unpacked(
    dtype: str, first: int
) -> None:
    rows = np.random.default_rng(0).integers(-100, 100, (7, 5)).astype(dtype)
    column = packed(rows.tolist(), dtype, first)
    assert column.type == pa.binary()
    found = unpacked(column, np.dtype(dtype))
    assert found is not None
    np.testing.assert_array_equal(found, rows[first:])


def test_part_of_a_column_is_unpacked_from_its_own_first_row_on() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    found = unpacked(packed(rows.tolist())[2:5], rows.dtype)
    np.testing.assert_array_equal(found, rows[2:5])


@pytest.mark.parametrize(
    ("rows", "nbytes"),
    [
        ([[1, 2], None, [3, 4]], [8, None, 8]),
        ([[1, 2], [3, None], None, []], [8, 1, None, 0]),
        ([[], []], [0, 0]),
        ([[1, 2], [3]], [8, 4]),
    ],
)
def test_a_list_that_is_missing_or_has_a_hole_shows_in_its_bytes(
    rows: Any, nbytes: Any
) -> None:
    column = packed(rows)
    assert [None if x is None else len(x) for x in column.to_pylist()] == nbytes


def test_a_python_says_which_package_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark", reason="needs jgraph[spark]")
    assert not lacking()(0)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "PyArrow >= " in lacking()(0)


def test_a_batch_without_rows_is_packed_as_one() -> None:
    assert packed([]).to_pylist() == []


@pytest.mark.parametrize("rows", [[b"1234", b"12345678"], [b"123", b"123"], [b"", b""]])
def test_bytes_that_are_no_lists_of_one_length_are_not_unpacked(rows: Any) -> None:
    assert unpacked(pa.array(rows, pa.binary()), np.dtype("float32")) is None
