from jgraph.coordination.liveness.join import (
    AskAgain,
    Complete,
    GiveUp,
    JoinBarrier,
    TaskAnswered,
    TaskRefused,
    TimeIsUp,
)
from jgraph.errors import ClusterUnreachableError, TaskMissingError, VersionError
from jgraph.graph.ir import TaskName

PS, WORKER = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:0")


def call() -> JoinBarrier:
    return JoinBarrier({PS: "a:1", WORKER: "b:2"})


def test_call_is_complete_when_every_task_answered() -> None:
    roll = call()
    assert roll.handle(TaskAnswered(PS, 11)) == []
    assert roll.handle(TaskAnswered(WORKER, 22)) == [Complete()]
    assert roll.incarnations == {PS: 11, WORKER: 22}


def test_task_that_is_not_up_yet_is_asked_again() -> None:
    roll = call()
    refused = TaskRefused(WORKER, ClusterUnreachableError("connection refused"))
    assert roll.handle(refused) == [AskAgain(WORKER)]


def test_other_version_ends_the_wait_at_once() -> None:
    error = VersionError("speaks another protocol")
    assert call().handle(TaskRefused(PS, error)) == [GiveUp(error)]


def test_time_out_names_the_missing_task_its_address_and_why() -> None:
    roll = call()
    roll.handle(TaskAnswered(PS, 11))
    roll.handle(TaskRefused(WORKER, ClusterUnreachableError("connection refused")))
    (gave_up,) = roll.handle(TimeIsUp(5))
    assert isinstance(gave_up, GiveUp)
    assert isinstance(gave_up.error, TaskMissingError)
    assert gave_up.error.details["missing"] == [WORKER]
    assert "1 of 2 tasks answered in 5 s" in str(gave_up.error)
    assert f"{WORKER} at b:2 (connection refused)" in str(gave_up.error)
