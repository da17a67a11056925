"""Records of changes as frames, and back."""

import numpy as np
import pytest

from jgraph.errors import MalformedMessageError
from jgraph.graph.rows.hash_spec import Column, HashSpec
from jgraph.plan.program.replay import KeyedRowsAre, NodeRan, Record, RowsAre, What
from jgraph.rpc.wire.record_codec import record_from, record_to

SPEC = HashSpec("ads", (Column("rows", 2),), 1 << 16)
IDS, ROWS = np.arange(3, dtype=np.int32), np.ones((3, 2), np.float32)


@pytest.mark.parametrize(
    ("what", "arrays"),
    [
        ("w", [ROWS]),
        (RowsAre("w", 9), [IDS, ROWS]),
        (SPEC, [IDS.astype(np.int64), ROWS]),
        (KeyedRowsAre(SPEC, ends=False), [IDS, ROWS]),
        (KeyedRowsAre(SPEC, ends=True), [IDS]),
        (NodeRan(1, 2), []),
    ],
)
def test_a_record_is_the_same_on_the_other_side(
    what: What, arrays: list[np.ndarray]
) -> None:
    found = record_from(record_to("stream", Record(7, what, arrays, 3)))
    assert (found.number, found.what, found.version) == (7, what, 3)
    for ours, theirs in zip(found.arrays, arrays, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_rows_without_an_id_for_each_are_refused() -> None:
    wrong = record_to("stream", Record(1, RowsAre("w", 9), [IDS[:2], ROWS]))
    with pytest.raises(MalformedMessageError, match="a record of rows"):
        record_from(wrong)
