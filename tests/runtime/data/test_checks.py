"""Data that cannot be used is refused by name."""

import pytest

from jgraph.errors import DataError
from jgraph.runtime.data.batches import check_batch_size, check_lengths


@pytest.mark.parametrize("batch_size", [0, -1, 5])
def test_batch_size_that_the_data_cannot_fill_is_refused(batch_size: int) -> None:
    with pytest.raises(DataError, match=f"batch_size is {batch_size}"):
        check_batch_size(batch_size, 4)


def test_fields_of_different_lengths_are_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"'y' has 3 examples and 'x' has 4"):
        check_lengths({"x": 4, "y": 3})


@pytest.mark.parametrize(("lengths", "message"), [({}, "no field"), ({"x": 0}, "'x'")])
def test_no_data_is_refused(lengths: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_lengths(lengths)
