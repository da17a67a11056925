"""What the client of loops hears of them."""

from dataclasses import dataclass, replace
from typing import TypeAlias, final

from jgraph.cluster.loop_orders import (
    LoopReport,
    LoopRequest,
    ended_report,
    report_of,
)
from jgraph.coordination.loop_ends import Verdict
from jgraph.errors import JGError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.transport import Frame


@final
@dataclass(eq=False, slots=True)
class Loop:
    """A loop under way; of a detached run, the loops of a replica one by one."""

    request: LoopRequest
    name: str
    began_s: float
    """Since the run began."""
    next_step: int
    seen: int = 0
    """Number of its last report."""

    def note(self, report: LoopReport) -> bool:
        """Takes note of a report; returns whether it is of another loop than before."""
        is_another = report.loop not in {"", self.name}
        if is_another:
            self.name, self.seen = report.loop, 0
            if report.handle != self.request.handle:
                self.request = replace(self.request, handle=report.handle)
        self.seen = max(self.seen, report.number)
        if len(report.steps):
            self.next_step = int(report.steps[-1]) + 1
        return is_another

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

    def stop_order(self, run: str, epoch: int, *, account: bool = False) -> pb.StopLoop:
        """Returns what ends it; with ``account`` also asks what nobody has heard of."""
        return pb.StopLoop(
            loop=self.name,
            task=self.request.task,
            account=account,
            after=self.seen,
            timeout_s=self.request.step_timeout_s,
            run=run,
            epoch=epoch,
        )


@final
@dataclass(frozen=True, slots=True)
class Ended:
    """A loop's reports ended with an error that may not be one of the run.

    Attributes:
      loop: which.
      error: the error.
      master: relayed its reports, under an epoch.
      epoch: likewise.
      verdict: what the error means.
    """

    loop: Loop
    error: JGError
    master: TaskName
    epoch: int
    verdict: Verdict


@final
@dataclass(frozen=True, slots=True)
class TaskLeaves:
    """A task was told to end, and waits until it is let go."""

    task: TaskName


Item: TypeAlias = (
    tuple[Loop, LoopReport | None] | LoopRequest | JGError | Ended | TaskLeaves
)
"""None: the loops of a replica have ended, of a detached run."""
