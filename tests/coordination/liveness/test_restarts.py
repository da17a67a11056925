from jgraph.coordination.liveness.restarts import (
    REPLACED,
    LeaveEnded,
    Restarts,
    StartAgain,
    TaskEnded,
)
from jgraph.graph.ir import TaskName

PS, WORKER = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:0")
KILLED = -9


def test_task_that_dies_is_started_again_as_often_as_told() -> None:
    restarts = Restarts(limit=2)
    assert restarts.handle(TaskEnded(PS, KILLED, now=0)) == [StartAgain(PS)]
    assert restarts.handle(TaskEnded(PS, KILLED, now=1)) == [StartAgain(PS)]
    assert restarts.handle(TaskEnded(PS, KILLED, now=60)) == [LeaveEnded(PS, 3, 60.0)]


def test_deaths_of_long_ago_do_not_count() -> None:
    restarts = Restarts(limit=1)
    for now in (0, 61, 122, 183):
        assert restarts.handle(TaskEnded(PS, KILLED, now)) == [StartAgain(PS)]
    assert restarts.handle(TaskEnded(PS, KILLED, 184)) == [LeaveEnded(PS, 2, 60.0)]


def test_each_task_has_its_own_count() -> None:
    restarts = Restarts(limit=1)
    assert restarts.handle(TaskEnded(PS, KILLED, now=0)) == [StartAgain(PS)]
    assert restarts.handle(TaskEnded(WORKER, KILLED, now=0)) == [StartAgain(WORKER)]


def test_task_that_was_asked_to_end_stays_ended() -> None:
    restarts = Restarts(limit=1)
    assert restarts.handle(TaskEnded(PS, 0, now=0)) == []
    assert restarts.handle(TaskEnded(PS, 1, now=1)) == [StartAgain(PS)]


def test_process_that_was_replaced_stays_ended() -> None:
    restarts = Restarts(limit=1)
    assert restarts.handle(TaskEnded(PS, REPLACED, now=0)) == []
    assert restarts.handle(TaskEnded(PS, KILLED, now=1)) == [StartAgain(PS)]


def test_nothing_is_started_again_where_nobody_asked_for_it() -> None:
    assert Restarts(0).handle(TaskEnded(PS, KILLED, 0)) == [LeaveEnded(PS, 1, 60.0)]
