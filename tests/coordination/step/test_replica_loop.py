from hypothesis import given, strategies as st

from jgraph.coordination.step.replica_loop import (
    End,
    Instruction,
    LoopStarted,
    ReplicaLoop,
    Report,
    StartStep,
    StepAcknowledged,
    StepComputed,
    StopAsked,
)


@given(
    steps=st.integers(1, 12),
    most=st.integers(1, 4),
    prefetch=st.integers(0, 1),
    stop_after=st.integers(0, 30),
    choices=st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_any_order_of_answers_runs_each_step_once_within_the_bound(
    steps: int, most: int, prefetch: int, stop_after: int, choices: list[bool]
) -> None:
    loop = ReplicaLoop(
        first_step=0, steps=steps, max_outstanding=most, prefetch=prefetch
    )
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
                    assert len(computing) <= 1 + prefetch
                    assert len(computing) + len(unacknowledged) <= most + prefetch
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
