"""The gate of one ps in synchronous training, performed."""

from collections.abc import Callable, Sequence
from typing import final

from jgraph.coordination.sync_gate import (
    Choose,
    Closed,
    ContributionCame,
    Decided,
    Drop,
    Event,
    Keep,
    LetIn,
    Refuse,
    StepAsked,
    StepEnded,
    SyncGate,
    Tell,
    UpdateApplied,
    Voided,
)
from jgraph.errors import InternalError, JGError
from jgraph.runtime.gate import Contribution
from jgraph.runtime.rendezvous import StepKey


@final
class SyncShard:
    """Performs what a ``SyncGate`` says; a ``Gate`` of the runtime.

    Args:
      version: updates applied so far.
      tell: carries news to the arbiter.
    """

    def __init__(self, version: int, tell: Callable[[Tell], None]) -> None:
        self._machine = SyncGate(version)
        self._tell = tell
        self._asking: dict[
            StepKey, tuple[Callable[[], None], Callable[[JGError], None]]
        ] = {}
        self._new: Contribution = {}
        self._kept: dict[StepKey, Contribution] = {}
        self._chosen: tuple[Contribution, ...] = ()

    def ask(
        self,
        step: StepKey,
        let_in: Callable[[], None],
        refuse: Callable[[JGError], None],
    ) -> None:
        """See ``Gate``."""
        self._asking[step] = let_in, refuse
        self._handle(StepAsked(step))

    def contribute(self, step: StepKey, slot: int, values: Contribution) -> None:
        """See ``Gate``."""
        self._new = values
        self._handle(ContributionCame(step, slot))
        self._new = {}

    def chosen(self) -> Sequence[Contribution]:
        """See ``Gate``."""
        chosen, self._chosen = self._chosen, ()
        if not chosen:
            raise InternalError("an update was started that nothing was chosen for")
        return chosen

    def ended(self, step: StepKey, *, done: bool) -> None:
        """See ``Gate``."""
        self._asking.pop(step, None)
        self._handle(StepEnded(step))

    def applied(self) -> None:
        """See ``Gate``."""
        self._handle(UpdateApplied())

    def decided(self, steps: tuple[StepKey, ...]) -> None:
        """The arbiter chose these contributions, in this order."""
        self._handle(Decided(steps))

    def voided(self, step: StepKey) -> None:
        """The arbiter cannot use what a step contributed."""
        self._handle(Voided(step))

    def closed(self, error: JGError) -> None:
        """The arbiter decides nothing more."""
        self._handle(Closed(error))
        self._kept.clear()

    def _handle(self, event: Event) -> None:
        for instruction in self._machine.handle(event):
            match instruction:
                case LetIn(step):
                    self._asking.pop(step)[0]()
                case Refuse(step, error):
                    self._asking.pop(step)[1](error)
                case Keep(step):
                    self._kept[step] = self._new
                case Drop(step):
                    self._kept.pop(step, None)
                case Tell():
                    self._tell(instruction)
                case Choose(steps):
                    self._chosen = tuple(self._kept[step] for step in steps)
                    self._kept.clear()
