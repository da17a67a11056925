"""Gate of one task in asynchronous training: measures and bounds staleness.

With a bound, the first ps decides for all who may read; see
``coordination.sync.admission``. The others wait for its word: one message per step.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import final

from jgraph.clock import SystemClock
from jgraph.errors import JGError, StaleGradientError
from jgraph.graph.ir import TaskName
from jgraph.runtime.rendezvous import StepKey
from jgraph.server.gates.waits import Waits


@final
class StaleGate:
    """A ``Gate`` of the runtime that notes versions, and waits for leave to read.

    Args:
      ask: asks the arbiter for leave; None: everybody may read at once.
      end: tells the arbiter that this task is done with a step.
      waits: where waiting steps are counted.
    """

    def __init__(
        self,
        ask: Callable[[StepKey], None] | None = None,
        end: Callable[[StepKey], None] = lambda step: None,
        waits: Waits | None = None,
    ) -> None:
        self.waits = waits or Waits(SystemClock())
        self._ask = ask
        self._end = end
        self._version = 0
        self._waiting: dict[StepKey, Callable[[], None]] = {}
        self._early: set[StepKey] = set()
        self._lost: set[str] = set()
        self._revoked: set[StepKey] = set()
        self._read_at: dict[StepKey, int] = {}
        self.updates: defaultdict[str, Counter[int]] = defaultdict(Counter)
        """Updates by program handle and staleness."""

    def ask(
        self,
        step: StepKey,
        let_in: Callable[[], None],
        refuse: Callable[[JGError], None],
    ) -> None:
        """See ``Gate``."""
        self._lost.discard(step[0])
        if step in self._revoked:
            self._revoked.discard(step)
            refuse(_too_old(step))
        elif self._ask is None or step in self._early:
            self._early.discard(step)
            self._enter(step, let_in)
        else:
            self._waiting[step] = let_in
            self.waits.begin(step)
            self._ask(step)

    def let_in(self, step: StepKey) -> None:
        """The arbiter lets a step read, maybe before it asks."""
        waiting = self._waiting.pop(step, None)
        if waiting is not None:
            self.waits.end(step)
            self._enter(step, waiting)
        elif step[0] in self._lost:
            self._revoke(step)
        else:
            self._early.add(step)

    def sent(self, step: StepKey, dst: TaskName) -> None:
        """See ``Gate``; nobody waits for that here."""

    def ended(self, step: StepKey, *, done: bool) -> None:
        """See ``Gate``."""
        if self._waiting.pop(step, None) is not None:
            self.waits.end(step)
        read_at = self._read_at.pop(step, None)
        if done and read_at is not None:
            self.updates[step[0]][self._version - read_at] += 1
            self._version += 1
        self._end(step)

    def replica_lost(self, handle: str) -> None:
        """A replica went away: steps that were let in and are not here never count.

        Should one come all the same, it is refused: others went past it meanwhile.
        """
        self._lost.add(handle)
        for step in [s for s in self._early if s[0] == handle]:
            self._early.discard(step)
            self._revoke(step)

    def _revoke(self, step: StepKey) -> None:
        self._revoked.add(step)
        self._end(step)

    def _enter(self, step: StepKey, let_in: Callable[[], None]) -> None:
        self._read_at[step] = self._version
        let_in()


def _too_old(step: StepKey) -> StaleGradientError:
    return StaleGradientError(
        f"step {step[1]} of '{step[0]}' would be older than max_staleness: its worker "
        "was away while others went on; it is computed anew"
    )
