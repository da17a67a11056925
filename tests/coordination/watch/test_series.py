"""Series: however long they go on, they are short, and no extreme is lost."""

from hypothesis import given, strategies as st

from jgraph.coordination.watch.histogram import BOUNDS_S, Histogram, quantile
from jgraph.coordination.watch.rates import Window, grown
from jgraph.coordination.watch.series import Series

VALUES = st.floats(-1e6, 1e6)


@given(st.lists(VALUES, min_size=1, max_size=400), st.integers(2, 30))
def test_a_series_keeps_its_extremes_its_mean_and_its_bound(
    values: list[float], most: int
) -> None:
    series = Series(most)
    for x, value in enumerate(values):
        series.add(x, value)
        assert len(series) <= most
    columns = series.columns()
    assert series.fall is not None
    assert min(columns["min"]) == min(values) == series.fall[1]
    assert max(columns["max"]) == max(values)
    assert columns["x"] == sorted(set(columns["x"]))
    assert columns["x"][-1] == len(values) - 1
    each = zip(columns["min"], columns["mean"], columns["max"], strict=True)
    assert all(low - 1e-6 <= mean <= high + 1e-6 for low, mean, high in each)


def test_points_are_means_of_equally_many_values() -> None:
    series = Series(most=4)
    for x in range(8):
        series.add(x, float(x))
    assert series.columns()["x"] == [1, 3, 5, 7]
    assert series.columns()["mean"] == [0.5, 2.5, 4.5, 6.5]


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    series = Series()
    for x, value in enumerate((1.0, float("nan"), float("inf"), 2.0)):
        series.add(x, value)
    assert (series.columns()["mean"], series.odd) == ([1.0, 2.0], 2)


def test_a_run_that_goes_back_has_no_points_after_that_step() -> None:
    series = Series()
    for x in range(10):
        series.add(x, float(x))
    series.cut(4)
    series.add(5, 50.0)
    assert series.columns()["mean"] == [0.0, 1.0, 2.0, 3.0, 4.0, 50.0]


def test_a_counter_that_fell_began_anew() -> None:
    assert grown({"a": 100.0}, {"a": 6.0}, 2.0) == {"a": 3.0}
    assert grown({"a": 100.0}, {"a": 106.0}, 0.0) == {}
    window = Window(60)
    window.add(0, {"n": 100})
    window.add(1, {"n": 3})
    assert window.sums() == {}
    window.add(2, {"n": 5})
    assert window.sums() == {"n": 2}


@given(st.lists(st.floats(0.0001, 9.0), min_size=5, max_size=200))
def test_quantiles_are_within_the_bucket_of_the_true_one(seconds: list[float]) -> None:
    histogram = Histogram()
    for one in seconds:
        histogram.add(one)
    found = quantile(histogram.buckets, 0.5)
    assert found is not None
    true = sorted(seconds)[(len(seconds) - 1) // 2]
    bound = next(bound for bound in BOUNDS_S if true <= bound)
    assert found <= bound + 1e-9


def test_of_nothing_there_is_no_quantile() -> None:
    assert quantile([0] * 13, 0.5) is None
    assert quantile([0] * 12 + [5], 0.99) == BOUNDS_S[-1]
