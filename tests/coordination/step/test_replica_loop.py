from hypothesis import given, strategies as st

from jgraph.coordination.step.replica_loop import (
    End,
    GoOnAsked,
    HaltAsked,
    Halted,
    Instruction,
    LoopStarted,
    ReplicaLoop,
    Report,
    StartStep,
    StepAcknowledged,
    StepComputed,
    StepFailed,
    StepNotStarted,
    StepRefused,
    StepUnwell,
    StopAsked,
    Tell,
)
from jgraph.errors import NonFiniteError, TaskLostError


def test_next_step_starts_before_the_last_one_is_acknowledged() -> None:
    loop = ReplicaLoop(first_step=3, steps=10, max_outstanding=2)
    assert loop.handle(LoopStarted(), 0.0) == [StartStep(3)]
    assert loop.handle(StepComputed(3), 0.0) == [StartStep(4)]
    assert loop.handle(StepComputed(4), 0.0) == []
    assert loop.handle(StepAcknowledged(3), 0.0) == [StartStep(5)]


def test_reports_keep_their_distance_in_time() -> None:
    loop = ReplicaLoop(first_step=0, steps=9, report_every_s=1.0, max_outstanding=9)
    loop.handle(LoopStarted(), 0.0)
    assert loop.handle(StepComputed(0), 0.9) == [StartStep(1)]
    assert loop.handle(StepComputed(1), 1.1) == [Report(), StartStep(2)]
    assert loop.handle(StepComputed(2), 1.9) == [StartStep(3)]


def test_stop_waits_for_the_steps_in_flight() -> None:
    loop = ReplicaLoop(first_step=0, steps=9)
    loop.handle(LoopStarted(), 0.0)
    assert loop.handle(StopAsked(), 0.0) == []
    assert loop.handle(StepComputed(0), 0.0) == []
    assert loop.handle(StepAcknowledged(0), 0.0) == [Report(), End("stopped")]


def test_a_loop_that_halts_says_what_is_in_flight_and_starts_nothing() -> None:
    loop = ReplicaLoop(first_step=0, steps=9)
    loop.handle(LoopStarted(), 0.0)
    assert loop.handle(StepComputed(0), 0.0) == [StartStep(1)]
    assert loop.handle(HaltAsked(4), 0.0) == [Halted(4, in_flight=2)]
    for event in (StepAcknowledged(0), StepComputed(1), StepAcknowledged(1)):
        assert loop.handle(event, 0.0) == []
    assert loop.handle(GoOnAsked(3), 0.0) == [], "that of an earlier halt"
    assert loop.halted == 4
    assert loop.handle(GoOnAsked(4), 0.0) == [StartStep(2)]
    assert loop.halted == 0


def test_a_loop_that_halts_can_be_told_to_stop() -> None:
    loop = ReplicaLoop(first_step=0, steps=9)
    loop.handle(LoopStarted(), 0.0)
    loop.handle(HaltAsked(1), 0.0)
    loop.handle(StepComputed(0), 0.0)
    loop.handle(StepAcknowledged(0), 0.0)
    assert loop.handle(StopAsked(), 0.0) == [Report(), End("stopped")]
    assert loop.halted == 0


def test_what_is_done_is_told_between_reports() -> None:
    loop = ReplicaLoop(first_step=0, steps=9, tell_every=2)
    loop.handle(LoopStarted(), 0.0)
    told = []
    for step in range(4):
        loop.handle(StepComputed(step), 0.0)
        told.append(Tell() in loop.handle(StepAcknowledged(step), 0.0))
    assert told == [False, True, False, True]


def test_failure_ends_the_loop_once_and_reports_what_was_done() -> None:
    loop = ReplicaLoop(first_step=0, steps=9)
    loop.handle(LoopStarted(), 0.0)
    error = TaskLostError("ps went away")
    assert loop.handle(StepFailed(0, error), 0.0) == [Report(), End("failed", error)]
    assert loop.handle(StepFailed(1, error), 0.0) == []


def test_no_step_begins_after_one_that_is_not_well() -> None:
    loop = ReplicaLoop(first_step=0, steps=9)
    loop.handle(LoopStarted(), 0.0)
    error = NonFiniteError("the loss is NaN")
    assert loop.handle(StepComputed(0), 0.0) == [StartStep(1)]
    assert loop.handle(StepUnwell(1, error), 0.0) == []
    assert loop.handle(StepAcknowledged(0), 0.0) == []
    assert loop.handle(StepAcknowledged(1), 0.0) == [Report(), End("failed", error)]


def test_loop_ends_with_the_step_that_is_not_well_whatever_comes_then() -> None:
    error = NonFiniteError("the loss is NaN")
    for event in (StepRefused(0), StepFailed(0, TaskLostError("ps went away"))):
        loop = ReplicaLoop(first_step=0, steps=9)
        loop.handle(LoopStarted(), 0.0)
        loop.handle(StepUnwell(0, error), 0.0)
        assert loop.handle(event, 0.0) == [Report(), End("failed", error)]


def test_loop_ends_where_its_data_ends() -> None:
    loop = ReplicaLoop(first_step=0, steps=9)
    loop.handle(LoopStarted(), 0.0)
    assert loop.handle(StepComputed(0), 0.0) == [StartStep(1)]
    assert loop.handle(StepAcknowledged(0), 0.0) == []
    assert loop.handle(StepNotStarted(over=True), 0.0) == [Report(), End("done")]


def test_loop_that_is_stopped_while_it_waits_for_data_ends_at_once() -> None:
    loop = ReplicaLoop(first_step=0, steps=9)
    loop.handle(LoopStarted(), 0.0)
    assert loop.handle(StopAsked(), 0.0) == []
    ended = loop.handle(StepNotStarted(over=False), 0.0)
    assert ended == [Report(), End("stopped")]


@given(
    steps=st.integers(1, 12),
    most=st.integers(1, 4),
    stop_after=st.integers(0, 30),
    choices=st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_any_order_of_answers_runs_each_step_once_within_the_bound(
    steps: int, most: int, stop_after: int, choices: list[bool]
) -> None:
    loop = ReplicaLoop(first_step=0, steps=steps, max_outstanding=most)
    computing: list[int] = []
    unacknowledged: list[int] = []
    started: list[int] = []
    ended: list[End] = []

    def perform(instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case StartStep(step):
                    started.append(step)
                    computing.append(step)
                    assert len(computing) + len(unacknowledged) <= most
                case End():
                    ended.append(instruction)
                case Report():
                    pass

    perform(loop.handle(LoopStarted(), 0.0))
    for turn, compute_first in enumerate(choices):
        if turn == stop_after:
            perform(loop.handle(StopAsked(), 0.0))
        if computing and (compute_first or not unacknowledged):
            step = computing.pop(0)
            unacknowledged.append(step)
            perform(loop.handle(StepComputed(step), 0.0))
        elif unacknowledged:
            step = unacknowledged.pop(0)
            perform(loop.handle(StepAcknowledged(step), 0.0))
    assert started == list(range(len(started)))
    assert len(ended) == 1
    assert ended[0].state == ("done" if len(started) == steps else "stopped")
