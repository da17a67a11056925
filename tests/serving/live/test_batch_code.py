"""Ids of a batch are put in order, whether they are inputs or were computed."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from jgraph.graph.rows.rows import Layout
from jgraph.serving.live.batch_code import FEW, BatchIds, LookedUp
from jgraph.serving.live.table_rows import split_ids

ROWS = 40
SIZES = st.sampled_from([1, 3, FEW, FEW + 1, 200])


def table(count: int, inputs: tuple[int, ...] = ()) -> LookedUp:
    return LookedUp("t", "user", ROWS, count, False, (2,), "float32", inputs)


@given(
    count=SIZES,
    seed=st.integers(0, 9),
    beyond=st.booleans(),
    dtype=st.sampled_from(["int8", "int32", "int64", "uint16"]),
)
def test_ids_that_are_inputs_are_what_code_would_say_of_them(
    count: int, seed: int, beyond: bool, dtype: str
) -> None:
    ids = np.random.default_rng(seed).integers(0, ROWS, count).astype(dtype)
    if beyond:
        ids[0] = ROWS if dtype.startswith("u") else -1
    told = BatchIds.of(ids.astype(np.int32), table(count))
    found = BatchIds.fed([ids.reshape(-1, 1)], table(count, (0,)))
    if beyond:
        assert found is None
        assert told.bad.tolist() == ids[:1].tolist()
        assert told.positions[0] == count
        return
    assert found is not None
    assert found.unique.dtype == found.positions.dtype == np.int32
    assert found.unique.tolist() == told.unique.tolist() == sorted({*ids.tolist()})
    assert found.positions.tolist() == told.positions.tolist()
    assert found.unique[found.positions].tolist() == ids.tolist()
    assert not len(found.bad)


def test_ids_of_several_inputs_are_one_after_the_other() -> None:
    inputs = [np.array([7, 5]), np.zeros(2, np.float32), np.array([[5, 9]])]
    found = BatchIds.fed(inputs, table(4, (2, 0)))
    assert found is not None
    assert found.unique[found.positions].tolist() == [5, 9, 7, 5]


def test_inputs_of_another_size_are_left_to_the_code() -> None:
    assert BatchIds.fed([np.array([1, 2])], table(3, (0,))) is None


@pytest.mark.parametrize("layout", [Layout((ROWS,)), Layout((15, 0, 20, 5))])
@given(ids=st.lists(st.integers(0, ROWS - 1), unique=True, max_size=9).map(sorted))
def test_each_id_is_asked_for_at_the_shard_that_has_it(
    layout: Layout, ids: list[int]
) -> None:
    begin, seen = 0, []
    for size, (places, rows) in zip(
        layout.sizes, split_ids(layout, np.array(ids, np.int32)), strict=True
    ):
        assert [ids[place] for place in places] == (rows + begin).tolist()
        assert ((rows >= 0) & (rows < size)).all()
        seen += places.tolist()
        begin += size
    assert sorted(seen) == list(range(len(ids)))
