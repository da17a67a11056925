"""Replica loop: pipelined steps of one worker, driven by the worker's own server.

A step is *computed* when the worker's part is done (its gradients are on their way)
and *acknowledged* when every task has applied its updates. The next step starts as
soon as one is computed, but never more than ``max_outstanding`` are unacknowledged:
the ps keep the steps of one replica in order, so a read of step k+1 sees the update of
step k without a round trip for it.

With ``prefetch`` a step starts while the one before is computed: its read does not wait
for the update of that one, and is a step older.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias, final

from jgraph.errors import JGError


@final
@dataclass(frozen=True, slots=True)
class LoopStarted:
    """The shell is ready to run steps."""


@final
@dataclass(frozen=True, slots=True)
class StepComputed:
    """The worker's part of a step is done."""

    step: int


@final
@dataclass(frozen=True, slots=True)
class StepAcknowledged:
    """Every task has done its part of a step."""

    step: int


@final
@dataclass(frozen=True, slots=True)
class StepFailed:
    """A step ended with an error."""

    step: int
    error: JGError


@final
@dataclass(frozen=True, slots=True)
class StepRefused:
    """A step was not let in because it would be too old; its batch counts again."""

    step: int


@final
@dataclass(frozen=True, slots=True)
class StepUnwanted:
    """A step was not let in because the run needs no more."""

    step: int


@final
@dataclass(frozen=True, slots=True)
class StepUnwell:
    """The worker's part of a step is done, and the step must not be applied.

    No task applies it; it is acknowledged as any other.
    """

    step: int
    error: JGError


@final
@dataclass(frozen=True, slots=True)
class StepNotStarted:
    """The step that was to start last has no data; with ``over`` no step will have."""

    over: bool


@final
@dataclass(frozen=True, slots=True)
class HaltAsked:
    """Somebody asked to start no more steps for a while, in an order of this number."""

    number: int


@final
@dataclass(frozen=True, slots=True)
class GoOnAsked:
    """What was to be done meanwhile is done."""

    number: int


@final
@dataclass(frozen=True, slots=True)
class StopAsked:
    """Somebody asked the loop to stop after the steps in flight."""


Event: TypeAlias = (
    LoopStarted
    | StepComputed
    | StepAcknowledged
    | StepFailed
    | StepRefused
    | StepUnwanted
    | StepUnwell
    | StepNotStarted
    | HaltAsked
    | GoOnAsked
    | StopAsked
)


@final
@dataclass(frozen=True, slots=True)
class StartStep:
    """Start the step with this number."""

    step: int


@final
@dataclass(frozen=True, slots=True)
class Report:
    """Tell the watcher what has been computed since the last report."""


@final
@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the watcher how many batches are done, and no more."""


@final
@dataclass(frozen=True, slots=True)
class Halted:
    """Report, and say that no step starts: so many may still be applied."""

    number: int
    in_flight: int


@final
@dataclass(frozen=True, slots=True)
class End:
    """The loop is over: ``state`` is "done", "stopped" or "failed"."""

    state: str
    error: JGError | None = None


Instruction: TypeAlias = StartStep | Report | Tell | Halted | End

UNACKNOWLEDGED: Final = 2
"""Steps that a loop has started and that are not acknowledged, without ``prefetch``."""


@final
class ReplicaLoop:
    """State machine of one replica's loop.

    Args:
      first_step: number of the first step.
      steps: how many steps to run at most.
      report_every_s: least time between reports, in seconds.
      max_outstanding: most steps started and not acknowledged, beside ``prefetch``.
      prefetch: steps started while the one before is computed.
      tell_every: say how many are done after so many steps, if no report does; 0: no.

    Example:
      >>> loop = ReplicaLoop(first_step=0, steps=1)
      >>> loop.handle(LoopStarted(), now=0.0)
      [StartStep(step=0)]
      >>> loop.handle(StepComputed(0), now=0.1)
      []
      >>> loop.handle(StepAcknowledged(0), now=0.1)
      [Report(), End(state='done', error=None)]
    """

    def __init__(
        self,
        *,
        first_step: int,
        steps: int,
        report_every_s: float = 0.25,
        max_outstanding: int = UNACKNOWLEDGED,
        prefetch: int = 0,
        tell_every: int = 0,
    ) -> None:
        self._next = first_step
        self._end = first_step + steps
        self._report_every_s = report_every_s
        self._max_outstanding = max_outstanding + prefetch
        self._prefetch = prefetch
        self._outstanding = 0
        self._tell_every = tell_every
        self._untold = 0  # acknowledged
        self._halted = 0
        self._computing: set[int] = set()
        self._stopping = False
        self._over = False
        self._unwell: JGError | None = None
        self._reported_at: float | None = None

    @property
    def halted(self) -> int:
        """The number of the order by which it stands still; 0: it does not."""
        return 0 if self._over else self._halted

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Takes an event at time ``now`` (seconds); returns what to do."""
        if self._over:
            return []
        if self._reported_at is None:
            self._reported_at = now
        match event:
            case LoopStarted():
                return self._go_on()
            case StepComputed(step):
                self._computing.discard(step)
                return [*self._maybe_report(now), *self._go_on()]
            case StepAcknowledged():
                self._outstanding -= 1
                self._untold += 1
                return [*self._maybe_tell(), *self._go_on()]
            case HaltAsked() | GoOnAsked():
                return self._halt(event)
            case StepFailed(_, error):
                self._over = True
                return [Report(), End("failed", self._unwell or error)]
            case StepRefused() | StepUnwanted() | StepNotStarted():
                return self._take_back(event)
            case StopAsked() | StepUnwell():
                return self._stop(event)

    def _halt(self, event: HaltAsked | GoOnAsked) -> list[Instruction]:
        match event:
            case HaltAsked(number):
                self._halted = number
                return [Halted(number, self._outstanding)]
            case GoOnAsked(number) if number == self._halted:
                self._halted = 0
        return self._go_on()

    def _take_back(
        self, event: StepRefused | StepUnwanted | StepNotStarted
    ) -> list[Instruction]:
        """Counts a step as not under way, unless it is to be computed anew."""
        match event:
            case StepRefused(step) if self._unwell is None:
                self._computing.add(step)
                return [StartStep(step)]
            case StepNotStarted(over):
                self._next -= 1
                self._end = self._next if over else self._end
                self._computing.discard(self._next)
            case StepUnwanted(step) | StepRefused(step):
                self._computing.discard(step)
                self._stopping = True
        self._outstanding -= 1
        return self._go_on()

    def _stop(self, event: StopAsked | StepUnwell) -> list[Instruction]:
        """Starts no more steps."""
        self._stopping = True
        if isinstance(event, StepUnwell):
            self._computing.discard(event.step)
            self._unwell = self._unwell or event.error
        return self._go_on()

    def _maybe_report(self, now: float) -> list[Instruction]:
        if self._reported_at is None or now - self._reported_at < self._report_every_s:
            return []
        self._reported_at, self._untold = now, 0
        return [Report()]

    def _maybe_tell(self) -> list[Instruction]:
        if not self._tell_every or self._untold < self._tell_every:
            return []
        self._untold = 0
        return [Tell()]

    def _go_on(self) -> list[Instruction]:
        started: list[Instruction] = []
        while self._may_start():
            self._computing.add(self._next)
            self._outstanding += 1
            started.append(StartStep(self._next))
            self._next += 1
        if started or self._outstanding or self._is_wanted:
            return started
        self._over = True
        if self._unwell is not None:
            return [Report(), End("failed", self._unwell)]
        state = "done" if self._next >= self._end else "stopped"
        return [Report(), End(state)]

    @property
    def _is_wanted(self) -> bool:
        """Whether one more step is to be run."""
        return not self._stopping and self._next < self._end

    def _may_start(self) -> bool:
        return (
            self._is_wanted
            and not self._halted
            and len(self._computing) <= self._prefetch
            and self._outstanding < self._max_outstanding
        )
