"""Plots of metrics."""

import numpy as np

from jgraph.train.run.plot import _smooth


def test_one_value_that_is_huge_or_no_number_ends_no_running_mean() -> None:
    for odd in (1e30, np.nan, np.inf):
        values = np.ones(100)
        values[10] = odd
        smooth = _smooth(values)
        assert (smooth[:10] == 1).all()
        assert (smooth[35:] == 1).all()


def test_a_running_mean_is_shorter_at_the_beginning() -> None:
    assert _smooth(np.array([1.0, 3.0, 5.0])).tolist() == [1.0, 2.0, 3.0]
    assert _smooth(np.zeros(0)).tolist() == []
