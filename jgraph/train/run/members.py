"""Members of a run: its workers, since when, and their shares of the batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final, overload

from jgraph.cluster.loop_messages import ARBITER, LoopReport
from jgraph.graph.device import TaskName, is_ps
from jgraph.view import markup


@final
@dataclass(frozen=True, slots=True)
class RunMember:
    """A worker of a run.

    Attributes:
      task: its name.
      state: "takes part", "left": it was told to end and has handed over, or "lost".
      since_s: when it began to take part, or ended, in seconds since the run began.
      batches: that it has computed, all its loops together; pieces of them where
        workers share the batch of an update.
      share: of the batches of all.
    """

    task: TaskName
    state: str
    since_s: float
    batches: int = 0
    share: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.task}  {self.state} since {self.since_s:.1f} s  "
            f"{self.batches} batches  {self.share:.0%}"
        )


@final
class RunMembers(Sequence[RunMember]):
    """The workers of a run, those that have left included; a table in a notebook.

    Args:
      members: in the order in which they first took part.
    """

    def __init__(self, members: Sequence[RunMember] = ()) -> None:
        self._members = tuple(members)

    @overload
    def __getitem__(self, index: int) -> RunMember: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RunMember]: ...
    def __getitem__(self, index: int | slice) -> RunMember | Sequence[RunMember]:
        return self._members[index]

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[RunMember]:
        return iter(self._members)

    def __repr__(self) -> str:
        return "\n".join(map(str, self._members)) or "no worker has taken part"

    def _repr_html_(self) -> str:
        columns = "worker", "state", "since", "batches", "share"
        rows = [
            (m.task, m.state, f"{m.since_s:.1f} s", m.batches, f"{m.share:.0%}")
            for m in self._members
        ]
        return markup.table(columns, rows)


@final
class MemberBook:
    """Learns from the reports of a run's loops who takes part.

    Example:
      >>> book = MemberBook()
      >>> book.began(TaskName("/job:worker/task:0"), 0.0)
      >>> book.did(TaskName("/job:worker/task:0"), 3)
      >>> book.members()
      /job:worker/task:0  takes part since 0.0 s  3 batches  100%
    """

    def __init__(self) -> None:
        self._members: dict[TaskName, RunMember] = {}

    def began(self, task: TaskName, at_s: float) -> None:
        """A loop of a worker began."""
        known = self._members.get(task, RunMember(task, "", at_s))
        if known.state != "takes part":
            self._members[task] = replace(known, state="takes part", since_s=at_s)

    def did(self, task: TaskName, batches: int) -> None:
        """A worker has computed so many batches more."""
        if (known := self._members.get(task)) is not None:
            self._members[task] = replace(known, batches=known.batches + batches)

    def ended(self, task: TaskName, state: str, at_s: float) -> None:
        """A worker takes part no more: it is "left" or "lost"."""
        if (known := self._members.get(task)) is not None:
            self._members[task] = replace(known, state=state, since_s=at_s)

    def note(self, report: LoopReport) -> None:
        """Takes a report of a loop."""
        task = report.task
        decides = is_ps(task) or report.replica == ARBITER
        of_run = report.restored, report.rescaled, report.homes
        if decides or any(one is not None for one in of_run):
            return  # of no worker
        self.did(task, report.batches)
        if report.handle:
            self.began(task, report.told_s)
        elif report.state == "left":
            since_s = self._members[task].since_s if task in self._members else 0.0
            self.ended(task, "left", since_s + report.told_s)
        elif report.state == "lost":
            self.ended(task, "lost", report.told_s)

    def members(self) -> RunMembers:
        """Returns who takes part now, and who did."""
        total = sum(member.batches for member in self._members.values()) or 1
        return RunMembers(
            [replace(m, share=m.batches / total) for m in self._members.values()]
        )
