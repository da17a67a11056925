from jgraph.coordination.run.recovery import Recovery
from jgraph.graph.ir import TaskName


def test_recovery_says_how_many_steps_are_done_again() -> None:
    lost = (TaskName("/job:ps/task:0"),)
    assert Recovery(lost, step=730, back_to=500).again == 230
    # A checkpoint may have steps that workers did not tell of yet.
    assert Recovery(lost, step=490, back_to=500).again == 0
