import pytest

from jgraph.runtime.cost import Cost, always_at_once_s, runs_at_once


def test_first_run_is_taken_as_it_is() -> None:
    cost = Cost()
    cost.learn(3e-3)
    assert cost.seconds == 3e-3


def test_one_slow_run_among_fast_ones_hardly_counts() -> None:
    cost = Cost(100e-6)
    cost.learn(4e-3)  # preempted
    assert cost.seconds == pytest.approx(125e-6)
    for _ in range(20):
        cost.learn(100e-6)
    assert cost.seconds == pytest.approx(100e-6, rel=0.05)


def test_work_that_has_become_slow_is_known_as_such_within_a_few_runs() -> None:
    cost = Cost(100e-6)
    for _ in range(4):
        cost.learn(4e-3)
    assert cost.seconds is not None
    assert cost.seconds > 200e-6


def test_short_work_stays_so_where_less_than_half_of_its_runs_are_held_up() -> None:
    cost = Cost(200e-6)
    for _ in range(50):
        for seconds in (200e-6, 5e-3, 200e-6, 5e-3, 200e-6):
            cost.learn(seconds)
    assert cost.seconds == pytest.approx(200e-6, rel=0.6)


def test_short_work_that_waits_in_threads_is_tried_without_one_again() -> None:
    cost, runs = Cost(5e-3), 0
    while not runs_at_once(cost, Cost(1e-4), cores=2):
        cost.learn_in_thread(5e-3, used=100e-6)  # 4.9 ms of it for a core
        runs += 1
    assert 50 < runs < 200


def test_work_that_uses_its_time_or_takes_long_stays_in_threads() -> None:
    cost, slow = Cost(5e-3), Cost(1.0)
    for _ in range(1000):
        cost.learn_in_thread(5e-3, used=4e-3)
        slow.learn_in_thread(1.0, used=0.0)  # XLA's own threads compute
    assert cost.seconds == pytest.approx(4e-3)
    assert slow.seconds == 1.0


def test_what_takes_long_counts_at_once() -> None:
    cost = Cost(100e-6)
    cost.learn(0.5)
    assert cost.seconds == 0.5


def test_work_goes_to_a_thread_until_it_is_known_to_be_short() -> None:
    assert not runs_at_once(Cost(), Cost(1e-3))
    assert runs_at_once(Cost(100e-6), Cost())


def test_longer_work_runs_at_once_where_threads_wait_for_a_core() -> None:
    assert not runs_at_once(Cost(300e-6), Cost(100e-6))
    assert runs_at_once(Cost(300e-6), Cost(1e-3))


def test_with_few_cores_a_thread_is_worth_it_only_for_longer_work() -> None:
    assert runs_at_once(Cost(400e-6), Cost(100e-6), cores=2)
    assert not runs_at_once(Cost(700e-6), Cost(100e-6), cores=2)
    assert not runs_at_once(Cost(1.1e-3), Cost(1.0), cores=2)


def test_work_that_would_keep_others_waiting_never_runs_at_once() -> None:
    assert not runs_at_once(Cost(600e-6), Cost(1.0))


@pytest.mark.parametrize("cores", [1, 2, 4, 5, 64])
def test_what_is_always_short_never_goes_to_a_thread(cores: int) -> None:
    work = Cost(always_at_once_s(cores) * 0.99)
    assert runs_at_once(work, Cost(0.0), cores)
    assert runs_at_once(work, Cost(1.0), cores)
