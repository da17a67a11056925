"""A step on paper."""

import pytest

from jgraph.errors import InternalError
from jgraph.graph.ir import TaskName
from jgraph.plan.auto.cost_model import Link
from jgraph.plan.auto.timing import Job, Jobs, Timing, timing_of
from tests.support.costs import model

A, B = TaskName("/job:worker/task:0"), TaskName("/job:worker/task:1")
LINK = Link(latency_s=0.5, bytes_per_s=10.0)


def time(
    *jobs: Job,
    nbytes: dict[int, int] | None = None,
    fetches: tuple[int, ...] = (),
    feeds: tuple[int, ...] = (),
    crowding: float | None = None,
) -> Timing:
    sizes = dict.fromkeys(range(10), 0) | (nbytes or {})
    step = Jobs(jobs, sizes, feeds, fetches, A)
    return timing_of(step, model([A, B], LINK, crowding=crowding))


def test_a_task_runs_one_job_at_a_time() -> None:
    timing = time(Job(A, 1.0), Job(A, 2.0))
    assert timing.begins == (0.0, 1.0)
    assert timing.seconds == 3.0


def test_what_others_take_arrives_after_latency_and_bytes() -> None:
    timing = time(Job(A, 1.0, makes=(0,)), Job(B, 1.0, takes=(0,)), nbytes={0: 20})
    assert timing.begins == (0.0, 1.0 + 2.0 + 0.5)
    assert timing.sent == 20


def test_the_driver_hears_later_that_another_task_is_done() -> None:
    assert time(Job(B, 1.0)).seconds == 0.5 + 1.0 + 0.5


def test_messages_of_one_link_wait_for_each_other_and_tasks_do_not() -> None:
    timing = time(
        Job(A, 1.0, makes=(0,)),
        Job(A, 1.0, makes=(1,)),
        Job(B, 0.0, takes=(0,)),
        Job(B, 0.0, takes=(1,)),
        nbytes={0: 100, 1: 100},
    )
    assert timing.ends == (1.0, 2.0, 11.5, 21.5)


def test_values_for_one_task_leave_in_one_message() -> None:
    timing = time(Job(A, 0.0, makes=(0, 1)), Job(B, 0.0, takes=(0, 1)))
    assert timing.begins[1] == 0.5


def test_tasks_of_one_host_slow_each_other_down_while_both_compute() -> None:
    timing = time(Job(A, 2.0), Job(B, 1.0), crowding=2.0)
    # B begins half a second later, and both then run at half their speed.
    assert timing.ends == (3.0, 2.5)


def test_a_job_that_is_not_ready_lets_others_run() -> None:
    timing = time(
        Job(B, 1.0, makes=(0,)), Job(A, 1.0, takes=(0,)), Job(A, 1.0, makes=(1,))
    )
    assert timing.begins[2] == 0.0
    assert timing.begins[1] == 2.0


def test_jobs_that_must_follow_each_other_do() -> None:
    assert time(Job(A, 1.0), Job(B, 1.0, after=(0,))).begins[1] == 1.0


def test_feeds_are_at_the_driver_and_travel_from_there() -> None:
    timing = time(Job(B, 0.0, takes=(0,)), nbytes={0: 10}, feeds=(0,))
    assert timing.begins == (1.5,)


def test_memory_is_counted_until_the_last_use() -> None:
    timing = time(
        Job(A, 1.0, makes=(0,), nbytes=100),
        Job(A, 1.0, takes=(0,), makes=(1,), nbytes=70),
        Job(A, 1.0, takes=(1,), nbytes=5),
        nbytes={0: 60, 1: 5},
    )
    assert timing.peaks[A] == 100


def test_a_value_waits_in_memory_while_others_run() -> None:
    timing = time(
        Job(A, 1.0, makes=(0,), nbytes=10),
        Job(A, 1.0, makes=(1,), nbytes=50),
        Job(A, 1.0, takes=(0, 1), nbytes=15),
        nbytes={0: 10, 1: 5},
    )
    assert timing.peaks[A] == 60


def test_jobs_that_wait_for_each_other_are_a_fault() -> None:
    with pytest.raises(InternalError):
        time(Job(A, 1.0, takes=(0,), makes=(1,)), Job(A, 1.0, takes=(1,), makes=(0,)))
