"""A run looks after its workers, whatever becomes of them and in any order."""

from hypothesis import given, strategies as st

from jgraph.coordination.run.supervisor import (
    Begin,
    EndLoops,
    Event,
    Finish,
    Finished,
    Forget,
    GoBack,
    Instruction,
    Knocked,
    LoopBegan,
    LoopEnded,
    LoopFailed,
    LoopLost,
    MemberLeft,
    Over,
    Pause,
    Prepare,
    Rest,
    RestartAsked,
    Restarted,
    RoundBegan,
    RoundEnded,
    StateLost,
    StopAsked,
    Supervisor,
    TimePassed,
    WorkerAnswered,
    WorkerNotReady,
    WorkerReady,
)
from jgraph.errors import TaskLostError

GONE = TaskLostError("gone")


def begun(*, together: bool, least: int = 1) -> Supervisor:
    supervisor = Supervisor(together=together, least=least)
    row: list[Event] = [RoundBegan()] if together else []
    for event in [*row, LoopBegan(0), LoopBegan(1)]:
        assert supervisor.handle(event, 0.0) == []
    return supervisor


class AnyCrew:
    """A supervisor, and what is true of the loops that it began."""

    def __init__(self, *, together: bool, least: int) -> None:
        self.supervisor = begun(together=together, least=least)
        self.running, self.least = {0, 1}, least
        self.row = self.together = together
        self.preparing: set[int] = set()
        self.joining: set[int] = set()
        self.left = {2, 3}
        self.pausing = self.resting = self.over = self.lost = False

    def possible(self) -> list[Event]:
        """Returns what may happen next."""
        events: list[Event] = [TimePassed(), *(LoopLost(r, GONE) for r in self.running)]
        events += [StateLost(r, GONE) for r in self.running]
        if self.row:
            events.append(StateLost(None, GONE))
        ends = self.lost or (self.pausing and not self.together)
        if ends or (self.together and not self.row):
            events += [LoopEnded(r, "stopped") for r in self.running]
        if self.lost:
            events += [LoopFailed(r, GONE) for r in self.running]
        events += (
            [Restarted(), Restarted(again=True)] if self.resting else [RestartAsked()]
        )
        events += [WorkerAnswered(r) for r in self.supervisor.missing]
        events += map(Knocked, self.left)
        events += [MemberLeft(r) for r in (0, 1, 2, 3) if r not in self.left]
        for ready in (WorkerReady, WorkerNotReady):
            events += [ready(r) for r in self.preparing | self.joining]
        if self.row and (self.pausing or not self.running or self.lost):
            events.append(RoundEnded("paused" if self.pausing else "alone"))
        return events

    def hear(self, event: Event) -> None:
        """Lets it happen, and checks what is said to it."""
        match event:
            case StateLost(None):
                self.row, self.lost = False, True
            case StateLost(int(replica)):
                self.running.discard(replica)
                self.lost = True
            case LoopLost(replica) | LoopEnded(replica) | LoopFailed(int(replica)):
                self.running.discard(replica)
            case WorkerReady() | WorkerNotReady() | Knocked() | MemberLeft():
                self.hear_of_worker(event)
            case RoundEnded():
                self.row = self.pausing = False
            case Restarted():
                self.resting = self.pausing = self.lost = False
        for instruction in self.supervisor.handle(event, 0.0):
            self.check(instruction, event)
        if isinstance(event, Knocked) and event.replica not in self.joining:
            self.left.add(event.replica)  # it is of no use now, and knocks again

    def hear_of_worker(
        self, event: WorkerReady | WorkerNotReady | Knocked | MemberLeft
    ) -> None:
        match event:
            case WorkerReady(replica):
                self.preparing.discard(replica)
                self.joining.discard(replica)
            case WorkerNotReady(replica):
                self.preparing.discard(replica)
            case Knocked(replica):
                self.left.discard(replica)
            case MemberLeft(replica):
                self.left.add(replica)

    def check(self, instruction: Instruction, event: Event) -> None:
        match instruction:
            case Prepare(replica):
                assert replica not in self.running | self.preparing | self.joining
                joins = isinstance(event, Knocked)
                (self.joining if joins else self.preparing).add(replica)
            case Forget(replica):
                assert replica in self.joining
                self.joining.discard(replica)
                self.left.add(replica)
            case Begin(replicas):
                assert replicas
                assert not self.running & set(replicas)
                assert not self.joining & set(replicas)
                assert len(self.running) + len(replicas) >= self.least
                assert not self.resting
                assert not self.lost
                assert not (self.together and (self.row or self.running))
                self.running.update(replicas)
                self.row, self.pausing = self.together, False
            case Pause():
                assert self.row or (self.running and not self.together)
                assert not self.pausing
                self.pausing = True
            case EndLoops():
                assert self.lost
                assert self.row or self.running
            case Rest() | GoBack():
                assert not self.row
                assert not self.running | self.preparing
                assert self.lost == isinstance(instruction, GoBack)
                self.resting = True
            case Finish():
                assert not self.running
                assert not self.row
                self.finishing = True
            case Over():
                assert self.finishing
                self.over = True


@given(st.data(), st.booleans(), st.integers(1, 2))
def test_no_worker_is_begun_twice_and_a_run_that_is_told_to_stop_ends(
    data: st.DataObject, together: bool, least: int
) -> None:
    any_crew = AnyCrew(together=together, least=least)
    for _ in range(data.draw(st.integers(0, 30))):
        any_crew.hear(data.draw(st.sampled_from(any_crew.possible())))
    assert not any_crew.over
    any_crew.hear(StopAsked())
    if any_crew.row:
        any_crew.hear(RoundEnded("stopped"))
    for replica in sorted(any_crew.running):
        any_crew.hear(LoopEnded(replica, "stopped"))
    if any_crew.lost:  # it ends with what it goes back to
        for replica in sorted(any_crew.preparing):
            any_crew.hear(WorkerReady(replica))
        any_crew.hear(Restarted())
    any_crew.hear(Finished())
    assert any_crew.over
