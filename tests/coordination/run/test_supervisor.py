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
    supervisor = Supervisor(together=together, wait_s=60.0)
    row: list[Event] = [RoundBegan()] if together else []
    for event in row + [LoopBegan(replica) for replica in range(workers)]:
        assert supervisor.handle(event, 0.0) == []
    return supervisor


def told(supervisor: Supervisor, *events: Event, now: float = 1.0) -> list[Said]:
    return [supervisor.handle(event, now) for event in events]


def test_lost_worker_gets_another_loop_when_it_is_ready() -> None:
    supervisor = begun(together=False)
    assert told(
        supervisor, LoopLost(1, GONE), WorkerAnswered(1), WorkerAnswered(1)
    ) == [
        [],
        [Prepare(1)],
        [],
    ]
    assert supervisor.missing == []
    # It went away while it was prepared, and is looked for again.
    assert told(supervisor, WorkerNotReady(1)) == [[]]
    assert supervisor.missing == [1]
    assert told(supervisor, WorkerAnswered(1), WorkerReady(1)) == [
        [Prepare(1)],
        [Begin((1,))],
    ]
    assert told(supervisor, LoopEnded(0, "done"), LoopEnded(1, "done")) == [
        [],
        [Over("done")],
    ]


def test_run_without_workers_waits_for_one_and_fails_when_none_comes() -> None:
    supervisor = begun(together=False)
    assert told(supervisor, LoopLost(0, GONE), LoopLost(1, GONE)) == [[], []]
    assert told(supervisor, TimePassed(), now=60.0) == [[]]
    assert told(supervisor, WorkerAnswered(0), WorkerReady(0), now=60.5) == [
        [Prepare(0)],
        [Begin((0,))],
    ]
    assert told(supervisor, TimePassed(), now=100.0) == [[]]
    assert told(supervisor, LoopLost(0, GONE), now=100.0) == [[]]
    assert told(supervisor, TimePassed(), now=161.0) == [[Over("failed", GONE)]]
    assert supervisor.missing == []


def test_worker_that_ends_in_order_though_nobody_told_it_is_taken_back() -> None:
    supervisor = begun(together=False)
    assert told(supervisor, LoopEnded(1, "stopped")) == [[]]
    assert supervisor.missing == [1]


def test_run_that_is_told_to_stop_takes_nobody_back() -> None:
    supervisor = begun(together=False)
    assert told(supervisor, LoopLost(1, GONE), WorkerAnswered(1), StopAsked()) == [
        [],
        [Prepare(1)],
        [],
    ]
    assert supervisor.missing == []
    assert told(supervisor, WorkerReady(1), LoopEnded(0, "stopped")) == [
        [],
        [Over("stopped")],
    ]
    supervisor = begun(together=False, workers=1)
    assert told(supervisor, LoopLost(0, GONE), StopAsked()) == [[], [Over("stopped")]]


def test_synchronous_run_pauses_for_a_worker_that_is_back() -> None:
    supervisor = begun(together=True, workers=3)
    assert told(supervisor, LoopLost(1, GONE)) == [[LeaveOut(1)]]
    assert told(supervisor, WorkerAnswered(1), WorkerReady(1)) == [
        [Prepare(1)],
        [Pause()],
    ]
    # The row is over when all its loops are, whoever tells first.
    assert told(supervisor, LoopEnded(0, "stopped"), RoundEnded("paused")) == [[], []]
    assert told(supervisor, LoopEnded(2, "stopped")) == [[Begin((0, 1, 2))]]
    assert told(supervisor, LoopEnded(1, "done"), RoundEnded("done")) == [[], []]
    assert told(supervisor, LoopEnded(0, "done"), LoopEnded(2, "done")) == [
        [],
        [Over("done")],
    ]


def test_synchronous_run_pauses_for_a_worker_that_was_told_to_end() -> None:
    supervisor = begun(together=True, workers=3)
    assert told(supervisor, LoopEnded(2, "left")) == [[Pause()]]
    assert supervisor.missing == [2]
    stopped = LoopEnded(0, "stopped"), LoopEnded(1, "stopped")
    assert told(supervisor, RoundEnded("paused"), *stopped)[-1] == [Begin((0, 1))]


def test_synchronous_run_without_workers_goes_on_with_the_first_that_is_back() -> None:
    supervisor = begun(together=True)
    assert told(supervisor, LoopLost(0, GONE)) == [[LeaveOut(0)]]
    # It was told to leave: nothing says that it is still there.
    assert told(supervisor, LoopEnded(1, "stopped"), RoundEnded("alone")) == [[], []]
    assert supervisor.missing == [0, 1]
    assert told(supervisor, WorkerAnswered(1), WorkerReady(1)) == [
        [Prepare(1)],
        [Begin((1,))],
    ]
    assert told(supervisor, WorkerAnswered(0), WorkerReady(0)) == [
        [Prepare(0)],
        [Pause()],
    ]
    # And when it is told to stop while all are gone, it is over at once.
    assert told(supervisor, LoopLost(0, GONE), LoopLost(1, GONE)) == [
        [LeaveOut(0)],
        [LeaveOut(1)],
    ]
    assert told(supervisor, RoundEnded("alone"), StopAsked()) == [[], [Over("stopped")]]


def test_run_that_cannot_go_on_ends_with_the_reason() -> None:
    supervisor = begun(together=True)
    assert told(supervisor, Failed(GONE), LoopLost(0, GONE)) == [
        [Over("failed", GONE)],
        [],
    ]


class AnyCrew:
    """A supervisor, and what is true of the loops that it began."""

    def __init__(self, *, together: bool) -> None:
        self.supervisor, self.running = begun(together=together), {0, 1}
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
        events += [WorkerAnswered(r) for r in self.supervisor.missing]
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
        for instruction in self.supervisor.handle(event, 0.0):
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
    supervisor = begun(together=together)
    assert told(supervisor, RestartAsked(), RestartAsked()) == [[Pause()], []]
    if together:
        assert told(supervisor, RoundEnded("paused")) == [[]]
    assert told(supervisor, LoopEnded(0, "stopped"), LoopEnded(1, "stopped")) == [
        [],
        [Rest()],
    ]
    # Another ps is told to end meanwhile, and nobody is looked for.
    assert told(supervisor, RestartAsked(), TimePassed()) == [[], []]
    assert supervisor.missing == []
    # One that is back is told to end again before any loop has begun.
    assert told(supervisor, Restarted(again=True)) == [[Rest()]]
    assert told(supervisor, Restarted()) == [[Begin((0, 1))]]
    assert told(supervisor, RestartAsked()) == [[Pause()]]


def test_row_29_a_worker_that_is_lost_before_a_run_rests_is_looked_for_after_it() -> (
    None
):
    supervisor = begun(together=False)
    told(supervisor, LoopLost(1, GONE), WorkerAnswered(1))
    assert told(supervisor, RestartAsked(), LoopEnded(0, "stopped")) == [[Pause()], []]
    assert told(supervisor, WorkerNotReady(1)) == [[Rest()]]
    assert told(supervisor, Restarted()) == [[Begin((0,))]]
    assert supervisor.missing == [1]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("begun_before", [False, True])
def test_row_29_a_run_that_is_told_to_stop_before_a_ps_is_back_is_over(
    together: bool, begun_before: bool
) -> None:
    supervisor = begun(together=together)
    ends: list[Event] = [RoundEnded("paused")] if together else []
    ends += [LoopEnded(0, "stopped"), LoopEnded(1, "stopped")]
    stop = StopAsked()
    events = (
        [RestartAsked(), *ends, stop] if begun_before else [RestartAsked(), stop, *ends]
    )
    said = [one for each in told(supervisor, *events) for one in each]
    assert said == [Pause(), *([Rest()] if begun_before else []), Over("stopped")]
    assert told(supervisor, Restarted()) == [[]]


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
