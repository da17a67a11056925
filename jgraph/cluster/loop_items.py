"""What the client of loops hears of them."""

from dataclasses import dataclass
from typing import TypeAlias, final

from jgraph.cluster.loop_orders import LoopReport, LoopRequest
from jgraph.coordination.loop_ends import Verdict
from jgraph.errors import JGError
from jgraph.graph.ir import TaskName


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


Item: TypeAlias = tuple[Loop, LoopReport] | LoopRequest | JGError | Ended
