"""An index is held by one process, whatever happens and in any order."""

from collections.abc import Mapping

from hypothesis import given, strategies as st

from jgraph.coordination.liveness.members import (
    Answered,
    Event,
    Give,
    Gone,
    Knocked,
    LeaveAsked,
    Left,
    Member,
    Members,
    Publish,
    Served,
    TimePassed,
    registrar_of,
)
from jgraph.graph.device import TaskName

PS, WORKER = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:0")
WORKER1 = TaskName("/job:worker/task:1")
LEASE_S = 10.0


class AnyCluster:
    """A registrar, and the processes that it told that they are a task."""

    def __init__(self) -> None:
        self.members = Members({PS: "a:1", WORKER: "b:1"}, LEASE_S)
        self.now, self.next = 0.0, 1
        self.given: dict[int, tuple[TaskName, float]] = {}
        self.number = 0

    def possible(self) -> list[Event]:
        """Returns what may happen next."""
        events: list[Event] = [Knocked("worker", self.next), TimePassed()]
        for process, (task, _) in self.given.items():
            events += [
                Knocked("worker", process),
                Served(task, process, f"c:{process}"),
                Answered(task, process),
                Gone(task, process),
                Left(task, process),
                LeaveAsked(task),
            ]
        return [*events, LeaveAsked(WORKER), Left(WORKER), Gone(WORKER, 0)]

    def hear(self, event: Event) -> None:
        """Lets it happen, and checks what is said."""
        self.next += isinstance(event, Knocked) and event.incarnation == self.next
        there = self.members.arrangement.members
        for told in self.members.handle(event, self.now):
            match told:
                case Give(task):
                    assert isinstance(event, Knocked)
                    self.check_free(task, event.incarnation, there)
                    self.given[event.incarnation] = task, self.now + LEASE_S
                case Publish(arrangement):
                    assert arrangement.number >= self.number
                    self.number, there = arrangement.number, arrangement.members
                    assert PS in arrangement.members
        for task, member in self.members.arrangement.members.items():
            if member.incarnation:  # it was given that, and by nobody else
                assert self.given[member.incarnation][0] == task
        if isinstance(event, Served):  # it is a member, or not invited any more
            self.given[event.incarnation] = event.task, self.now

    def check_free(
        self, task: TaskName, process: int, members: Mapping[TaskName, Member]
    ) -> None:
        """Checks that a task may be this process: no other one is, or may be it."""
        if task in members:
            assert members[task].incarnation == process
            return
        holders = {
            other
            for other, (held, until) in self.given.items()
            if held == task and until > self.now
        }
        assert holders <= {process}


@given(st.data())
def test_no_two_processes_hold_one_index(data: st.DataObject) -> None:
    cluster = AnyCluster()
    for _ in range(data.draw(st.integers(0, 25))):
        cluster.now += data.draw(st.sampled_from([0.0, 1.0, LEASE_S]))
        cluster.hear(data.draw(st.sampled_from(cluster.possible())))


def test_what_a_process_says_that_was_given_up_changes_nothing() -> None:
    members = Members({PS: "a:1"}, LEASE_S)
    members.handle(Knocked("worker", 1), 0.0)
    members.handle(Served(WORKER, 1, "b:1"), 0.0)
    members.handle(TimePassed(), LEASE_S)  # it was silent
    members.handle(Knocked("worker", 2), LEASE_S)
    members.handle(Served(WORKER, 2, "c:1"), LEASE_S)
    there = members.arrangement
    assert there.members[WORKER].incarnation == 2
    for event in (Answered(WORKER, 1), Gone(WORKER, 1), Left(WORKER, 1)):
        assert members.handle(event, LEASE_S) == []
    assert members.arrangement == there


def test_whoever_joins_the_registrar_is_the_same_task() -> None:
    """One that joined expires unless it is heard of, and nobody hears of itself."""
    workers = WORKER, WORKER1
    members = Members(dict.fromkeys(workers, "a:1"), LEASE_S)
    members.handle(Knocked("ps", 1), 0.0)
    members.handle(Served(PS, 1, "b:1"), 0.0)
    tasks = list(members.arrangement.members)
    assert registrar_of(workers) == registrar_of(tasks, members.arrangement)
    (given_up,) = members.handle(TimePassed(), LEASE_S)
    assert isinstance(given_up, Publish)
    assert (given_up.task, given_up.kind) == (PS, "lost")


def test_the_registrar_is_the_first_ps_or_the_first_task() -> None:
    names = "worker/task:0", "ps/task:10", "ps/task:2", "chief/task:0"
    tasks = [TaskName(f"/job:{name}") for name in names]
    assert registrar_of(tasks) == tasks[2]
    assert registrar_of(tasks[::3]) == tasks[3]
