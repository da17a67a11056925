import pytest

from jgraph.runtime.cost import Cost, runs_at_once


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
