"""Members of a cluster: tasks that join and leave, each index held by one process.

    unknown --Knocked--> invited: Give --Served--> ready: Publish
    invited --its lease is over--> unknown
    ready --LeaveAsked--> leaving: Publish
    ready, leaving --Left--> left, or --Gone, silent for long--> lost: Publish

One task of a cluster decides, its registrar. A process that would be a task knocks, and
gets the lowest index that nobody holds, under a lease in its incarnation. Others hear
of it when it serves, and not before: one that dies, hangs or lies until then holds an
index for some time, and no more. What they hear is an arrangement: all tasks with their
addresses, under a number that only grows; the newest counts.

A task of the cluster's description has no incarnation here. It stays a member whatever
becomes of its processes, until it is told to leave: from then on it may be lost, too.
The registrar is such a task: somebody starts it again, nobody has to give it up.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias, final

from jgraph.errors import FencedError, JGError, RescaleError
from jgraph.graph.device import TaskName, is_ps

LEASE_S: Final = 60.0
"""So long an index is kept for a process that does not serve yet, or is silent."""
MOST: Final = 4096
"""Indices of a job."""
JOBS: Final = frozenset({"worker", "ps"})
"""Of which tasks may join."""


@final
@dataclass(frozen=True, slots=True)
class Member:
    """A task of a cluster.

    Attributes:
      address: where it listens.
      incarnation: of its process, if that joined; 0: the cluster's description has it.
      leaves: it was told to.
    """

    address: str
    incarnation: int = 0
    leaves: bool = False


@final
@dataclass(frozen=True, slots=True)
class Arrangement:
    """All tasks of a cluster.

    Attributes:
      number: the newest counts; 0: the cluster is as it was described.
      members: by task.
    """

    number: int = 0
    members: Mapping[TaskName, Member] = field(default_factory=dict)

    def is_of(self, task: TaskName, incarnation: int) -> bool:
        """Whether a task may be this process of it, as far as is known.

        Example:
          >>> worker = TaskName("/job:worker/task:2")
          >>> there = Arrangement(1, {worker: Member("a:1", 7)})
          >>> there.is_of(worker, 7), there.is_of(worker, 8), Arrangement().is_of(
          ...     worker, 7)
          (True, False, True)
        """
        if not self.number:
            return True
        found = self.members.get(task)
        return found is not None and found.incarnation in {0, incarnation}


def registrar_of(
    tasks: Iterable[TaskName], arrangement: Arrangement = Arrangement()
) -> TaskName:
    """Returns the task that numbers those that join.

    The first ps of the cluster's description, or the first task if that has no ps,
    whoever joins: all tasks name the same one, and a process that joined has a lease.

    Args:
      tasks: of the cluster, as far as is known.
      arrangement: says which of them have joined.

    Example:
      >>> worker, ps = TaskName("/job:worker/task:0"), TaskName("/job:ps/task:0")
      >>> registrar_of([worker, ps])
      '/job:ps/task:0'
      >>> there = Arrangement(1, {ps: Member("a:1", 7), worker: Member("b:1")})
      >>> registrar_of([ps, worker], there)
      '/job:worker/task:0'
    """

    def order(task: TaskName) -> tuple[bool, bool, tuple[str, int]]:
        member = arrangement.members.get(task)
        has_joined = member is not None and member.incarnation != 0
        return has_joined, not is_ps(task), _by_index(task)

    return min(tasks, key=order)


@final
@dataclass(frozen=True, slots=True)
class Knocked:
    """A process would be a task of a job.

    ``indices``: it can prove to be one of these; None: any.
    """

    job: str
    incarnation: int
    indices: tuple[int, ...] | None = None


@final
@dataclass(frozen=True, slots=True)
class Served:
    """A process serves the task that it was given."""

    task: TaskName
    incarnation: int
    address: str


@final
@dataclass(frozen=True, slots=True)
class Answered:
    """The process of a task answers.

    ``incarnation`` 0: the cluster's description has the task.
    """

    task: TaskName
    incarnation: int


@final
@dataclass(frozen=True, slots=True)
class Gone:
    """Nothing can come any more from the process of a task.

    ``incarnation`` 0: the cluster's description has the task.
    """

    task: TaskName
    incarnation: int


@final
@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """A task is told to end, and to be no member any more."""

    task: TaskName


@final
@dataclass(frozen=True, slots=True)
class Left:
    """A task ended in order; ``incarnation`` 0: whichever process of it."""

    task: TaskName
    incarnation: int = 0


@final
@dataclass(frozen=True, slots=True)
class Adopted:
    """Another task knows of a newer arrangement: this registrar was started again."""

    arrangement: Arrangement


@final
@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing happened; look for leases that are over."""


Event: TypeAlias = (
    Knocked | Served | Answered | Gone | LeaveAsked | Left | Adopted | TimePassed
)


@final
@dataclass(frozen=True, slots=True)
class Give:
    """Let the process that knocked be this task, once it serves."""

    task: TaskName


@final
@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse what was asked."""

    error: JGError


@final
@dataclass(frozen=True, slots=True)
class Publish:
    """Tell all tasks.

    Attributes:
      arrangement: the newest.
      kind: of what happened: "joined", "leaves", "left" or "lost"; empty: nothing here.
      task: to whom.
    """

    arrangement: Arrangement
    kind: str = ""
    task: TaskName | None = None


Instruction: TypeAlias = Give | Refuse | Publish


@final
@dataclass(slots=True)
class _Invited:
    incarnation: int
    until: float


@final
class Members:
    """State machine of the members of one cluster, at its registrar.

    Args:
      described: address of each task that the cluster's description has.
      lease_s: see ``LEASE_S``.

    Example:
      >>> members = Members({TaskName("/job:worker/task:0"): "a:1"})
      >>> members.handle(Knocked("worker", 7), 0.0)
      [Give(task='/job:worker/task:1')]
      >>> served = Served(TaskName("/job:worker/task:1"), 7, "b:1")
      >>> (told,) = members.handle(served, 1.0)
      >>> told.kind, told.arrangement.number, list(told.arrangement.members)
      ('joined', 1, ['/job:worker/task:0', '/job:worker/task:1'])
    """

    def __init__(
        self, described: Mapping[TaskName, str], lease_s: float = LEASE_S
    ) -> None:
        members = {task: Member(address) for task, address in described.items()}
        self.arrangement = Arrangement(0, members)
        self._lease_s = lease_s
        self._invited: dict[TaskName, _Invited] = {}
        self._last_heard_s: dict[TaskName, float] = {}

    @property
    def joined(self) -> dict[TaskName, Member]:
        """The members that the cluster's description does not have."""
        members = self.arrangement.members.items()
        return {task: one for task, one in members if one.incarnation}

    @property
    def _may_be_lost(self) -> dict[TaskName, Member]:
        """The members that are none any more once they are silent for long."""
        members = self.arrangement.members.items()
        return {task: one for task, one in members if one.incarnation or one.leaves}

    @property
    def lease_s(self) -> float:
        """How long an index is kept for who is not heard of."""
        return self._lease_s

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Takes an event at time ``now`` (seconds); returns what to do."""
        said = self._expire(now)
        match event:
            case Knocked():
                said.append(self._knocked(event, now))
            case Served():
                said.append(self._served(event, now))
            case Answered(task, incarnation):
                member = self._may_be_lost.get(task)
                if member is not None and member.incarnation == incarnation:
                    self._last_heard_s[task] = now
            case Gone(task, incarnation):
                said.extend(self._gone(task, incarnation))
            case LeaveAsked(task):
                said.extend(self._leave(task, now))
            case Left(task, incarnation):
                said.extend(self._left(task, incarnation))
            case Adopted(arrangement):
                said.extend(self._adopt(arrangement, now))
        return said

    # ------------------------------------------------------------ who joins

    def _knocked(self, event: Knocked, now: float) -> Instruction:
        if event.job not in JOBS:
            return Refuse(_no_such_job(event.job))
        for task, member in self.joined.items():
            if member.incarnation == event.incarnation:  # it asked twice
                return Give(task)
        for task, one in self._invited.items():
            if one.incarnation == event.incarnation:  # the answer was lost
                one.until = now + self._lease_s
                return Give(task)
        allowed = range(MOST) if event.indices is None else sorted(set(event.indices))
        held = {*self.arrangement.members, *self._invited}
        for index in allowed:
            task = TaskName(f"/job:{event.job}/task:{index}")
            if task not in held:
                self._invited[task] = _Invited(event.incarnation, now + self._lease_s)
                return Give(task)
        return Refuse(_all_held(event.job, allowed))

    def _served(self, event: Served, now: float) -> Instruction:
        task, incarnation = event.task, event.incarnation
        if incarnation and self._is_member(task, incarnation):  # it says so again
            return Publish(self.arrangement)
        invited = self._invited.get(task)
        if invited is None or invited.incarnation != incarnation:
            return Refuse(_not_given(task, self._lease_s))
        del self._invited[task]
        self._last_heard_s[task] = now
        member = Member(event.address, incarnation)
        return self._publish({**self.arrangement.members, task: member}, "joined", task)

    # ------------------------------------------------------------ who leaves

    def _leave(self, task: TaskName, now: float) -> Iterable[Instruction]:
        member = self.arrangement.members.get(task)
        if member is not None and not member.leaves:
            self._last_heard_s.setdefault(task, now)
            members = {**self.arrangement.members, task: replace(member, leaves=True)}
            yield self._publish(members, "leaves", task)

    def _left(self, task: TaskName, incarnation: int) -> Iterable[Instruction]:
        member = self.arrangement.members.get(task)
        if member is None or incarnation not in {0, member.incarnation}:
            return
        # A task of the description that was not told to leave comes back.
        if member.incarnation or member.leaves:
            yield self._without(task, "left")

    def _gone(self, task: TaskName, incarnation: int) -> Iterable[Instruction]:
        member = self.arrangement.members.get(task)
        if member is None or member.incarnation != incarnation:
            return
        if incarnation or member.leaves:
            yield self._without(task, "left" if member.leaves else "lost")

    def _expire(self, now: float) -> list[Instruction]:
        for task in [t for t, one in self._invited.items() if now >= one.until]:
            del self._invited[task]
        silent = [
            task for task, at in self._last_heard_s.items() if now - at >= self._lease_s
        ]
        return [self._without(task, "lost") for task in silent]

    # ------------------------------------------------------------ the arrangement

    def _is_member(self, task: TaskName, incarnation: int) -> bool:
        member = self.joined.get(task)
        return member is not None and member.incarnation == incarnation

    def _without(self, task: TaskName, kind: str) -> Publish:
        self._last_heard_s.pop(task, None)
        members = self.arrangement.members.items()
        return self._publish({t: one for t, one in members if t != task}, kind, task)

    def _publish(
        self, members: Mapping[TaskName, Member], kind: str, task: TaskName
    ) -> Publish:
        ordered = {task: members[task] for task in sorted(members, key=_by_index)}
        self.arrangement = Arrangement(self.arrangement.number + 1, ordered)
        return Publish(self.arrangement, kind, task)

    def _adopt(self, newer: Arrangement, now: float) -> Iterable[Instruction]:
        if newer.number <= self.arrangement.number:
            return
        self.arrangement = newer
        self._last_heard_s = dict.fromkeys(self._may_be_lost, now)
        for task in newer.members:
            self._invited.pop(task, None)
        yield Publish(newer)


def _by_index(task: TaskName) -> tuple[str, int]:
    job, _, index = task.rpartition(":")
    return job, int(index)


def _no_such_job(job: str) -> JGError:
    return RescaleError(
        f"a task of job '{job[:80]}' would join, and only workers and parameter "
        "servers do: other tasks of a cluster are those that it began with; write "
        "--job worker, or --job ps"
    )


def _all_held(job: str, indices: Iterable[int]) -> JGError:
    listed = list(indices)
    which = f"{len(listed)}" if len(listed) > 8 else ", ".join(map(str, listed))
    return RescaleError(
        f"a process would join as a {job}, and its certificates are of index "
        f"{which or 'none'}, which other processes have; make more with `jgraph certs "
        "--spare 8`, and copy to each host those of one index",
        indices=listed[:8],
    )


def _not_given(task: TaskName, lease_s: float) -> JGError:
    return FencedError(
        f"{task} is not kept for this process any more: it did not serve within "
        f"{lease_s:g} s, or another one has the place; start it again",
        task=task,
    )
