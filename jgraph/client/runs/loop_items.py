"""Items of a run's report queue at the client: loops, errors, draining tasks."""

import math
from dataclasses import dataclass, replace
from typing import TypeAlias, final

from jgraph.cluster.loop_messages import (
    LoopReport,
    LoopRequest,
    ended_report,
    report_of,
)
from jgraph.coordination.run.loop_outcome import LoopOutcome
from jgraph.errors import JGError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.transport import Frame


@final
@dataclass(eq=False, slots=True)
class Loop:
    """A loop under way."""

    request: LoopRequest
    name: str
    began_s: float
    """Since the run began."""
    next_step: int
    seen: int = 0
    """Number of its last report."""
    late_s: float = math.inf
    """How much later than its order it began, at most."""

    def dated(self, report: LoopReport, came_s: float) -> LoopReport:
        """Returns a report with how much later than its order the loop began.

        Each report tells that by when it came; the one that was on its way for the
        shortest time tells it best.

        Args:
          report: with times since the loop began.
          came_s: when it came, since the run began.

        Example:
          >>> request = LoopRequest(TaskName("worker"), "h", "data", 1, 1)
          >>> told = ended_report(request)
          >>> loop = Loop(request, "loop", began_s=2.0, next_step=0)
          >>> loop.dated(replace(told, sent_s=1.0), came_s=3.5).began_s
          0.5
          >>> loop.dated(replace(told, sent_s=2.0), came_s=4.75).began_s
          0.5
        """
        self.late_s = min(self.late_s, max(0.0, came_s - self.began_s - report.sent_s))
        return replace(report, began_s=self.late_s)

    def note(self, report: LoopReport) -> None:
        """Takes note of a report."""
        self.seen = max(self.seen, report.number)
        if len(report.steps):
            self.next_step = int(report.steps[-1]) + 1

    def accounted(self, account: Frame | JGError) -> LoopReport | None:
        """Returns what it did, as its task told another master; None: it did not.

        A loop that decides and was never begun never will be, as orders of the master
        before are refused: so it has ended.
        """
        if not isinstance(account, JGError):
            return report_of(self.request, account)
        if self.request.sync is None or account.details.get("loop") != self.name:
            return None
        return ended_report(self.request)

    def stop_order(self, run: str, term: int, *, account: bool = False) -> pb.StopLoop:
        """Returns what ends it; with ``account`` also asks what nobody has heard of."""
        return pb.StopLoop(
            loop=self.name,
            task=self.request.task,
            account=account,
            after=self.seen,
            timeout_s=self.request.step_timeout_s,
            run=run,
            term=term,
        )


@final
@dataclass(frozen=True, slots=True)
class Ended:
    """A loop's reports ended with an error that may not be one of the run.

    Attributes:
      loop: which.
      error: the error.
      master: relayed its reports, under a term.
      term: likewise.
      verdict: what the error means.
    """

    loop: Loop
    error: JGError
    master: TaskName
    term: int
    verdict: LoopOutcome


@final
@dataclass(frozen=True, slots=True)
class TaskDraining:
    """A task was told to end, and waits until it is let go."""

    task: TaskName


Item: TypeAlias = tuple[Loop, LoopReport] | LoopRequest | JGError | Ended | TaskDraining
