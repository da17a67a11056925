"""Lookups take their share of a parameter server's time, whatever is asked."""

import pytest
from hypothesis import given, strategies as st

from jgraph.coordination.serving.lookup_share import LookupShare
from jgraph.errors import ConfigError

SECONDS = st.floats(0.0, 1.0)


@given(
    most=st.floats(0.05, 1.0), asked=st.lists(st.tuples(SECONDS, SECONDS), min_size=1)
)
def test_lookups_take_no_more_than_their_share_and_a_burst(
    most: float, asked: list[tuple[float, float]]
) -> None:
    share, now, spent, longest = LookupShare(most, burst_s=0.1), 0.0, 0.0, 0.0
    for pause, took in asked:
        now += pause
        now += share.wait_s(now)
        assert share.wait_s(now) < 1e-6  # who has waited may begin
        assert spent <= most * now + 0.1 + longest + 1e-6
        now += took
        share.took(took, now)
        spent, longest = spent + took, max(longest, took)


def test_a_lookup_after_a_long_silence_never_waits() -> None:
    share = LookupShare(0.1)
    share.took(5.0, now=5.0)
    assert share.wait_s(now=5.0) > 10
    assert share.wait_s(now=60.0) == 0.0


@pytest.mark.parametrize("most", [0, -1, 1.5, float("nan")])
def test_a_share_is_a_part_of_the_time(most: float) -> None:
    with pytest.raises(ConfigError, match="max_share"):
        LookupShare(most)
