"""The search for how many workers pay ends near the best, after a few acts."""

from collections.abc import Callable

from hypothesis import given, strategies as st

from jgraph.coordination.run.autoscale import AutoScaler, RunSample, ScaleRules


def acts(
    rate: Callable[[int], float], least: int, most: int, begins: int
) -> tuple[list[int], int]:
    """Returns what a machine asks for until it rests, and the workers then."""
    machine, now, asked = AutoScaler(least, most, ScaleRules(pause_s=0)), begins, []
    for time_s in range(40):
        act = machine.handle(RunSample(time_s, now, rate(now)))
        if act is not None:
            assert least <= act.workers <= most
            assert act.why
            now = act.workers
            asked.append(now)
    return asked, now


@given(
    limit=st.integers(1, 8),
    noise=st.lists(st.floats(0.98, 1.02), min_size=9, max_size=9),
)
def test_a_run_that_something_limits_gets_as_many_workers_as_pay(
    limit: int, noise: list[float]
) -> None:
    def rate(workers: int) -> float:
        return min(workers, limit) * noise[workers]

    asked, now = acts(rate, 1, 8, 1)
    assert rate(now) >= 0.9 * max(map(rate, range(1, 9)))
    assert len(asked) <= 5


@given(
    rates=st.lists(st.floats(0.1, 10.0), min_size=16, max_size=16),
    least=st.integers(1, 4),
    more=st.integers(0, 12),
    begins=st.integers(1, 16),
)
def test_whatever_a_run_does_the_search_ends_within_its_bounds(
    rates: list[float], least: int, more: int, begins: int
) -> None:
    most = least + more
    begins = min(max(begins, least), most)
    asked, _ = acts(lambda n: rates[n - 1], least, most, begins)
    assert len(asked) <= 10


@given(
    per_ps=st.integers(1, 6),
    noise=st.lists(st.floats(0.99, 1.01), min_size=24, max_size=24),
)
def test_a_run_gets_as_many_ps_as_its_workers_keep_busy(
    per_ps: int, noise: list[float]
) -> None:
    """A ps serves so many workers; a third one is the most."""

    def rate(workers: int, ps: int) -> float:
        return min(workers, per_ps * ps) * noise[(ps - 1) * 8 + workers - 1]

    machine = AutoScaler(1, 8, ScaleRules(pause_s=0), ps=(1, 3))
    workers, ps, asked = 1, 1, 0
    for time_s in range(40):
        made = rate(workers, ps)
        busy = min(1.0, workers / (per_ps * ps))
        sample = RunSample(time_s, workers, made, ps=ps, ps_busy=busy)
        if (act := machine.handle(sample)) is not None:
            asked += 1
            workers, ps = act.workers, act.ps or ps
            assert 1 <= workers <= 8
            assert 1 <= ps <= 3
    best = max(rate(w, p) for w in range(1, 9) for p in range(1, 4))
    assert rate(workers, ps) >= 0.9 * best
    assert asked <= 7
