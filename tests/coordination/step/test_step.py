from jgraph.coordination.step.step import (
    Abort,
    DeadlinePassed,
    Fail,
    Finish,
    PartDone,
    PartFailed,
    PeerLost,
    StepTracker,
)
from jgraph.errors import DeadlineError, FeedError, TaskLostError
from jgraph.graph.ir import TaskName

PS0, PS1 = TaskName("/job:ps/task:0"), TaskName("/job:ps/task:1")
WORKER = TaskName("/job:worker/task:0")


def tracker() -> StepTracker:
    return StepTracker("train", [PS0, PS1, WORKER])


def test_step_finishes_when_the_last_part_is_done() -> None:
    step = tracker()
    assert step.handle(PartDone(WORKER)) == []
    assert step.handle(PartDone(PS1)) == []
    assert step.handle(PartDone(PS0)) == [Finish()]
    assert step.handle(PartDone(PS0)) == []


def test_first_failure_decides_and_aborts_all_others() -> None:
    step = tracker()
    error = FeedError("x is float64")
    assert step.handle(PartFailed(PS0, error)) == [
        Abort(PS1, error),
        Abort(WORKER, error),
        Fail(error),
    ]
    assert step.handle(PartFailed(PS1, TaskLostError("derived"))) == []


def test_part_that_was_done_before_its_task_went_away_stays_done() -> None:
    step = tracker()
    step.handle(PartDone(PS0))
    assert step.handle(PeerLost(PS0, TaskLostError("gone"))) == []
    step.handle(PartDone(PS1))
    assert step.handle(PartDone(WORKER)) == [Finish()]


def test_lost_peer_with_work_left_fails_the_step() -> None:
    error = TaskLostError("gone")
    assert tracker().handle(PeerLost(PS1, error))[-1] == Fail(error)


def test_deadline_names_the_tasks_and_values_it_waits_for() -> None:
    step = tracker()
    step.handle(PartDone(PS0))
    *aborts, failed = step.handle(DeadlinePassed(60, ("w",)))
    assert [a.task for a in aborts if isinstance(a, Abort)] == [PS1, WORKER]
    assert isinstance(failed, Fail)
    assert isinstance(failed.error, DeadlineError)
    assert failed.error.details["pending"] == [PS1, WORKER]
    assert f"not finished: {PS1}, {WORKER} (values still to come: w)" in str(
        failed.error
    )
