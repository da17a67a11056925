"""Rescaler of a run on its master: acts for the ``Rescale`` of its ps."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias, final

from jgraph.clock import Clock
from jgraph.coordination.run.rescale import (
    AGAIN_S,
    Drop,
    Event,
    Fence,
    GoOn,
    Instruction,
    Move,
    Moved,
    NotMoved,
    NotPrepared,
    Prepare,
    Prepared,
    Rescale,
    Rested,
    Retire,
    Retired,
    StateLost,
    Switch,
    Switched,
    Tell,
    TimePassed,
    Wanted,
    wanted_ps,
)
from jgraph.errors import JGError, RescaleError
from jgraph.failpoints import failpoint
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.server.runs.journal import Journal
from jgraph.server.runs.losses import RunLosses
from jgraph.server.runs.peers import LoopPeers, check_master, ready_tasks
from jgraph.server.runs.ps_setup import first_step_of, ps_task
from jgraph.server.runs.rescaling.migration import Migration, RunMigrations
from jgraph.server.runs.run_client import RunClient
from jgraph.view.units import bytes_text

_LOG: Final = logging.getLogger("jgraph.recover")
_TELL_S: Final = 10.0
"""So long variables are kept for a client that is there, and does not answer."""
_TERM_SHIFT: Final = 32
"""What each master gives up has numbers of its own."""
Do: TypeAlias = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


@final
class RunRescaler:
    """Gives one run as many ps as its cluster has, within its bounds.

    Args:
      order: what the client said of the run; changes at a switch.
      peers: to the tasks.
      migrations: move its variables.
      record: of the run; has the switch.
      losses: knows the processes of the ps.
      client: told where the variables lie; None: there is none.
      clock: limits.
      fence: called to let all loops end.
      go_on: called to begin loops again, with workers that cannot have one.
      switched: called after a switch, with the ps that are needed no more.
      do: does something meanwhile.
    """

    def __init__(
        self,
        order: pb.OpenRun,
        peers: LoopPeers,
        migrations: RunMigrations,
        record: Journal,
        losses: RunLosses,
        client: RunClient | None,
        clock: Clock,
        *,
        fence: Callable[[], None],
        go_on: Callable[[set[str]], None],
        switched: Callable[[Sequence[TaskName]], None],
        do: Do,
    ) -> None:
        self._order = order
        self._peers = peers
        self._migrations = migrations
        self._record = record
        self._losses = losses
        self._client = client
        self._clock = clock
        self._fence, self._go_on, self._switched = fence, go_on, switched
        self._do = do
        self._machine: Rescale | None = None
        self._attempt: Migration | None = None
        self._turn = asyncio.Lock()
        """Held while instructions are carried out: later ones come after."""
        self._newest: Sequence[Instruction] = ()
        self._timer: asyncio.TimerHandle | None = None
        self._left_out: set[str] = set()
        self._notice: asyncio.Task[None] | None = None
        """Waits until the client, which was told of a switch, has taken note of it."""
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
        self.ps = self._migrations.adopt()

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
        now, one = self._machine.ps, self._migrations.arrangements
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

    async def settle(self) -> None:
        """Waits until what a switch left behind is dropped."""
        await self._is_over.wait()

    async def tidy(self) -> None:
        """Makes the ps what the order says, after the master of before was lost."""
        if self.is_elastic:
            await self._migrations.tidy(self.number)

    def switch_as(self, switch: pb.RunRescaled) -> None:
        """Takes a switch that another master has journalled."""
        self.number = switch.number
        self._migrations.apply(switch)

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
            self._newest = instructions
            self._do(self._perform(instructions))

    async def _perform(self, instructions: Sequence[Instruction]) -> None:
        async with self._turn:
            for instruction in instructions:
                await self._act(instruction, is_newest=instructions is self._newest)

    async def _act(self, instruction: Instruction, *, is_newest: bool) -> None:
        match instruction:
            case Prepare(ps):
                if is_newest:  # else that is dropped, or others are prepared, next
                    self._prepare(ps)
            case Fence():
                self._fence()
            case Move():
                await self._move()
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
        attempt = self._migrations.begin(ps, self._clock.now())
        self._attempt = attempt
        attempt.preparing = self._do(self._make_ready(attempt))

    async def _make_ready(self, attempt: Migration) -> None:
        try:
            await self._migrations.prepare(attempt, self.number)
        except JGError as error:
            if self._attempt is attempt:
                self._handle(NotPrepared(_refused(self._order, attempt, error)))
        else:
            attempt.preparing = None
            if self._attempt is attempt:
                self._handle(Prepared())

    async def _move(self) -> None:
        attempt = self._attempt
        assert attempt is not None
        attempt.rested_s = self._clock.now()
        self._is_over.clear()
        try:
            await self._migrations.move(attempt)
        except JGError as error:
            self._handle(NotMoved(_refused(self._order, attempt, error)))
        else:
            self._handle(Moved())

    async def _drop(self, why: str) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        await self._migrations.drop(attempt)
        if not self._record.is_over:
            self._note_given_up(attempt, why)

    def _note_given_up(self, attempt: Migration, why: str) -> None:
        self._given_up += 1
        given_up = self._measured(attempt)
        given_up.number = (self._record.term << _TERM_SHIFT) + self._given_up
        given_up.why = why
        self._record.give_up_rescale(given_up)
        self._note(given_up, logging.WARNING)

    def _measured(self, attempt: Migration) -> pb.RunRescaled:
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

    def _tell_client(self, attempt: Migration) -> None:
        """Lets the client look for the variables where they are.

        Nobody waits for that but who drops what lies where they were: what the client
        is asked from here on it does after.
        """
        if self._client is not None and not self._client.is_gone:
            leavers = self._leavers(attempt)
            answer = self._client.ask("rescaled", tasks=leavers, ps=attempt.ps)
            self._notice = self._do(self._hear(answer))

    async def _hear(self, answer: Awaitable[pb.RunAnswer]) -> None:
        with suppress(JGError, TimeoutError):  # else it reads so in the reports
            async with asyncio.timeout(_TELL_S):
                await answer

    def _leavers(self, attempt: Migration) -> list[TaskName]:
        return [ps_task(n) for n in self._peers.ps() if n >= attempt.ps]

    def _resume(self) -> None:
        if self._attempt is None:  # else something of it is to be dropped yet
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
        self._migrations.about(attempt, switch)
        switch.step = first_step_of(self._order) + self._record.row().steps
        self._migrations.apply(switch)
        await self._losses_learn(attempt.ps)
        switch.holders.update(self._losses.holders)
        # First: whatever its next master has read, each ps knows what lies on it.
        news = [ps_task(index) for index in range(attempt.ps)], switch
        world = self._peers, self._order.run, self._record.term
        await check_master(*world, switch=news)
        failpoint("rescale.told")
        self._record.rescale(switch)
        failpoint("rescale.switched")
        self._note(switch)
        self._tell_client(attempt)
        self._left_out = attempt.left_out
        self._handle(Switched())

    async def _losses_learn(self, ps: int) -> None:
        ready = await ready_tasks(self._peers)
        for task in map(ps_task, range(ps)):
            if task in ready:
                self._losses.known.setdefault(task, ready[task])
        for task in map(ps_task, range(ps, self._migrations.arrangements.most)):
            self._losses.known.pop(task, None)

    async def _retire(self) -> None:
        attempt, notice = self._attempt, self._notice
        assert attempt is not None
        leavers = self._leavers(attempt)
        if notice is not None:  # first: what the client reads is there where it looks
            await notice
        await self._migrations.retire(attempt, leavers)
        failpoint("rescale.retired")
        self._switched(leavers)
        self.ps, self.why = attempt.ps, ""
        self._attempt = self._notice = None
        self._is_over.set()
        self._handle(Retired())


def _refused(order: pb.OpenRun, attempt: Migration, error: JGError) -> RescaleError:
    return RescaleError(
        f"run '{order.run}' cannot have {attempt.ps} parameter servers now, and goes "
        f"on with {order.ps.now}: {error.message}",
        run=order.run,
        why=error.message,
    )
