"""How many steps a worker takes alone in a round of so many seconds."""

from jgraph.coordination.step.pace import Pace


def test_a_round_has_as_many_steps_as_took_its_time() -> None:
    pace = Pace(seconds=1.0, most=1000)
    found = []
    for per_step in (0.1, 0.1, 0.02, 0.5):
        found.append(pace.steps)
        pace.took(per_step * pace.steps)
    assert [*found, pace.steps] == [1, 10, 10, 50, 2]


def test_there_is_always_one_step_and_never_more_than_the_most() -> None:
    pace = Pace(seconds=1.0, most=7)
    pace.took(0.0)
    assert pace.steps == 7
    pace.took(1e9)
    assert pace.steps == 1
