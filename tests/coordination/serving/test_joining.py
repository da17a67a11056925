"""Requests are put together where a row costs less so, and where others ask."""

import pytest
from hypothesis import given, strategies as st

from jgraph.coordination.serving.batching import Limits
from jgraph.coordination.serving.joining import (
    LATEST,
    LONELY,
    LOOK_EVERY,
    SHORT_S,
    WORTH_S,
    Joining,
)


def joining(took_s: dict[int, float], limits: Limits | None = None) -> Joining:
    found = Joining(limits or Limits())
    for rows, seconds in took_s.items():
        found.took(rows, seconds)
    return found


@pytest.mark.parametrize(
    ("took_s", "at_once"),
    [
        ({1: 3e-5, 64: 4e-5}, True),  # a small one
        ({1: 3e-4, 64: 3.1e-4}, False),  # 64 rows take as long as one
        ({1: 1.1e-3, 64: 3.7e-3}, False),
        ({1: 1.1e-3, 64: 64 * 1.05e-3}, True),  # nothing is saved
        ({1: 1.1e-3}, True),  # nobody can join
        ({1: SHORT_S, 64: 64 * SHORT_S}, False),  # nothing saved, and the loop held up
        ({}, False),  # nobody knows
    ],
)
def test_what_costs_less_together_waits_for_others_however_short_it_is(
    took_s: dict[int, float], at_once: bool
) -> None:
    one = joining(took_s)
    one.ran_aside(had_company=True)
    assert one.runs_at_once(1) is at_once
    assert one.runs_some_at_once is at_once
    assert one.runs_here(1) is at_once


def test_requests_that_may_not_run_together_run_at_once() -> None:
    one = joining({1: 1e-3, 64: 1.1e-3}, Limits(merges=False))
    one.ran_aside(had_company=True)
    assert one.runs_at_once(1)
    assert one.runs_at_once(64)


def test_one_caller_alone_is_answered_at_once_but_for_a_look_now_and_then() -> None:
    one = joining({1: 1e-3, 64: 1.1e-3})
    for _ in range(3):
        assert not one.runs_at_once(1)
        one.ran_aside(had_company=False)
        for _ in range(LOOK_EVERY):
            assert one.runs_at_once(1)
            one.ran_at_once()
    assert not one.runs_at_once(1)
    one.ran_aside(had_company=True)
    for _ in range(LONELY):
        assert not one.runs_at_once(1)
        one.ran_aside(had_company=False)
    assert one.runs_at_once(1)


def test_an_execution_that_was_held_up_changes_nothing_and_many_do() -> None:
    one = joining({1: 3e-5, 64: 4e-5})
    for _ in range(LATEST - 1):
        one.took(1, 0.05)
        assert one.runs_at_once(1)
    one.took(1, 0.05)
    assert not one.runs_at_once(1)
    one.took(1, 3e-5)
    assert one.runs_at_once(1)


@given(
    took_s=st.dictionaries(
        st.sampled_from(Limits().buckets), st.floats(1e-6, 0.1), min_size=1
    )
)
def test_no_row_saves_more_than_it_costs_and_what_is_small_never_waits(
    took_s: dict[int, float],
) -> None:
    one = joining(took_s)
    assert 0 <= one.saved_s <= took_s.get(1, 0)
    if took_s.get(1, SHORT_S) < WORTH_S:
        assert one.runs_at_once(1)
