"""What probes tell, on a machine that does other work meanwhile."""

import pytest
from hypothesis import given, strategies as st

from jgraph.coordination.probes import Seen, alike, bandwidth
from jgraph.graph.ir import TaskName

MOST, NBYTES = 2e10, 1 << 22
NOISE = st.lists(st.floats(0, 0.5), min_size=3, max_size=8)


@given(NOISE, NOISE, st.floats(1e-6, 1e-2), st.floats(1e6, 1e10))
def test_other_work_never_makes_a_link_absurdly_fast(
    small: list[float], large: list[float], latency_s: float, true: float
) -> None:
    found = bandwidth(
        [latency_s + s for s in small],
        [latency_s + NBYTES / true + s for s in large],
        NBYTES,
        MOST,
    )
    assert 0 < found <= MOST
    # Ten times as fast, where the small messages were held up more than the large ones.
    held_up_s = min(small) - min(large)
    if held_up_s <= 0:
        assert found <= true * (1 + 1e-6)
    else:
        assert found <= 10 * NBYTES / (latency_s + NBYTES / true + min(large)) + 1


def test_a_link_is_measured_by_the_moments_without_other_work() -> None:
    small, large = [0.2, 0.001, 0.4], [0.5, 0.9, 0.003]
    assert bandwidth(small, large, 2000, MOST) == pytest.approx(1e6)


def test_no_link_is_faster_than_memory() -> None:
    assert bandwidth([0.0], [1e-9], NBYTES, MOST) == MOST
    assert bandwidth([0.0], [0.0], NBYTES, MOST) == MOST


def took(seconds: float) -> Seen:
    return Seen(seconds, seconds, seconds, seconds, idle=1e-4)


def test_tasks_of_a_host_are_alike_unless_one_takes_half_as_long_again() -> None:
    names = [TaskName(f"/job:worker/task:{n}") for n in range(4)]
    times = dict(zip(names, map(took, (1.0, 1.4, 2.0, 4.0)), strict=True))
    found = [[other.products for other in alike(times, name)] for name in names]
    assert found == [[1.0, 1.4], [1.0, 1.4, 2.0], [1.4, 2.0], [4.0]]
