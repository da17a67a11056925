from jgraph.coordination.run.recovery import (
    ATTEMPTS,
    GiveUp,
    GoBack,
    Recoveries,
    Recovery,
)
from jgraph.graph.ir import TaskName


def test_run_goes_back_to_its_newest_checkpoint_however_often_there_is_a_newer() -> (
    None
):
    recoveries = Recoveries(first=100)
    for step in (100, 200, 300, 400, 500):
        assert recoveries.lost(step) == GoBack(step)


def test_run_without_a_checkpoint_of_its_own_ends() -> None:
    assert isinstance(Recoveries(0).lost(None), GiveUp)
    # That is of another run: this one never was in that state.
    assert isinstance(Recoveries(first=100).lost(50), GiveUp)


def test_run_that_loses_tasks_at_the_same_place_over_and_over_ends() -> None:
    recoveries = Recoveries(first=0)
    assert recoveries.lost(10) == GoBack(10)
    for _ in range(ATTEMPTS):
        assert recoveries.lost(20) == GoBack(20)
    assert recoveries.lost(20) == GiveUp("it went back to step 20 3 times already")


def test_run_whose_tasks_are_told_to_end_goes_on_however_often() -> None:
    recoveries = Recoveries(first=0)
    for _ in range(ATTEMPTS):
        assert recoveries.lost(20) == GoBack(20)
        assert recoveries.lost(20, told=True) == GoBack(20)
    assert recoveries.lost(20, told=True) == GoBack(20)
    assert isinstance(recoveries.lost(20), GiveUp)
    assert isinstance(Recoveries(0).lost(None, told=True), GiveUp)


def test_recovery_says_how_many_steps_are_done_again() -> None:
    lost = (TaskName("/job:ps/task:0"),)
    assert Recovery(lost, step=730, back_to=500).again == 230
    # A checkpoint may have steps that workers did not tell of yet.
    assert Recovery(lost, step=490, back_to=500).again == 0
