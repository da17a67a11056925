"""Election of a run's next master among the standbys of the one that was lost.

A journal is written by its master alone, and its standbys read it without being waited
for. So no majority has an entry for certain, as in Raft. In its place a candidate asks
all tasks, takes a term that no other task can take, lets the tasks refuse all earlier
masters, and then reads what any task that answers has of the journal beyond its own
part. What no journal has, the loops tell: each keeps its newest reports.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, TypeAlias, final

from jgraph.coordination.liveness.members import JOBS, MOST
from jgraph.graph.ir import TaskName

SILENT_S: Final = 20.0
"""A standby that does not answer for so long is not waited for any more."""


@final
@dataclass(frozen=True, slots=True)
class JournalEnd:
    """How far a task knows a run.

    Attributes:
      master: whose journal it has.
      process: of that master.
      term: of that master.
      frames: entries of the journal.
      is_over: the last of them says that the run is over.
    """

    master: TaskName
    process: int
    term: int
    frames: int
    is_over: bool = False

    def is_of(self, other: "JournalEnd") -> bool:
        """Whether both are of one journal, which one master writes."""
        mine, its = (self.master, self.process), (other.master, other.process)
        return mine == its and self.term == other.term


@final
@dataclass(frozen=True, slots=True)
class Follow:
    """The master is there: read on."""


@final
@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again in a while: a task comes first, or may know more."""

    task: TaskName


@final
@dataclass(frozen=True, slots=True)
class Over:
    """The run is over; its end is read from a task."""

    task: TaskName


@final
@dataclass(frozen=True, slots=True)
class Leave:
    """Another task knows more: a standby of a later master, or one that has read."""

    task: TaskName


@final
@dataclass(frozen=True, slots=True)
class TakeOver:
    """Be the next master, with this term."""

    term: int


Verdict: TypeAlias = Follow | Wait | Over | Leave | TakeOver


@final
class Election:
    """What a standby does whose master is lost, from what the other tasks answer.

    Terms strictly grow, and no two tasks ever take the same one: those of a task are
    its number among all tasks, modulo how many there are. Where workers join, one task
    may know of more than another: the number is then that of its job and index, modulo
    what these can be.

    Args:
      task: the standby.
      tasks: all of the cluster.
      now: when the master was lost, in seconds.
      elastic: workers join the run.
    """

    def __init__(
        self,
        task: TaskName,
        tasks: Collection[TaskName],
        now: float,
        *,
        elastic: bool = False,
    ) -> None:
        self._task = task
        self._number, self._tasks = sorted(tasks).index(task), len(tasks)
        if elastic:
            self._number, self._tasks = _number_of(task, tasks)
        self._began_s = now
        self._newest = 0

    def refused(self, term: int) -> None:
        """A task has heard of a later term than the one that was taken."""
        self._newest = max(self._newest, term)

    def decide(
        self,
        own: JournalEnd,
        answers: Mapping[TaskName, JournalEnd],
        silent: Collection[TaskName],
        standbys: Sequence[TaskName],
        now: float,
        *,
        has_read: bool = True,
        is_forced: bool = False,
    ) -> Verdict:
        """Returns what to do.

        Args:
          own: how far this standby has read.
          answers: of the other tasks that know of the run.
          silent: tasks that do not answer, and whose processes may be there.
          standbys: of the lost master, who comes first being first.
          now: seconds.
          has_read: this standby has read all that there was when it was invited.
          is_forced: replace a master that is there: it leaves, or its client misses it.
        """
        known = [own, *answers.values()]
        self._newest = max(self._newest, *(end.term for end in known))
        verdict = _of_the_run(own, answers)
        if verdict is not None:
            return verdict
        master = answers.get(own.master)
        if not is_forced and master is not None and own.is_of(master):
            return Follow()
        if not has_read and answers:
            return Leave(max(answers, key=lambda task: (answers[task].term, task)))
        for task in takewhile(lambda task: task != self._task, standbys):
            if task in answers and own.is_of(answers[task]):
                return Wait(task)
        if now - self._began_s < SILENT_S:
            for task in filter(set(silent).__contains__, standbys):
                return Wait(task)
        newest, count = self._newest, self._tasks
        return TakeOver(newest + 1 + (self._number - newest - 1) % count)

    @staticmethod
    def longer(
        own: JournalEnd, answers: Mapping[TaskName, JournalEnd]
    ) -> list[TaskName]:
        """Returns who has more of the same journal, the longest first."""
        same = {task: end for task, end in answers.items() if end.is_of(own)}
        longer = [task for task, end in same.items() if end.frames > own.frames]
        return sorted(longer, key=lambda task: (-answers[task].frames, task))


def _number_of(task: TaskName, tasks: Collection[TaskName]) -> tuple[int, int]:
    """Returns the number of a task, whoever else has joined, and how many there are.

    Example:
      >>> names = ["/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"]
      >>> tasks = [TaskName(name) for name in names]
      >>> [_number_of(task, tasks) for task in tasks]
      [(0, 8192), (1, 8192), (3, 8192)]
      >>> _number_of(tasks[0], tasks[:1])
      (0, 8192)
    """
    named = [task.removeprefix("/job:").partition("/task:") for task in tasks]
    jobs = sorted({job for job, _, _ in named} | JOBS)
    job, _, index = task.removeprefix("/job:").partition("/task:")
    return int(index) * len(jobs) + jobs.index(job), MOST * len(jobs)


def _of_the_run(
    own: JournalEnd, answers: Mapping[TaskName, JournalEnd]
) -> Verdict | None:
    """Returns what to do where the run is over, or has a later master; else None."""
    for task, end in answers.items():
        if end.is_over and end.term >= own.term:
            return Over(task)
    later = {task: end for task, end in answers.items() if end.term > own.term}
    for task, end in later.items():
        if task != end.master and end.frames > own.frames:
            return Leave(task)
    if later:  # perhaps its master invites this task
        return Wait(max(later, key=lambda task: (later[task].term, task)))
    return None
