from jgraph.coordination.liveness.freezes import Freezes, Kill, Looked
from jgraph.graph.device import TaskName

PS, WORKER = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:0")


def looks(
    freezes: Freezes, task: TaskName, is_frozen: bool, *nows: float
) -> list[Kill]:
    return [
        kill for now in nows for kill in freezes.handle(Looked(task, is_frozen, now))
    ]


def test_process_that_stays_frozen_is_killed_once() -> None:
    freezes = Freezes(limit_s=10.0)
    assert looks(freezes, PS, True, *range(10)) == []
    assert looks(freezes, PS, True, 10) == [Kill(PS, 10)]
    assert looks(freezes, PS, True, 11) == []  # it ends, or is another one


def test_pauses_are_not_added_up() -> None:
    freezes = Freezes(limit_s=10.0)
    for begin in (0, 10, 20):
        assert looks(freezes, PS, True, *range(begin, begin + 9)) == []
        assert looks(freezes, PS, False, begin + 9) == []


def test_each_task_is_frozen_for_itself() -> None:
    freezes = Freezes(limit_s=2.0)
    assert looks(freezes, PS, True, 0, 1) == []
    assert looks(freezes, WORKER, True, 1, 2) == []
    assert looks(freezes, WORKER, False, 3) == []
    assert looks(freezes, PS, True, 2) == [Kill(PS, 2)]


def test_who_was_frozen_together_with_its_launcher_has_all_the_time_again() -> None:
    freezes = Freezes(limit_s=10.0)
    assert looks(freezes, PS, True, 0, 1, 60) == []
    assert looks(freezes, PS, True, *range(61, 70)) == []
    assert looks(freezes, PS, True, 70) == [Kill(PS, 10)]
