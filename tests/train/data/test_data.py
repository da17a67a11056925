"""What users give as data: every mistake is named at once."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from jgraph.errors import DataError
from jgraph.train.data.data import as_dataset

X = np.zeros((6, 2), np.float32)
Y = np.arange(6, dtype=np.int32)


class NoExamples:
    def __len__(self) -> int:
        return 0

    def __getitem__(self, row: int) -> Any:
        raise IndexError(row)


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ((X, Y), ["data[0]", "data[1]"]),
        ([X, Y], ["data[0]", "data[1]"]),
        ({"image": X, "label": Y}, ["data['image']", "data['label']"]),
        ({"in": (X, X), "out": Y}, ["data['in'][0]", "data['in'][1]", "data['out']"]),
        ((X, None), ["data[0]"]),
        (X, ["data"]),
        (jnp.asarray(X), ["data"]),
    ],
)
def test_fields_go_by_the_users_names(data: Any, names: list[str]) -> None:
    dataset = as_dataset(data)
    assert list(dataset.fields) == names
    assert len(dataset) == 6
    _, batch = next(dataset.batches(3))
    jax.tree.map(lambda a, b: None, batch, data)  # raises if structures differ


NESTED = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(12.0)), 2)


@pytest.mark.parametrize(
    ("column", "shape"),
    [
        (pa.table({"a": [1.5, 2.5], "b": [1, 2]}), (2, 2)),
        (pa.table({"x": NESTED})["x"], (6, 2)),
        (NESTED, (6, 2)),
        (pd.Series([np.zeros(3), np.ones(3)]), (2, 3)),
    ],
)
def test_columns_of_arrow_and_of_arrays_are_arrays(
    column: Any, shape: tuple[int, ...]
) -> None:
    (array,) = as_dataset((column,)).fields.values()
    assert (array.shape, array.dtype) == (shape, np.float32)


@pytest.mark.parametrize(
    "column", [pa.array([1.5, None]), pd.array([1.5, None], "Float64")]
)
def test_a_null_among_fractions_is_nan(column: Any) -> None:
    (array,) = as_dataset((column,), finite=False).fields.values()
    np.testing.assert_array_equal(array, np.array([1.5, np.nan], np.float32))


def test_record_batches_in_a_list_are_the_rows_of_a_table() -> None:
    table = pa.table({"a": [1.5, 2.5, 3.5], "b": [1, 2, 3]})
    batches = table.to_batches(max_chunksize=1)
    for data in (batches, (batches,), {"x": batches}):
        (array,) = as_dataset(data).fields.values()
        np.testing.assert_array_equal(array, table)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X, Y[:5]), r"'data\[1\]' has 5 examples and 'data\[0\]' has 6"),
        ((X[:0], Y[:0]), r"'data\[0\]' has no examples"),
        ({}, "no field"),
        ("train.csv", r"data is the text 'train\.csv'; .* jg\.Source\.npz"),
        (3, r"data is a int; give arrays, .* jg\.Source .* __getitem__.* iterable"),
        (NoExamples(), "data, a NoExamples, has no examples"),
        (iter([None]), "the first element of data is None, not arrays"),
        (iter([(X, {1})]), r"data\[1\] is a set, not an array"),
        (iter([]), "data is a list_iterator without an element"),
        ({"x": X, "y": 3.0}, r"data\['y'\] is a single value, 3\.0; .* np\.full"),
        ((X, {1, 2}), r"data\[1\] is a set, not an array; give"),
        (({}, {}), "no field"),
        ({"x": np.array(["a", "b"])}, r"data\['x'\] has dtype <U1"),
        (pd.DataFrame({"a": [1], "b": ["x"]}), "no numbers: 'b'; give columns by name"),
        (pa.table({"a": [1], "b": ["x"]}), "no numbers: 'b'; give columns by name"),
        (
            pa.table({"a": [1]}).to_batches() + pa.table({"b": [1]}).to_batches(),
            "data is a list of record batches that make no table together: Schema at",
        ),
        ((pd.Series([X[0], X[0, :1]]),), r"the shapes \(1,\) and \(\d,\); pad them to"),
        ({"x": np.array([None, 1])}, r"data\['x'\] has 1 null, and only fractions"),
        ({"x": pa.array([1, None])}, r"data\['x'\] has 1 null, and only fractions"),
        ({"x": pa.array([[1], [None]])}, r"data\['x'\] has 1 null, and only"),
        ({"x": pd.array([1, None], "Int64")}, r"data\['x'\] has 1 null, and only"),
        (pa.table({"a": [None, True]}), "column 'a' of data has 1 null, and only"),
        (pd.DataFrame({"a": pd.array([None, 1], "Int8")}), "column 'a' of data has 1"),
        (([[1, 2], [3]],), r"data\[0\] is not an array"),
        (
            (np.zeros(6, np.longdouble),),
            r"data\[0\] has dtype (float128|longdouble|float96)",
        ),
        ((np.zeros(6, "m8[s]"),), r"data\[0\] has dtype timedelta64\[s\], which XLA"),
        (
            pd.DataFrame({"a": [True], "b": [0.5]}),
            r"in common: df\.astype\('float32'\)",
        ),
        ((np.zeros(6, "V4"),), r"data\[0\] has dtype \|V4, which XLA does not know"),
        ((np.ma.masked_less(Y, 3),), r"data\[0\] has 3 masked values; .*\.filled"),
        (
            (jax.random.split(jax.random.key(0), 6),),
            r"data\[0\] .* jax\.random\.key_data",
        ),
        ((X, np.array([2**40] * 6)), r"data\[1\] has values .* too large for JAX's"),
    ],
)
def test_data_that_cannot_be_used_is_refused_by_name(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        as_dataset(data)
    assert caught.value.code == "JG-214"


def test_whole_numbers_of_a_table_are_not_rounded_among_fractions() -> None:
    table = pd.DataFrame({"x": [0.5, 1.0], "age": [30, 40], "id": [2**24 + 1, 3]})
    with pytest.raises(DataError, match=r"float32.*numbers of 'id'.*df\['id'\]"):
        as_dataset(table)
    small = as_dataset(table[["x", "age"]]).batches(2)
    np.testing.assert_array_equal(next(small)[1], [[0.5, 30], [1, 40]])
    by_name = as_dataset({"x": table[["x", "age"]], "id": table["id"]}).avals(2)
    assert by_name["id"].dtype == np.int32


def test_nan_is_refused_when_asked_to_check() -> None:
    x = X.copy()
    x[4, 1] = np.nan
    as_dataset((x, Y))
    with pytest.raises(DataError, match=r"data\[0\] contains NaN .* example 4"):
        as_dataset((x, Y), finite=True)
    z = X.astype(np.complex64)
    z[2, 0] = complex(1.0, np.nan)
    with pytest.raises(DataError, match=r"data\[0\] contains NaN .* example 2"):
        as_dataset((z, Y), finite=True)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (np.float64, np.float32),
        (np.int64, np.int32),
        (np.uint8, np.uint8),
        (np.bool_, np.bool_),
        (np.float16, np.float16),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    ],
)
def test_dtypes_become_what_jax_makes_of_them(given: Any, wanted: Any) -> None:
    dataset = as_dataset((np.zeros(3, given),))
    assert dataset.fields["data[0]"].dtype == wanted
    assert dataset.avals(2)[0].dtype == wanted


def test_batches_for_evaluation_cover_the_data_in_order() -> None:
    found = list(as_dataset((np.arange(5),)).batches(2))
    assert [count for count, _ in found] == [2, 2, 1]
    assert np.concatenate([x for _, (x,) in found]).tolist() == [0, 1, 2, 3, 4]


GIVEN = np.arange(36, dtype=np.float32).reshape(6, 2, 3)
LAID_OUT = {
    "in Fortran's order": np.asfortranarray(GIVEN),
    "with its axes in another order": np.moveaxis(
        np.moveaxis(GIVEN, 1, 0).copy(), 0, 1
    ),
    "every second row": np.repeat(GIVEN, 2, axis=0)[::2],
    "from its end": GIVEN[::-1].copy()[::-1],
    "of the other byte order": GIVEN.astype(GIVEN.dtype.newbyteorder()),
    "without a masked value": np.ma.masked_array(GIVEN),
    "read-only": np.broadcast_to(GIVEN, GIVEN.shape),
    "of a file": np.frombuffer(GIVEN.tobytes(), np.float32).reshape(GIVEN.shape),
}


@pytest.mark.parametrize("how", LAID_OUT)
def test_an_array_is_the_same_data_however_it_lies_in_memory(how: str) -> None:
    data, plain = as_dataset((LAID_OUT[how], Y)), as_dataset((GIVEN, Y))
    assert data.digest() == plain.digest()
    assert data.plan(2, seed=0).to_dict() == plain.plan(2, seed=0).to_dict()
    rows = np.array([4, 1])
    given = data.reader().read(0, rows)["data[0]"]
    assert given.dtype == np.float32
    assert given.tolist() == GIVEN[rows].tolist()


def test_a_part_of_the_data_may_have_no_field() -> None:
    data = as_dataset({"none": {}, "x": X})
    assert data.first == "data['x']"
    assert data.avals(2)["none"] == {}
