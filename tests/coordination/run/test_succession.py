"""How a run goes on whose master is lost: who begins, and who is waited for."""

import pytest

from jgraph.coordination.run.succession import (
    Accounts,
    MasterTerms,
    resume_events,
    standbys_of,
)
from jgraph.coordination.run.supervisor import (
    Begin,
    Finish,
    GoBack,
    Instruction,
    Supervisor,
)
from jgraph.errors import FencedError, JGError, TaskLostError
from jgraph.graph.ir import TaskName

GONE = TaskLostError("gone")


def begun(
    accounts: Accounts,
    row: str | JGError | None = None,
    *,
    stopping: bool = False,
) -> tuple[list[Instruction], list[int]]:
    supervisor = Supervisor(together=row is not None)
    told = resume_events(accounts, row, stopping=stopping)
    instructions = [one for event in told for one in supervisor.handle(event, 0.0)]
    return instructions, supervisor.missing


def test_standby_is_the_first_other_ps_or_else_the_first_worker() -> None:
    tasks = [TaskName(f"/job:{task}") for task in ("worker/task:0", "ps/task:0")]
    more = [TaskName("/job:ps/task:1"), *tasks]
    both = standbys_of(more, tasks[0])
    assert both == standbys_of(more[::-1], tasks[0])
    assert both[0] == tasks[1]
    assert standbys_of(more, tasks[1])[0] == more[0]
    assert standbys_of(tasks, tasks[1])[0] == tasks[0]
    assert standbys_of(tasks[:1], tasks[0]) == []


def test_each_worker_that_answers_goes_on_alone_and_others_are_looked_for() -> None:
    accounts: Accounts = {0: GONE, 1: "stopped", 2: "failed", 3: "left"}
    assert begun(accounts) == ([Begin((1,)), Begin((2,))], [0, 3])


@pytest.mark.parametrize("row", ["paused", "stopped"])
def test_workers_that_train_together_begin_one_row(row: str) -> None:
    accounts: Accounts = {0: GONE, 1: "stopped", 2: "done", 3: "left"}
    assert begun(accounts, row) == ([Begin((1, 2))], [0, 3])


def test_run_that_was_over_when_its_master_was_lost_is_over() -> None:
    assert begun({0: "done", 1: GONE}) == ([Finish()], [])
    assert begun({0: "done", 1: "stopped"}, "done") == ([Finish()], [])


@pytest.mark.parametrize("row", [None, "stopped", "paused"])
def test_run_that_was_asked_to_stop_does_not_begin_again(row: str | None) -> None:
    accounts: Accounts = {0: "stopped", 1: GONE}
    assert begun(accounts, row, stopping=True) == ([Finish()], [])


def test_run_whose_arbiter_is_lost_goes_back() -> None:
    assert begun({0: "stopped"}, GONE) == ([GoBack(GONE)], [])


def test_run_that_lost_all_workers_waits_for_them() -> None:
    assert begun({0: GONE, 1: GONE}) == ([], [0, 1])
    assert begun({0: GONE, 1: GONE}, "alone") == ([], [0, 1])


def test_as_many_runs_are_remembered_as_there_is_room_for() -> None:
    epochs = MasterTerms()
    for run in range(257):
        epochs.check(f"run-{run}", 2)
    epochs.check("run-0", 1)  # forgotten
    with pytest.raises(FencedError):
        epochs.check("run-256", 1)


def test_a_switch_is_known_until_its_run_is_forgotten() -> None:
    """And none of a master that was replaced is taken."""
    terms = MasterTerms()
    assert terms.newest_switch("run") == b""
    for switch in (b"first", b"second"):
        terms.switch("run", 2, switch)
    with pytest.raises(FencedError):
        terms.switch("run", 1, b"late")
    assert terms.newest_switch("run") == b"second"
    for other in range(256):
        terms.check(f"run-{other}", 1)
    assert terms.newest_switch("run") == b""
