"""Clocks of other machines are known as far as the bounds say, and no further."""

import pytest
from hypothesis import given, strategies as st

from jgraph.coordination.timeline.clocks import ClockFit, RoundTrip, fit, offsets


def trip(at_s: float, there: ClockFit, out_s: float, back_s: float) -> RoundTrip:
    """A question at a time, to a clock, which takes this long out and back."""

    def told(moment: float) -> float:
        return moment + there.offset_s + there.drift * (moment - there.at_s)

    arrived = at_s + out_s
    return RoundTrip(at_s, told(arrived), told(arrived + 1e-4), arrived + 1e-4 + back_s)


delays = st.floats(1e-5, 2e-3)


@given(
    offset_s=st.floats(-1e5, 1e5),
    drift=st.floats(-1e-4, 1e-4),
    ways=st.lists(st.tuples(delays, delays), min_size=1, max_size=60),
)
def test_a_time_of_another_clock_is_told_within_the_error(
    offset_s: float, drift: float, ways: list[tuple[float, float]]
) -> None:
    there = ClockFit(offset_s, 0.0, 0.0, drift)
    trips = [trip(0.25 * n, there, *way) for n, way in enumerate(ways)]
    found = fit(trips)
    assert found is not None
    for moment in (0.0, 0.25 * (len(ways) - 1)):
        told = moment + offset_s + drift * moment
        # That a float has no more digits is 1e-9 of it, at most.
        assert abs(found.here(told) - moment) <= found.error_s * 1.001 + 2e-8
    earlier = fit(trips, since_s=-30.0)
    assert earlier is not None
    told = -30.0 + offset_s - drift * 30.0
    assert abs(earlier.here(told) + 30.0) <= earlier.error_s * 1.001 + 2e-8


def test_many_fast_answers_tell_the_drift_and_leave_little_doubt() -> None:
    there = ClockFit(5000.0, 0.0, 0.0, 100e-6)
    ways = [(1e-4 + 1e-5 * (n % 7), 1e-4 + 1e-5 * (n % 5)) for n in range(40)]
    found = fit(trip(0.25 * n, there, *way) for n, way in enumerate(ways))
    assert found is not None
    assert found.drift == pytest.approx(100e-6, abs=3e-5)
    assert found.error_s < 2.5e-4


def test_a_clock_that_jumps_has_an_error_as_large_as_the_jump() -> None:
    before, after = ClockFit(0.0, 0.0), ClockFit(1.0, 0.0)
    trips = [trip(0.1 * n, before, 1e-4, 1e-4) for n in range(10)]
    trips += [trip(1 + 0.1 * n, after, 1e-4, 1e-4) for n in range(10)]
    found = fit(trips)
    assert found is not None
    assert found.error_s > 0.4


def test_trips_that_cannot_be_are_left_out() -> None:
    backwards = RoundTrip(1.0, 100.0, 100.0, 0.5)
    no_number = RoundTrip(1.0, float("nan"), 100.0, 1.5)
    assert fit([backwards, no_number]) is None
    good = RoundTrip(1.0, 101.25, 101.25, 1.5)
    assert fit([backwards, good]) == fit([good])


def test_the_tightest_bound_may_lead_over_a_third_clock() -> None:
    bounds = {
        ("a", "b"): 10.5,
        ("b", "a"): -9.5,
        ("b", "c"): 1.25,
        ("c", "b"): -0.75,
        ("a", "c"): 100.0,
        ("c", "a"): 100.0,
    }
    found = offsets(bounds, ["a", "b", "c"], "a")
    assert found["c"] == (11.0, 0.75)
    assert offsets({}, ["a", "b"], "a")["b"] == (0.0, 0.0)
