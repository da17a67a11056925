"""Examples gathered from pieces: in the order asked for, whatever the pieces are."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from jgraph.runtime.data.gathering import Piece, gathered, joined, part_of, size_of

FIELDS: dict[str, Any] = {
    "numbers": np.arange(60, dtype=np.int64) - 30,
    "rows": np.arange(60 * 6, dtype=np.float32).reshape(60, 2, 3),
    "flags": np.arange(60) % 3 == 0,
    "none": np.zeros((60, 0), np.float32),
}


def pieces_of(ends: list[int]) -> list[Piece]:
    """Returns the fields from example 10 on, cut before these."""
    cut = [0, *sorted(set(ends)), 60]
    return [
        Piece(10 + a, {name: array[a:b] for name, array in FIELDS.items()})
        for a, b in pairwise(cut)
    ]


ENDS = st.lists(st.integers(1, 59), max_size=5)


@given(ENDS, st.lists(st.integers(10, 69), min_size=1, max_size=80), st.booleans())
def test_examples_are_those_asked_for(
    ends: list[int], chosen: list[int], is_backwards: bool
) -> None:
    pieces = pieces_of(ends)
    if is_backwards:  # pieces come in any order
        pieces.reverse()
    rows = np.array(chosen)
    found = gathered(pieces, rows)
    for name, array in FIELDS.items():
        np.testing.assert_array_equal(found[name], array[rows - 10])
        assert found[name].dtype == array.dtype


@given(ENDS, st.integers(10, 68), st.integers(1, 59), st.randoms())
def test_a_range_of_examples_is_gathered_in_any_order(
    ends: list[int], first: int, count: int, random: Any
) -> None:
    chosen = list(range(first, min(first + count, 70)))
    random.shuffle(chosen)
    found = gathered(pieces_of(ends), np.array(chosen))
    for name, array in FIELDS.items():
        np.testing.assert_array_equal(found[name], array[np.array(chosen) - 10])


@given(ENDS, st.integers(0, 80), st.integers(0, 80))
def test_a_part_of_pieces_has_its_examples_where_they_lie(
    ends: list[int], first: int, end: int
) -> None:
    pieces = pieces_of(ends)
    part = part_of(pieces, first, end)
    numbers = [n for piece in part for n in range(piece.first, piece.end)]
    assert numbers == list(range(max(first, 10), min(end, 70)))
    if part:
        low, high = numbers[0] - 10, numbers[-1] - 9
        np.testing.assert_array_equal(joined(part)["rows"], FIELDS["rows"][low:high])
        assert size_of(part) == (high - low) * (8 + 24 + 1)
    for piece in part:
        assert np.shares_memory(piece.arrays["rows"], FIELDS["rows"])


@pytest.mark.parametrize("ends", [[], [20]])
def test_what_is_gathered_is_a_copy(ends: list[int]) -> None:
    found = gathered(pieces_of(ends), np.arange(25, 35))
    assert not np.shares_memory(found["rows"], FIELDS["rows"])
