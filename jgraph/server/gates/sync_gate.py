"""Gate of one ps in synchronous training, around ``coordination.sync.sync_gate``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, final

from jgraph.clock import SystemClock
from jgraph.coordination.sync.read_line import ReadLine
from jgraph.coordination.sync.sync_gate import (
    Choose,
    Closed,
    ContributionCame,
    Decided,
    Drop,
    Event,
    Instruction,
    Keep,
    KeepOf,
    LetIn,
    ReadSent,
    Refuse,
    StepAsked,
    StepEnded,
    Sum,
    Summed,
    SyncGate,
    Tell,
    TellDue,
    TellLater,
    TurnDue,
    TurnEnded,
    TurnLater,
    UpdateApplied,
    Voided,
)
from jgraph.errors import InternalError, JGError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.transport import Tensor
from jgraph.runtime.gate import Chosen, Contribution
from jgraph.runtime.rendezvous import StepKey
from jgraph.server.gates.timers import CallLater, Timer
from jgraph.server.gates.waits import Waits

if TYPE_CHECKING:
    from jgraph.server.gates.group_sums import GroupSums
    from jgraph.server.gates.host_sums import HostSums

WhenSent: TypeAlias = Callable[[TaskName, Callable[[], None]], None]


@final
@dataclass(slots=True)
class Turn:
    """What came in a turn of the event loop, before the machine is told of it.

    Attributes:
      contributed: the slots and values of steps.
      asked: steps that asked after one of those.
      settling: who asked when what a step contributed is settled.
    """

    contributed: dict[StepKey, tuple[int, Contribution]] = field(default_factory=dict)
    asked: dict[StepKey, None] = field(default_factory=dict)
    settling: list[tuple[StepKey, Callable[[], None]]] = field(default_factory=list)


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
      line: of those who read in turn; None: all read as soon as they may.
      when_sent: see ``Transport.when_sent``.
      many: there are many replicas; what comes in a turn of the event loop is taken
        together.
    """

    def __init__(
        self,
        version: int,
        tell: Callable[[Tell], None],
        call_later: CallLater,
        waits: Waits | None = None,
        sums: "GroupSums | None" = None,
        host_sums: "HostSums | None" = None,
        line: ReadLine | None = None,
        when_sent: WhenSent | None = None,
        *,
        many: bool = False,
    ) -> None:
        self.waits = waits or Waits(SystemClock())
        self.sums = sums
        self.host_sums = host_sums
        together = 0 if sums is None else sums.contributions
        self._machine = SyncGate(version, together=together, line=line)
        self._when_sent = when_sent if line is not None else None
        self._turn_timer: Timer | None = None
        self._tell = tell
        self._call_later = call_later
        self._timer: Timer | None = None
        self._asking: dict[
            StepKey, tuple[Callable[[], None], Callable[[JGError], None]]
        ] = {}
        self._new: tuple[StepKey, int, Contribution] | None = None
        self._turn = Turn() if many and sums is None and host_sums is None else None
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
        if self._turn is not None and self._turn.contributed:
            self._turn.asked[step] = None  # its replica may be one of those
        else:
            self._handle(StepAsked(step))

    def contribute(self, step: StepKey, slot: int, values: Contribution) -> None:
        """See ``Gate``."""
        if self._turn is not None:
            self._gather(self._turn, step, slot, values)
            return
        self._new = step, slot, values
        self._handle(ContributionCame(step, slot))
        self._new = None

    def _gather(
        self, turn: Turn, step: StepKey, slot: int, values: Contribution
    ) -> None:
        """Takes a contribution together with what else comes in this turn."""
        if not turn.contributed:
            self._call_later(0.0, partial(self._end, turn))
        turn.contributed.setdefault(step, (slot, values))

    def _end(self, turn: Turn) -> None:
        """Tells the machine what a turn has, before anything that came later."""
        if turn is not self._turn or not turn.contributed:
            return  # something came that it was told before
        self._turn = Turn()
        slots = tuple([slot for slot, _ in turn.contributed.values()])
        came = TurnEnded(tuple(turn.contributed), slots, tuple(turn.asked))
        for instruction in self._machine.handle(came):
            if isinstance(instruction, KeepOf):
                self._keep(turn, instruction.steps)
            else:
                self._perform(instruction)

    def _keep(self, turn: Turn, steps: Sequence[StepKey]) -> None:
        """Keeps what steps of a turn contributed; of others nothing waits here."""
        for step in steps:
            self._contributions[step] = turn.contributed[step][1]
        for step, callback in turn.settling:
            self.when_settled(step, callback)

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

    def sent(self, step: StepKey, dst: TaskName) -> None:
        """See ``Gate``."""
        if self._when_sent is not None:
            self._when_sent(dst, partial(self._has_read, step))

    def _has_read(self, step: StepKey) -> None:
        if self._when_sent is not None:  # else the gate was dropped meanwhile
            self._handle(ReadSent(step))

    def ended(self, step: StepKey, *, done: bool) -> None:
        """See ``Gate``."""
        self._asking.pop(step, None)
        self.waits.end(step)
        if self._turn is not None and step in self._turn.asked:
            del self._turn.asked[step]
        elif not self.keeps(step):  # else the machine knows that it is over
            self._handle(StepEnded(step))

    def keeps(self, step: StepKey) -> bool:
        """Whether what a step contributed waits here for a decision."""
        return step in self._contributions or self._is_new(step)

    def _is_new(self, step: StepKey) -> bool:
        return self._turn is not None and step in self._turn.contributed

    def when_settled(self, step: StepKey, callback: Callable[[], None]) -> None:
        """Calls back when what a step contributed was applied or forgotten."""
        if step in self._contributions:
            self._settled.append(callback)
        elif self._turn is not None and self._is_new(step):
            self._turn.settling.append((step, callback))
        else:
            callback()

    def settle(self) -> None:
        """Calls all back who wait for the end of what is kept."""
        settled, self._settled = self._settled, []
        for callback in settled:
            callback()

    def applied(self) -> None:
        """See ``Gate``."""
        # First: what is said here travels with what the next steps read.
        self.settle()
        self._handle(UpdateApplied())

    def decided(self, steps: Sequence[StepKey]) -> None:
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
        self.settle()
        turn, self._turn = self._turn, None
        if turn is not None:
            self._keep(turn, ())
        self._end_timer()
        self._when_sent = None
        if self._turn_timer is not None:
            self._turn_timer.cancel()
        self._end_sums()

    def _end_sums(self) -> None:
        for sums in (self.sums, self.host_sums):
            if sums is not None:
                sums.close()

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _handle(self, event: Event) -> None:
        if self._turn is not None:
            self._end(self._turn)
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
            case TurnLater(after_s):
                over = partial(self._handle, TurnDue())
                self._turn_timer = self._call_later(after_s, over)
            case Keep() | Drop() | Sum() | Choose():
                self._change(instruction)

    def _change(self, instruction: Keep | Drop | Sum | Choose) -> None:
        """Changes what is kept of contributions."""
        match instruction:
            case Keep():
                assert self._new is not None  # this is said of nothing else
                step, slot, values = self._new
                if self.sums is not None:
                    values = self.sums.memory.keep(self._machine.version, values)
                if self.host_sums is not None:
                    values = self.host_sums.keep(step, slot, values)
                self._contributions[step] = values
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
                    self._chosen = (self.sums.memory.joined(self._chosen),)
                if self.host_sums is not None:
                    self.host_sums.decided(tuple(steps))
