"""Rescaler of a run on its master: acts for the ``Rescale`` of its ps."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, final

from jgraph.clock import Clock
from jgraph.coordination.run.rescale import (
    AGAIN_S,
    Drop,
    Event,
    Fence,
    GoOn,
    Instruction,
    Known,
    Move,
    Moved,
    NotMoved,
    NotPrepared,
    Prepare,
    Prepared,
    Rescale,
    Rested,
    Retire,
    StateLost,
    Switch,
    Tell,
    TimePassed,
    Wanted,
    wanted_ps,
)
from jgraph.errors import ClusterUnreachableError, JGError, RescaleError, TaskLostError
from jgraph.failpoints import failpoint
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.server.runs.copies import NextCopies, RunCopies
from jgraph.server.runs.journal import Journal
from jgraph.server.runs.losses import RunLosses
from jgraph.server.runs.peers import LoopPeers, check_master, ready_tasks
from jgraph.server.runs.ps_setup import PsSetup, first_step_of, ps_task
from jgraph.server.runs.rescaling.arrangements import RunArrangements, Transfer
from jgraph.server.runs.rescaling.mover import Mover
from jgraph.server.runs.run_client import RunClient
from jgraph.server.runs.run_loops import LoopOrders
from jgraph.server.runs.worker_setup import WorkerSetup
from jgraph.view.units import bytes_text

_LOG: Final = logging.getLogger("jgraph.recover")
_TELL_S: Final = 10.0
"""So long loops wait for a client that is there, and does not answer."""
_TERM_SHIFT: Final = 32
"""What each master gives up has numbers of its own."""
Do: TypeAlias = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


@final
@dataclass(slots=True)
class _Attempt:
    """A rescale under way.

    Attributes:
      ps: how many there are to be.
      name: of this time.
      transfers: what goes where.
      began_s: when it was asked.
      handles: of the programs of the next loops, by the first ones.
      preparing: gives programs.
      rested_s: since when no loop runs.
      has_dropped: programs of the loops of before are dropped.
      left_out: workers that could not be given their program.
      copies: that will be kept of the ps; None: none are.
    """

    ps: int
    name: str
    transfers: Sequence[Transfer]
    began_s: float
    handles: dict[str, str] = field(default_factory=dict)
    preparing: "asyncio.Task[None] | None" = None
    rested_s: float = 0.0
    has_dropped: bool = False
    left_out: set[str] = field(default_factory=set)
    copies: NextCopies | None = None

    @property
    def sent_bytes(self) -> int:
        """That were copied so far."""
        return sum(one.sent_bytes for one in self.transfers)


@final
class RunRescaler:
    """Gives one run as many ps as its cluster has, within its bounds.

    Args:
      order: what the client said of the run; changes at a switch.
      peers: to the tasks.
      ready: gives programs.
      ps: opens gates.
      loops: what each loop of the run does; gets other programs at a switch.
      record: of the run; has the switch.
      losses: knows the processes of the ps.
      copies: what is kept of the ps.
      client: told where the variables lie; None: there is none.
      clock: limits.
      fence: called to let all loops end.
      go_on: called to begin loops again, with workers that cannot have one.
      switched: called after a switch, with the ps that are needed no more.
      next_name: makes a name for something of the run.
      do: does something meanwhile.
    """

    def __init__(
        self,
        order: pb.OpenRun,
        peers: LoopPeers,
        ready: WorkerSetup,
        ps: PsSetup,
        loops: LoopOrders,
        record: Journal,
        losses: RunLosses,
        copies: RunCopies,
        client: RunClient | None,
        clock: Clock,
        *,
        fence: Callable[[], None],
        go_on: Callable[[set[str]], None],
        switched: Callable[[Sequence[TaskName]], None],
        next_name: Callable[[str], str],
        do: Do,
    ) -> None:
        self._order = order
        self._peers = peers
        self._ready = ready
        self._ps = ps
        self._loops = loops
        self._record = record
        self._losses = losses
        self._copies = copies
        self._client = client
        self._clock = clock
        self._fence, self._go_on, self._switched = fence, go_on, switched
        self._next_name = next_name
        self._do = do
        self.confirm: Callable[[], Coroutine[Any, Any, None]] = _nobody
        """Returns when the standbys have read the journal of so far."""
        self._arrangements = RunArrangements(order)
        self._mover = Mover(order, peers)
        self._machine: Rescale | None = None
        self._attempt: _Attempt | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._left_out: set[str] = set()
        self._is_over = asyncio.Event()
        self._is_over.set()
        self.ps = 0
        """How many ps the run has, and needs no others any more."""
        self.number = 0
        """Of the last switch."""
        self._given_up = 0
        self.why = ""
        """Why the run has not as many ps as its cluster; empty: it has."""
        self.adopt()

    # ------------------------------------------------------------ from outside

    @property
    def is_elastic(self) -> bool:
        """Whether ps join the run, and leave it."""
        return self._order.HasField("ps")

    def adopt(self) -> None:
        """Takes note of how many ps the run has, as the order says."""
        self.ps = self._ready.ps = self._order.ps.now

    def begin(self) -> None:
        """Looks after the number of ps from now on."""
        if self.is_elastic and self._machine is None:
            self._machine = Rescale(self._order.ps.now)
            self.look()
            self._wake()

    def close(self) -> None:
        """Changes nothing any more."""
        self._machine = None
        if self._timer is not None:
            self._timer.cancel()
        if self._attempt is not None and self._attempt.preparing is not None:
            self._attempt.preparing.cancel()

    @property
    def is_due(self) -> bool:
        """Whether a rescale waits for the end of all loops."""
        return self._machine is not None and self._machine.is_due

    def is_leaver(self, task: TaskName) -> bool:
        """Whether a ps that is told to end leaves the run by a rescale, for good."""
        if not self.is_elastic:
            return False
        return task != ps_task(0) and task in self._peers.leavers()

    def look(self) -> None:
        """Takes note that tasks have joined the cluster, or were told to leave it."""
        if self._machine is None:
            return
        now, one = self._machine.ps, self._arrangements
        wanted, agrees = wanted_ps(now, one.least, one.most, self._peers.ps())
        if not agrees:
            self.why = (
                f"run '{self._order.run}' may have {one.least} to {one.most} parameter "
                "servers, as jg.Elastic(ps=…) says"
            )
        elif wanted == now:
            self.why = ""
        self._handle(Wanted(wanted))

    def rest(self) -> None:
        """Goes on with a rescale, as no loop runs."""
        self._handle(Rested())

    async def lose_state(self) -> None:
        """Gives up a rescale, or waits for its end: a ps is gone, and what it held."""
        self._handle(StateLost())
        await self._is_over.wait()

    async def tidy(self) -> None:
        """Makes the ps what the order says, after the master of before was lost."""
        if self.is_elastic:
            await self._mover.tidy(self._arrangements.most)
            await self._mover.forget(self._arrangements.elsewhere())
            await self._copies.tidy(self._arrangements.most, self.number + 1)
            await self._renew()

    def switch_as(self, switch: pb.RunRescaled) -> None:
        """Takes a switch that another master has journalled."""
        self.number = switch.number
        self._apply(switch)

    def learn(self, switch: pb.RunRescaled | None) -> bool:
        """Takes a switch that a ps was told; False: the journal has it."""
        if switch is None or switch.number <= self.number:
            return False
        self.switch_as(switch)
        self._record.rescale(switch)
        self.adopt()
        self._note(switch)
        return True

    # ------------------------------------------------------------ decisions

    def _wake(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(AGAIN_S, self._wake)
        self._handle(TimePassed())

    def _handle(self, event: Event) -> None:
        if self._machine is None or self._record.is_over:
            return
        instructions = self._machine.handle(event, self._clock.now())
        if instructions:
            self._do(self._perform(instructions))

    async def _perform(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Prepare(ps):
                    self._prepare(ps)
                case Fence():
                    self._fence()
                case Move(ps):
                    await self._move(ps)
                case Switch():
                    await self._switch()
                case Retire():
                    await self._retire()
                case Drop(_, why):
                    await self._drop(why)
                case GoOn():
                    self._resume()
                case Tell(error):
                    self._tell(error)

    def _tell(self, error: JGError) -> None:
        self.why = error.message.rstrip(".")
        _LOG.warning("run '%s' stays as it is: %s", self._order.run, self.why)

    # ------------------------------------------------------------ before the switch

    def _prepare(self, ps: int) -> None:
        transfers = self._arrangements.transfers(ps)
        now = self._clock.now()
        attempt = _Attempt(ps, self._next_name(f"ps{ps}"), transfers, now)
        self._attempt = attempt
        attempt.preparing = self._do(self._make_ready(attempt))

    async def _make_ready(self, attempt: _Attempt) -> None:
        """Gives all tasks the programs for other ps, while training goes on."""
        try:
            await check_master(self._peers, self._order.run, self._record.term)
            ready = await ready_tasks(self._peers)
            lacks = [t for t in map(ps_task, range(attempt.ps)) if t not in ready]
            if lacks:
                what = f"{', '.join(lacks)} takes no new work"
                raise TaskLostError(what, task=lacks[0])
            await self._mover.begin(attempt.transfers)
            await self._give_programs(attempt)
            attempt.copies = self._copies.next(attempt.ps, self.number + 1)
            if attempt.copies is not None:
                await self._copies.ready(attempt.copies)
            failpoint("rescale.prepared")
            await self._mover.copy_ahead(attempt.transfers)
            failpoint("rescale.ahead")
        except JGError as error:
            if self._attempt is attempt:
                self._handle(NotPrepared(_refused(self._order, attempt, error)))
        else:
            attempt.preparing = None
            if self._attempt is attempt:
                self._handle(Prepared())

    async def _give_programs(self, attempt: _Attempt) -> None:
        """Gives the programs of loops that have none for these ps yet."""
        loops = list(self._loops.newest)
        for loop in loops:
            await self._give(attempt, loop.handle, loop.task)
        if loops and attempt.left_out.issuperset(loop.task for loop in loops):
            # So no program was given to any ps, which may not be able to take one.
            what = f"{loops[0].task} is lost, and so are all that train"
            raise TaskLostError(what, task=loops[0].task)
        if self._order.saves.snapshot:
            await self._give(attempt, self._order.saves.snapshot, "")

    async def _give(self, attempt: _Attempt, handle: str, task: str) -> None:
        first = handle.partition("~")[0]
        if first in attempt.handles:
            return
        try:
            new = await self._ready.give(handle, attempt.name, attempt.ps)
        except (ClusterUnreachableError, TaskLostError) as error:
            if error.details.get("task") != task or not task:
                raise
            attempt.left_out.add(task)  # the others go on
        else:
            attempt.handles[first] = new
            attempt.left_out.discard(task)

    async def _move(self, ps: int) -> None:
        attempt = self._attempt
        assert attempt is not None
        attempt.rested_s = self._clock.now()
        self._is_over.clear()
        try:
            await check_master(self._peers, self._order.run, self._record.term)
            failpoint("rescale.rested")
            attempt.has_dropped = True
            drops = (
                self._ready.drop(loop.handle, settle=True)
                for loop in self._loops.newest
            )
            await asyncio.gather(*drops)
            await self._give_programs(attempt)
            await self._mover.copy(attempt.transfers)
            await self._open_gates(ps)
            await self._begin_copies(attempt)
            failpoint("rescale.moved")
        except JGError as error:
            self._handle(NotMoved(_refused(self._order, attempt, error)))
        else:
            self._handle(Moved())

    async def _begin_copies(self, attempt: _Attempt) -> None:
        """Keeps copies of what each ps is to have, beside those of what it had."""
        if (to := attempt.copies) is None:
            return
        leave = defaultdict[str, list[str]](list)
        for one in attempt.transfers:
            leave[one.src] += one.names
        await self._copies.begin(to, leave)
        for loop in self._loops.newest:
            handle = attempt.handles.get(loop.handle.partition("~")[0])
            if handle is not None:
                await self._copies.admit(handle, int(loop.HasField("sync")), to)

    async def _open_gates(self, ps: int | None = None) -> None:
        """Opens the gates of asynchronous training on the ps of an arrangement."""
        gate = pb.OpenGate()
        gate.CopyFrom(self._order.gate)
        if not gate.shards:
            return  # the next round of synchronous training opens its own
        now = self._order.ps.now if ps is None else ps
        gate.shards[:] = self._arrangements.of(now).shards
        gate.opening = self._next_name(f"{self._order.run}-gate")
        for shard in gate.shards:
            request = frame(open_gate=gate)
            await self._peers.call(TaskName(shard), "OpenGate", request)

    async def _drop(self, why: str) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        if attempt.preparing is not None:
            attempt.preparing.cancel()
        for handle in attempt.handles.values():
            await self._ready.drop(handle)
        if attempt.copies is not None:
            await self._copies.drop(attempt.copies.streams)
        copies = attempt.has_dropped
        await self._mover.drop(attempt.transfers, copies=copies)
        if copies:
            await self._renew()
        if not self._record.is_over:
            self._note_given_up(attempt, why)

    def _note_given_up(self, attempt: _Attempt, why: str) -> None:
        self._given_up += 1
        given_up = self._measured(attempt)
        given_up.number = (self._record.term << _TERM_SHIFT) + self._given_up
        given_up.why = why
        self._record.give_up_rescale(given_up)
        self._note(given_up, logging.WARNING)

    def _measured(self, attempt: _Attempt) -> pb.RunRescaled:
        """Returns what an attempt has taken until now."""
        now = self._clock.now()
        return pb.RunRescaled(
            before=self._order.ps.now,
            ps=attempt.ps,
            nbytes=attempt.sent_bytes,
            seconds=now - attempt.began_s,
            paused_s=now - attempt.rested_s if attempt.rested_s else 0.0,
        )

    def _note(self, rescaled: pb.RunRescaled, level: int = logging.INFO) -> None:
        text = (
            f"run '{self._order.run}' is scaled from {rescaled.before} to "
            f"{rescaled.ps} ps: {bytes_text(rescaled.nbytes)} moved"
        )
        if rescaled.why:
            text = (
                f"run '{self._order.run}' was not scaled from {rescaled.before} to "
                f"{rescaled.ps} ps: {rescaled.why}; {bytes_text(rescaled.nbytes)} were "
                "copied"
            )
        text += (
            f" in {rescaled.seconds:.1f} s, while loops paused for "
            f"{rescaled.paused_s:.2f} s"
        )
        self._peers.note("scaled", text, level=level)

    async def _renew(self) -> None:
        """Gives gates and programs for the ps of now again: they may be dropped."""
        with suppress(JGError):  # of a ps that is lost, which its loops will tell
            await self._open_gates()
        suffix = self._next_name("ps")
        for loop in self._loops.newest:
            with suppress(JGError):
                loop.handle = await self._ready.renew(loop.handle, suffix)
                await self._record_again(loop)

    async def _record_again(self, loop: pb.RunLoop) -> None:
        try:
            await self._copies.admit(loop.handle, int(loop.HasField("sync")))
        except JGError:
            # What it would do is recorded nowhere: so it begins with a loss of state.
            await self._ready.drop(loop.handle)
            raise

    async def _tell_client(self, leavers: Sequence[TaskName], ps: int) -> None:
        """Lets the client look for the variables where they are, if it answers soon."""
        if self._client is None or self._client.is_gone:
            return
        with suppress(JGError, TimeoutError):  # else it reads so in the reports
            async with asyncio.timeout(_TELL_S):
                await self._client.ask("rescaled", tasks=leavers, ps=ps)

    def _resume(self) -> None:
        self._is_over.set()
        left_out, self._left_out = self._left_out, set()
        self._go_on(left_out)
        self.look()

    # ------------------------------------------------------------ the switch

    async def _switch(self) -> None:
        attempt = self._attempt
        assert attempt is not None
        self.number += 1
        switch = self._measured(attempt)
        switch.number = self.number
        switch.handles.update(attempt.handles)
        switch.copies.extend([] if attempt.copies is None else attempt.copies.streams)
        switch.step = first_step_of(self._order) + self._record.row().steps
        attempt.copies = None if attempt.copies is None else self._kept_so_far()
        self._apply(switch)
        await self._losses_learn(attempt.ps)
        switch.holders.update(self._losses.holders)
        # First: whatever its next master has read, each ps knows what lies on it.
        news = [ps_task(index) for index in range(attempt.ps)], switch
        world = self._peers, self._order.run, self._record.term
        await check_master(*world, switch=news)
        failpoint("rescale.told")
        self._record.rescale(switch)
        failpoint("rescale.switched")
        await self.confirm()
        self._note(switch)
        self._handle(Known())

    async def _losses_learn(self, ps: int) -> None:
        ready = await ready_tasks(self._peers)
        for task in map(ps_task, range(ps)):
            if task in ready:
                self._losses.known.setdefault(task, ready[task])
        for task in [t for t in self._losses.known if self._is_beyond(t, ps)]:
            del self._losses.known[task]

    def _is_beyond(self, task: TaskName, ps: int) -> bool:
        return task in [ps_task(n) for n in range(ps, self._arrangements.most)]

    def _kept_so_far(self) -> NextCopies:
        """Returns the streams of now, which are dropped when others are kept."""
        copies = pb.RunCopies()
        copies.CopyFrom(self._order.copies)
        return NextCopies(self._order.ps.now, list(copies.streams))

    def _apply(self, switch: pb.RunRescaled) -> None:
        """Makes the order, and those of the loops, what they are after a switch."""
        ps, handles = switch.ps, dict(switch.handles)
        if switch.copies:
            self._copies.switch(switch.copies, switch.step)
        arrangement = self._arrangements.of(ps)
        self._order.ps.now = self._ready.ps = ps
        if self._order.gate.shards:
            self._order.gate.shards[:] = arrangement.shards
        if arrangement.HasField("saves"):
            self._order.saves.CopyFrom(arrangement.saves)
        if self._order.saves.snapshot:
            first = self._order.saves.snapshot.partition("~")[0]
            self._order.saves.snapshot = handles.get(first, first)
        if self._loops.arbiter is not None:
            self._loops.arbiter.sync.shards[:] = arrangement.shards
        for loop in self._loops.newest:
            first = loop.handle.partition("~")[0]
            loop.handle = handles.get(first, loop.handle)

    async def _retire(self) -> None:
        attempt, self._attempt = self._attempt, None
        assert attempt is not None
        leavers = [ps_task(n) for n in self._peers.ps() if n >= attempt.ps]
        # First: what it reads now is there where it looks.
        await self._tell_client(leavers, attempt.ps)
        if attempt.copies is not None:
            await self._copies.drop(attempt.copies.streams)
        await self._mover.drop(attempt.transfers, copies=False)
        await self._mover.forget((one.src, one.names) for one in attempt.transfers)
        await self._mover.forget_all(leavers)
        failpoint("rescale.retired")
        self._switched(leavers)
        self._left_out = attempt.left_out
        self.ps, self.why = attempt.ps, ""


async def _nobody() -> None:
    """There is no standby."""


def _refused(order: pb.OpenRun, attempt: _Attempt, error: JGError) -> RescaleError:
    return RescaleError(
        f"run '{order.run}' cannot have {attempt.ps} parameter servers now, and goes "
        f"on with {order.ps.now}: {error.message}",
        run=order.run,
        why=error.message,
    )
