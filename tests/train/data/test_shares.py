"""Batches of an iterable by their numbers, whoever asks first."""

import threading
from typing import Any

import pytest
from hypothesis import given, strategies as st

from jgraph.train.data.shares import Shares


def batches(count: int) -> Any:
    numbers = iter(range(count))

    def take() -> Any:
        number = next(numbers, None)
        if number is None:
            raise EOFError
        return {"number": number}

    return take


@given(
    numbers=st.permutations(range(9)),
    due=st.sets(st.integers(0, 20), max_size=4),
    count=st.integers(0, 12),
)
def test_a_number_has_its_batch_in_whatever_order_they_are_asked_for(
    numbers: list[int], due: set[int], count: int
) -> None:
    end = 21
    due_first = sorted(due)
    order = [*due_first, *range(end, end + 9)]
    shares = Shares(batches(count), due_first, end)
    for place in (n for n in numbers if n < len(order)):
        if place < count:
            assert shares.read(order[place]) == {"number": place}
        else:
            with pytest.raises(EOFError):
                shares.read(order[place])


def test_a_number_that_was_given_has_the_next_batch() -> None:
    shares = Shares(batches(4), [], 0)
    assert [shares.read(n)["number"] for n in (1, 1, 0, 2)] == [1, 2, 0, 3]


def test_a_kept_batch_is_there_while_another_one_is_waited_for() -> None:
    numbers, more = iter(range(2)), threading.Event()
    waits = threading.Event()

    def take() -> Any:
        if (number := next(numbers, None)) is None:
            waits.set()
            more.wait()
            raise EOFError
        return {"number": number}

    shares = Shares(take, [], 0)

    def ask() -> None:
        with pytest.raises(EOFError):
            shares.read(2)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        waits.wait()
        assert [shares.read(n)["number"] for n in (1, 0)] == [1, 0]
    finally:
        more.set()
        asking.join()
