"""Gate of one ps in synchronous training, around ``coordination.sync.sync_gate``.

What comes in one turn of the event loop is told to the machine at its end, in sets:
what thousands of workers say costs little more than what one does.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, final

from jgraph.clock import SystemClock
from jgraph.coordination.sync.sync_gate import (
    Choose,
    Closed,
    ContributionsCame,
    Decided,
    Drop,
    Event,
    Instruction,
    Keep,
    LetIn,
    Refuse,
    StepsAsked,
    StepsEnded,
    Sum,
    Summed,
    SyncGate,
    Tell,
    TellDue,
    TellLater,
    UpdateApplied,
    Voided,
)
from jgraph.errors import InternalError, JGError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.transport import Tensor
from jgraph.runtime.gate import Chosen, Contribution
from jgraph.runtime.rendezvous import StepKey
from jgraph.server.gates.timers import CallLater, Soon, Timer, at_once
from jgraph.server.gates.waits import Waits

if TYPE_CHECKING:
    from jgraph.server.gates.group_sums import GroupSums
    from jgraph.server.gates.host_sums import HostSums


@final
class SyncGateShell:
    """Performs what a ``SyncGate`` says; an ``Aggregator`` of the runtime.

    Args:
      version: updates applied so far.
      tell: tells the arbiter of contributions.
      call_later: waits.
      waits: where waiting steps are counted.
      sums: sums what is contributed, together with other tasks; None: each is averaged
        here.
      host_sums: sums what leaves this host, and has the sums of others; None: there
        are none.
      soon: calls back at the end of this turn of the event loop; by default at once.
    """

    def __init__(
        self,
        version: int,
        tell: Callable[[Tell], None],
        call_later: CallLater,
        waits: Waits | None = None,
        sums: "GroupSums | None" = None,
        host_sums: "HostSums | None" = None,
        soon: Soon = at_once,
    ) -> None:
        self.waits = waits or Waits(SystemClock())
        self.sums = sums
        self.host_sums = host_sums
        together = 0 if sums is None else sums.contributions
        self._machine = SyncGate(version, together=together)
        self._tell = tell
        self._call_later = call_later
        self._timer: Timer | None = None
        self._asking: dict[
            StepKey, tuple[Callable[[], None], Callable[[JGError], None]]
        ] = {}
        # What came in this turn of the event loop, and is not told to the machine yet.
        self._soon = soon
        self._is_soon = False
        self._new: dict[StepKey, tuple[int, Contribution]] = {}
        self._new_asks: dict[StepKey, None] = {}
        self._new_ends: list[StepKey] = []
        # What the machine is told of now: not all is kept.
        self._pending: dict[StepKey, tuple[int, Contribution]] = {}
        self._refuse_update: Callable[[JGError], None] | None = None
        self._contributions: dict[StepKey, Contribution] = {}
        self._chosen: tuple[Contribution, ...] = ()
        self._settled: list[Callable[[], None]] = []
        self.is_closed = False
        """Whether nothing more is decided."""

    def ask(
        self,
        step: StepKey,
        let_in: Callable[[], None],
        refuse: Callable[[JGError], None],
    ) -> None:
        """See ``Gate``."""
        self._asking[step] = let_in, refuse
        self.waits.begin(step)
        self._new_asks[step] = None
        self._flush_soon()

    def contribute(self, step: StepKey, slot: int, values: Contribution) -> None:
        """See ``Gate``."""
        self._new[step] = slot, values
        self._flush_soon()

    def ask_update(
        self, let_in: Callable[[], None], refuse: Callable[[JGError], None]
    ) -> None:
        """See ``Aggregator``."""
        if self.host_sums is None:
            let_in()
            return
        self._refuse_update = refuse

        def start() -> None:
            self._refuse_update = None
            let_in()

        self.host_sums.when_here(start)

    def chosen(self) -> Chosen:
        """See ``Aggregator``."""
        chosen, self._chosen = self._chosen, ()
        if not chosen:
            raise InternalError("an update was started that nothing was chosen for")
        if self.host_sums is not None:
            return self.host_sums.chosen(chosen)
        return Chosen(chosen)

    def ended(self, step: StepKey, *, done: bool) -> None:
        """See ``Gate``."""
        self._asking.pop(step, None)
        self.waits.end(step)
        if step in self._new_asks:
            del self._new_asks[step]
        elif not self.keeps(step):
            self._new_ends.append(step)
            self._flush_soon()

    def keeps(self, step: StepKey) -> bool:
        """Whether what a step contributed waits here for a decision."""
        return step in self._contributions or step in self._new or step in self._pending

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Calls back when what is kept now was applied or forgotten."""
        self._settled.append(callback)

    def settle(self) -> None:
        """Calls all back who wait for the end of what is kept."""
        settled, self._settled = self._settled, []
        for callback in settled:
            callback()

    def applied(self) -> None:
        """See ``Gate``."""
        # First: what is said here travels with what the next steps read.
        self._flush()
        self.settle()
        self._handle(UpdateApplied())

    def decided(self, steps: tuple[StepKey, ...]) -> None:
        """The arbiter chose these contributions, in this order."""
        self._handle(Decided(steps))

    def voided(self, step: StepKey) -> None:
        """The arbiter cannot use what a step contributed."""
        self._handle(Voided(step))
        self.settle()

    def summed(self) -> None:
        """The sum of all contributions is here."""
        self._handle(Summed())

    def sums_said(
        self, src: TaskName, event: pb.GateEvent, tensors: Sequence[Tensor]
    ) -> None:
        """Another task tells of sums; nothing to a gate that has none.

        Raises:
          MalformedMessageError: what it sends is not of its size.
        """
        if event.HasField("group") and self.sums is not None:
            self.sums.received(src, event.group, tensors)
        elif event.HasField("host_sum") and self.host_sums is not None:
            self.host_sums.received(src, event.host_sum, tensors)

    def closed(self, error: JGError) -> None:
        """The arbiter decides nothing more."""
        self._flush()
        self.is_closed = True
        self._end_sums()
        if self._refuse_update is not None:
            refuse, self._refuse_update = self._refuse_update, None
            refuse(error)
        self.settle()
        self._handle(Closed(error))
        self._contributions.clear()

    def drop(self) -> None:
        """Ends the gate; nothing more is told."""
        self._flush()
        self.settle()
        self._end_timer()
        self._end_sums()

    def _end_sums(self) -> None:
        for sums in (self.sums, self.host_sums):
            if sums is not None:
                sums.close()

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _flush_soon(self) -> None:
        if not self._is_soon:
            self._is_soon = True
            self._soon(self._flush)

    def _flush(self) -> None:
        """Tells the machine what came in this turn."""
        self._is_soon = False
        if new := self._new:
            self._new = {}
            self._pending.update(new)
            slots = {step: slot for step, (slot, _) in new.items()}
            self._tell_machine(ContributionsCame(slots))
            late = self._pending.keys() & new
            for step in late:
                del self._pending[step]
            if late:
                self.settle()  # what is not kept waits for no decision
        if ends := self._new_ends:
            self._new_ends = []
            self._tell_machine(StepsEnded(ends))
        if asks := self._new_asks:
            self._new_asks = {}
            self._tell_machine(StepsAsked(tuple(asks)))

    def _handle(self, event: Event) -> None:
        self._flush()  # that came before
        self._tell_machine(event)

    def _tell_machine(self, event: Event) -> None:
        for instruction in self._machine.handle(event):
            self._perform(instruction)

    def _perform(self, instruction: Instruction) -> None:
        match instruction:
            case LetIn(steps):
                for step in steps:
                    self.waits.end(step)
                    self._asking.pop(step)[0]()
            case Refuse(step, error):
                self.waits.end(step)
                self._asking.pop(step)[1](error)
            case Tell():
                self._tell(instruction)
            case TellLater(after_s):
                self._end_timer()
                due = partial(self._handle, TellDue())
                self._timer = self._call_later(after_s, due)
            case Keep() | Drop() | Sum() | Choose():
                self._change(instruction)

    def _change(self, instruction: Keep | Drop | Sum | Choose) -> None:
        """Changes what is kept of contributions."""
        match instruction:
            case Keep(steps):
                for step in steps:
                    self._keep(step, *self._pending.pop(step))
            case Drop(step):
                self._contributions.pop(step, None)
                if self.host_sums is not None:
                    self.host_sums.drop(step)
            case Sum(version):
                assert self.sums is not None  # so they are summed together
                self.sums.all_contributed(version)
            case Choose(steps):
                self._chosen = tuple(self._contributions[step] for step in steps)
                self._contributions.clear()
                if self.sums is not None:
                    self.sums.decided()
                    self._chosen = (self.sums.joined(self._chosen),)
                if self.host_sums is not None:
                    self.host_sums.decided(steps)

    def _keep(self, step: StepKey, slot: int, values: Contribution) -> None:
        if self.sums is not None:
            values = self.sums.keep(self._machine.version, values)
        if self.host_sums is not None:
            values = self.host_sums.keep(step, slot, values)
        self._contributions[step] = values
