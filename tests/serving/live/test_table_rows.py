"""Rows that were looked up are found again, and never those of another id."""

import numpy as np
from hypothesis import given, strategies as st

from jgraph.serving.live.table_rows import RowCache

IDS = st.lists(st.integers(0, 19), unique=True, max_size=6)


@given(places=st.integers(1, 25), puts=st.lists(IDS, max_size=6), asked=IDS)
def test_a_row_is_the_newest_of_its_id_or_is_not_there(
    places: int, puts: list[list[int]], asked: list[int]
) -> None:
    cache = RowCache(20, places, (2,), np.dtype("float32"))
    newest: dict[int, float] = {}
    for number, ids in enumerate(puts):
        cache.put(np.array(ids, int), np.full((len(ids), 2), number, np.float32))
        newest |= dict.fromkeys(ids, float(number))
    rows, found = cache.get(np.array(asked, int))
    for id_, row, there in zip(asked, rows.tolist(), found, strict=True):
        assert row == ([newest[id_]] * 2 if there else [0.0, 0.0])
        if places >= 20:  # of the whole table nothing is forgotten
            assert there == (id_ in newest)
