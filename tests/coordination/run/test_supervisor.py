"""Transcripts of a run that looks after its workers: what happened, what is to be."""

import pytest
from hypothesis import given, strategies as st

from jgraph.coordination.run.supervisor import (
    Begin,
    Event,
    Failed,
    Instruction,
    LeaveOut,
    LoopBegan,
    LoopEnded,
    LoopLost,
    Over,
    Pause,
    Prepare,
    Rest,
    RestartAsked,
    Restarted,
    RoundBegan,
    RoundEnded,
    StopAsked,
    Supervisor,
    TimePassed,
    WorkerAnswered,
    WorkerNotReady,
    WorkerReady,
)
from jgraph.errors import TaskLostError

GONE = TaskLostError("gone")
Said = list[Instruction]


def begun(*, together: bool, workers: int = 2) -> Supervisor:
    crew = Supervisor(together=together, wait_s=60.0)
    row: list[Event] = [RoundBegan()] if together else []
    for event in row + [LoopBegan(replica) for replica in range(workers)]:
        assert crew.handle(event, 0.0) == []
    return crew


def told(crew: Supervisor, *events: Event, now: float = 1.0) -> list[Said]:
    return [crew.handle(event, now) for event in events]


def test_lost_worker_gets_another_loop_when_it_is_ready() -> None:
    crew = begun(together=False)
    assert told(crew, LoopLost(1, GONE), WorkerAnswered(1), WorkerAnswered(1)) == [
        [],
        [Prepare(1)],
        [],
    ]
    assert crew.missing == []
    # It went away while it was prepared, and is looked for again.
    assert told(crew, WorkerNotReady(1)) == [[]]
    assert crew.missing == [1]
    assert told(crew, WorkerAnswered(1), WorkerReady(1)) == [
        [Prepare(1)],
        [Begin((1,))],
    ]
    assert told(crew, LoopEnded(0, "done"), LoopEnded(1, "done")) == [
        [],
        [Over("done")],
    ]


def test_run_without_workers_waits_for_one_and_fails_when_none_comes() -> None:
    crew = begun(together=False)
    assert told(crew, LoopLost(0, GONE), LoopLost(1, GONE)) == [[], []]
    assert told(crew, TimePassed(), now=60.0) == [[]]
    assert told(crew, WorkerAnswered(0), WorkerReady(0), now=60.5) == [
        [Prepare(0)],
        [Begin((0,))],
    ]
    assert told(crew, TimePassed(), now=100.0) == [[]]
    assert told(crew, LoopLost(0, GONE), now=100.0) == [[]]
    assert told(crew, TimePassed(), now=161.0) == [[Over("failed", GONE)]]
    assert crew.missing == []


def test_worker_that_ends_in_order_though_nobody_told_it_is_taken_back() -> None:
    crew = begun(together=False)
    assert told(crew, LoopEnded(1, "stopped")) == [[]]
    assert crew.missing == [1]


def test_run_that_is_told_to_stop_takes_nobody_back() -> None:
    crew = begun(together=False)
    assert told(crew, LoopLost(1, GONE), WorkerAnswered(1), StopAsked()) == [
        [],
        [Prepare(1)],
        [],
    ]
    assert crew.missing == []
    assert told(crew, WorkerReady(1), LoopEnded(0, "stopped")) == [
        [],
        [Over("stopped")],
    ]
    crew = begun(together=False, workers=1)
    assert told(crew, LoopLost(0, GONE), StopAsked()) == [[], [Over("stopped")]]


def test_synchronous_run_pauses_for_a_worker_that_is_back() -> None:
    crew = begun(together=True, workers=3)
    assert told(crew, LoopLost(1, GONE)) == [[LeaveOut(1)]]
    assert told(crew, WorkerAnswered(1), WorkerReady(1)) == [[Prepare(1)], [Pause()]]
    # The row is over when all its loops are, whoever tells first.
    assert told(crew, LoopEnded(0, "stopped"), RoundEnded("paused")) == [[], []]
    assert told(crew, LoopEnded(2, "stopped")) == [[Begin((0, 1, 2))]]
    assert told(crew, LoopEnded(1, "done"), RoundEnded("done")) == [[], []]
    assert told(crew, LoopEnded(0, "done"), LoopEnded(2, "done")) == [
        [],
        [Over("done")],
    ]


def test_synchronous_run_pauses_for_a_worker_that_was_told_to_end() -> None:
    crew = begun(together=True, workers=3)
    assert told(crew, LoopEnded(2, "left")) == [[Pause()]]
    assert crew.missing == [2]
    stopped = LoopEnded(0, "stopped"), LoopEnded(1, "stopped")
    assert told(crew, RoundEnded("paused"), *stopped)[-1] == [Begin((0, 1))]


def test_synchronous_run_without_workers_goes_on_with_the_first_that_is_back() -> None:
    crew = begun(together=True)
    assert told(crew, LoopLost(0, GONE)) == [[LeaveOut(0)]]
    # It was told to leave: nothing says that it is still there.
    assert told(crew, LoopEnded(1, "stopped"), RoundEnded("alone")) == [[], []]
    assert crew.missing == [0, 1]
    assert told(crew, WorkerAnswered(1), WorkerReady(1)) == [
        [Prepare(1)],
        [Begin((1,))],
    ]
    assert told(crew, WorkerAnswered(0), WorkerReady(0)) == [[Prepare(0)], [Pause()]]
    # And when it is told to stop while all are gone, it is over at once.
    assert told(crew, LoopLost(0, GONE), LoopLost(1, GONE)) == [
        [LeaveOut(0)],
        [LeaveOut(1)],
    ]
    assert told(crew, RoundEnded("alone"), StopAsked()) == [[], [Over("stopped")]]


def test_run_that_cannot_go_on_ends_with_the_reason() -> None:
    crew = begun(together=True)
    assert told(crew, Failed(GONE), LoopLost(0, GONE)) == [[Over("failed", GONE)], []]


class AnyCrew:
    """A crew, and what is true of the loops that it began."""

    def __init__(self, *, together: bool) -> None:
        self.crew, self.running = begun(together=together), {0, 1}
        self.row = self.together = together
        self.preparing: set[int] = set()
        self.pausing = self.resting = self.over = False

    def possible(self) -> list[Event]:
        """Returns what may happen next."""
        events: list[Event] = [TimePassed(), *(LoopLost(r, GONE) for r in self.running)]
        if (self.together and not self.row) or (self.pausing and not self.together):
            events += [LoopEnded(r, "stopped") for r in self.running]
        events += (
            [Restarted(), Restarted(again=True)] if self.resting else [RestartAsked()]
        )
        events += [WorkerAnswered(r) for r in self.crew.missing]
        for ready in (WorkerReady, WorkerNotReady):
            events += [ready(r) for r in self.preparing]
        if self.row and (self.pausing or not self.running):
            events.append(RoundEnded("paused" if self.pausing else "alone"))
        return events

    def hear(self, event: Event) -> None:
        """Lets it happen, and checks what is said to it."""
        match event:
            case LoopLost(replica) | LoopEnded(replica):
                self.running.discard(replica)
            case WorkerReady(replica) | WorkerNotReady(replica):
                self.preparing.discard(replica)
            case RoundEnded():
                self.row = self.pausing = False
            case Restarted():
                self.resting = self.pausing = False
        for instruction in self.crew.handle(event, 0.0):
            self.check(instruction)

    def check(self, instruction: Instruction) -> None:
        match instruction:
            case Prepare(replica):
                assert replica not in self.running | self.preparing
                self.preparing.add(replica)
            case Begin(replicas):
                assert replicas
                assert not self.running & set(replicas)
                assert not self.resting
                assert not (self.together and (self.row or self.running))
                self.running.update(replicas)
                self.row = self.together
            case Pause():
                assert self.row or (self.running and not self.together)
                assert not self.pausing
                self.pausing = True
            case Rest():
                assert not self.row
                assert not self.running | self.preparing
                self.resting = True
            case Over():
                assert not self.running
                assert not self.row
                self.over = True


@pytest.mark.parametrize("together", [False, True])
def test_row_29_a_run_rests_when_all_loops_have_ended_and_goes_on_with_all_workers(
    together: bool,
) -> None:
    crew = begun(together=together)
    assert told(crew, RestartAsked(), RestartAsked()) == [[Pause()], []]
    if together:
        assert told(crew, RoundEnded("paused")) == [[]]
    assert told(crew, LoopEnded(0, "stopped"), LoopEnded(1, "stopped")) == [
        [],
        [Rest()],
    ]
    # Another ps is told to end meanwhile, and nobody is looked for.
    assert told(crew, RestartAsked(), TimePassed()) == [[], []]
    assert crew.missing == []
    # One that is back is told to end again before any loop has begun.
    assert told(crew, Restarted(again=True)) == [[Rest()]]
    assert told(crew, Restarted()) == [[Begin((0, 1))]]
    assert told(crew, RestartAsked()) == [[Pause()]]


def test_row_29_a_worker_that_is_lost_before_a_run_rests_is_looked_for_after_it() -> (
    None
):
    crew = begun(together=False)
    told(crew, LoopLost(1, GONE), WorkerAnswered(1))
    assert told(crew, RestartAsked(), LoopEnded(0, "stopped")) == [[Pause()], []]
    assert told(crew, WorkerNotReady(1)) == [[Rest()]]
    assert told(crew, Restarted()) == [[Begin((0,))]]
    assert crew.missing == [1]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("begun_before", [False, True])
def test_row_29_a_run_that_is_told_to_stop_before_a_ps_is_back_is_over(
    together: bool, begun_before: bool
) -> None:
    crew = begun(together=together)
    ends: list[Event] = [RoundEnded("paused")] if together else []
    ends += [LoopEnded(0, "stopped"), LoopEnded(1, "stopped")]
    stop = StopAsked()
    events = (
        [RestartAsked(), *ends, stop] if begun_before else [RestartAsked(), stop, *ends]
    )
    said = [one for each in told(crew, *events) for one in each]
    assert said == [Pause(), *([Rest()] if begun_before else []), Over("stopped")]
    assert told(crew, Restarted()) == [[]]


@given(st.data(), st.booleans())
def test_no_worker_is_begun_twice_and_a_run_that_is_told_to_stop_ends(
    data: st.DataObject, together: bool
) -> None:
    any_crew = AnyCrew(together=together)
    for _ in range(data.draw(st.integers(0, 30))):
        any_crew.hear(data.draw(st.sampled_from(any_crew.possible())))
    assert not any_crew.over
    any_crew.hear(StopAsked())
    if any_crew.row:
        any_crew.hear(RoundEnded("stopped"))
    for replica in sorted(any_crew.running):
        any_crew.hear(LoopEnded(replica, "stopped"))
    assert any_crew.over
