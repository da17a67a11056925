"""Who is lost when a loop ends with an error."""

import pytest

from jgraph.coordination.run.loop_outcome import LoopOutcome, is_link_loss, judge
from jgraph.errors import ClusterUnreachableError, DeadlineError, JGError, TaskLostError
from jgraph.graph.ir import TaskName

PS0, PS1 = TaskName("/job:ps/task:0"), TaskName("/job:ps/task:1")
MASTER, WORKER = TaskName("/job:worker/task:0"), TaskName("/job:worker/task:1")


@pytest.mark.row(21)
@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (TaskLostError("gone", address="a:1"), LoopOutcome.MASTER_LOST),
        (ClusterUnreachableError("no answer"), LoopOutcome.MASTER_LOST),
        (TaskLostError("gone", task=WORKER), LoopOutcome.WORKER_LOST),
        (TaskLostError("gone", task=PS1), LoopOutcome.LINK_LOST),
        (ClusterUnreachableError("no answer", task=PS1), LoopOutcome.LINK_LOST),
        (TaskLostError("gone", task=MASTER), LoopOutcome.LINK_LOST),
        (DeadlineError("late", task=PS1), LoopOutcome.FAILED),
    ],
)
def test_worker_that_lost_another_task_may_have_lost_a_link_only(
    error: JGError, verdict: LoopOutcome
) -> None:
    assert judge(error, WORKER, MASTER, decides=False) is verdict


@pytest.mark.parametrize(
    ("named", "verdict"),
    [
        (PS0, LoopOutcome.ARBITER_LOST),
        (PS1, LoopOutcome.FAILED),  # it needs every ps
        (MASTER, LoopOutcome.MASTER_LOST),
    ],
)
def test_who_decides_can_do_without_no_ps(
    named: TaskName, verdict: LoopOutcome
) -> None:
    error = TaskLostError("gone", task=named)
    assert judge(error, PS0, MASTER, decides=True) is verdict


def test_worker_that_is_the_master_takes_it_along() -> None:
    error = TaskLostError("gone", task=MASTER)
    assert judge(error, MASTER, MASTER, decides=False) is LoopOutcome.MASTER_LOST


@pytest.mark.row(21)
def test_task_that_master_reaches_as_it_began_is_not_lost() -> None:
    began = {PS0: "a", PS1: "b"}
    assert is_link_loss(PS1, began, {PS0: "a", PS1: "b"})
    assert not is_link_loss(PS1, began, {PS0: "a"})  # the master has lost it too
    again_and_empty = {PS0: "a", PS1: "c"}
    assert not is_link_loss(PS1, began, again_and_empty)
    assert not is_link_loss(PS1, {}, {PS1: "b"})
