"""Schedules of pipelines: every rule gives a table that can run."""

import itertools

import pytest
from hypothesis import given, strategies as st

from jgraph.errors import InternalError, PipelineError
from jgraph.plan.schedule import Pass, Schedule, schedule, simulate


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    tasks, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    chunks = 1
    if name == "interleaved":
        chunks, microbatches = draw(st.integers(1, 3)), tasks * draw(st.integers(1, 3))
    return schedule(name, stages=tasks * chunks, tasks=tasks, microbatches=microbatches)


times = st.floats(0.1, 4.0)


@given(schedules())
def test_every_stage_sees_every_microbatch_once_in_each_direction(
    made: Schedule,
) -> None:
    found = [work for row in made.rows for work in row]
    assert len(set(found)) == len(found)
    assert set(found) == {
        Pass(stage, microbatch, backward)
        for stage in range(made.stages)
        for microbatch in range(made.microbatches)
        for backward in (False, True)
    }
    for number, row in enumerate(made.rows):
        assert {made.row_of(work.stage) for work in row} == {number}


@given(schedules(), times, times, times)
def test_a_pass_begins_when_what_it_needs_is_there_and_its_task_is_free(
    made: Schedule, forward: float, backward: float, send: float
) -> None:
    line = simulate(made, forward=forward, backward=backward, send=send)
    for work, begin in line.begins.items():
        for needed in made.needs(work):
            away = made.row_of(needed.stage) != made.row_of(work.stage)
            assert begin >= line.ends[needed] + (send if away else 0)
    for row in made.rows:
        for first, then in itertools.pairwise(row):
            assert line.ends[first] <= line.begins[then]


@given(schedules())
def test_it_runs_when_the_results_for_a_task_come_in_the_order_they_are_made(
    made: Schedule,
) -> None:
    # A channel per pair of tasks, without a queue: what is taken is what comes next.
    channels: dict[tuple[int, int], list[Pass]] = {}
    for work in simulate(made).begins:
        here = made.row_of(work.stage)
        for needed in made.needs(work):
            if made.row_of(needed.stage) != here:
                assert needed in channels[made.row_of(needed.stage), here]
                channels[made.row_of(needed.stage), here].remove(needed)
        for then in _users(made, work):
            there = made.row_of(then.stage)
            if there != here:
                channels.setdefault((here, there), []).append(work)
    assert not any(channels.values())


def _users(made: Schedule, work: Pass) -> list[Pass]:
    row = [
        Pass(work.stage + 1, work.microbatch),
        Pass(work.stage - 1, work.microbatch, True),
    ]
    return [p for p in row if 0 <= p.stage < made.stages and work in made.needs(p)]


@given(st.integers(1, 8), st.integers(1, 16), st.sampled_from(["gpipe", "1f1b"]))
def test_the_bubble_of_gpipe_and_1f1b_is_the_known_one(
    tasks: int, microbatches: int, name: str
) -> None:
    made = schedule(name, stages=tasks, tasks=tasks, microbatches=microbatches)
    known = (tasks - 1) / (microbatches + tasks - 1)
    assert simulate(made).bubble == pytest.approx(known)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_interleaving_divides_the_bubble_by_the_stages_of_a_task(
    tasks: int, chunks: int, rounds: int
) -> None:
    made = schedule(
        "interleaved",
        stages=tasks * chunks,
        tasks=tasks,
        microbatches=rounds * tasks,
    )
    known = (tasks - 1) / (chunks * rounds * tasks + tasks - 1)
    assert simulate(made).bubble == pytest.approx(known)


@given(st.integers(1, 8), st.integers(1, 16))
def test_1f1b_holds_at_most_one_microbatch_per_stage_still_to_come(
    tasks: int, microbatches: int
) -> None:
    made = schedule("1f1b", stages=tasks, tasks=tasks, microbatches=microbatches)
    held = [min(microbatches, tasks - task) for task in range(tasks)]
    assert made.most_held() == held


@given(st.integers(1, 8), st.integers(1, 16))
def test_gpipe_holds_all_microbatches(tasks: int, microbatches: int) -> None:
    made = schedule("gpipe", stages=tasks, tasks=tasks, microbatches=microbatches)
    assert made.most_held() == [microbatches] * tasks


def test_passes_that_wait_for_each_other_are_told() -> None:
    row = (Pass(0, 0, backward=True), Pass(0, 0))
    with pytest.raises(InternalError, match=r"wait for ever \(B0@0"):
        simulate(Schedule("mine", 1, 1, (row,)))


@pytest.mark.parametrize(
    ("name", "stages", "tasks", "microbatches", "sentence"),
    [
        ("2f2b", 2, 2, 2, "schedule is '2f2b'; there are 'gpipe', '1f1b'"),
        ("1f1b", 0, 2, 2, "a pipeline needs a stage; stages is empty"),
        ("1f1b", 2, 2, 0, "microbatches is 0; a batch is cut into 1 or more"),
        ("1f1b", 2, 0, 2, "a pipeline needs a task; tasks is empty"),
        ("1f1b", 2, 3, 2, "2 stages cannot use 3 tasks"),
        ("gpipe", 4, 2, 2, "there are 4 stages for 2 tasks"),
        ("interleaved", 3, 2, 2, "needs stages that 2 divides, and stages is 3"),
        ("interleaved", 4, 2, 3, "microbatches that 2 divides, and microbatches is 3"),
    ],
)
def test_what_cannot_be_scheduled_is_refused_with_a_sentence(
    name: str, stages: int, tasks: int, microbatches: int, sentence: str
) -> None:
    with pytest.raises(PipelineError, match=sentence):
        schedule(name, stages=stages, tasks=tasks, microbatches=microbatches)


def test_long_schedule_is_printed_in_parts_that_fit_a_terminal() -> None:
    made = schedule("interleaved", stages=8, tasks=4, microbatches=16)
    lines = str(made).splitlines()
    assert max(map(len, lines)) <= 88
    assert any("from time" in line for line in lines)
    cells = [
        word for line in lines if line[:3].strip().isdigit() for word in line.split()
    ]
    passes = {str(work) for row in made.rows for work in row}
    assert passes <= set(cells)


def test_picture_of_a_schedule_has_a_bar_for_each_pass() -> None:
    made = schedule("gpipe", stages=2, tasks=2, microbatches=3)
    svg = made.show().svg
    assert svg.count('class="box span s-forward"') == 6
    assert svg.count('class="box span s-backward"') == 6
