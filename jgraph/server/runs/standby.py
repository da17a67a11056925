"""Standby master: follows the journal of a run, takes over if its master is lost."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar, final

from jgraph.clock import Clock
from jgraph.cluster.deadlines import CONTROL_S, bounded_s
from jgraph.cluster.drain import holding
from jgraph.cluster.polling import Polling
from jgraph.coordination.run.election import (
    Election,
    Follow,
    JournalEnd,
    Leave,
    Over,
    TakeOver,
    Wait,
)
from jgraph.coordination.run.succession import resume_events
from jgraph.errors import (
    ClusterUnreachableError,
    CopyLostError,
    FencedError,
    JGError,
    TaskLeavingError,
    TaskLostError,
)
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.dial import is_refused
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame
from jgraph.runtime.compute_errors import as_error
from jgraph.server.runs.journal_replay import JournalReplay
from jgraph.server.runs.links import wait_reconnected
from jgraph.server.runs.peers import KnownOfRun, LoopPeers, check_master
from jgraph.server.runs.ps_setup import version_if_known
from jgraph.server.runs.supervisor import REPLACED, RunSupervisor

_LOG = logging.getLogger("jgraph.recover")
_T = TypeVar("_T")
_LOST_REPLY_S: Final = 1.0
_POLL_S: Final = 0.5
"""Between two looks: that who comes first is gone shows only by asking it."""
_ANSWER_S: Final = 1.0
"""One that is busy is asked again."""
_LOSSES: Final = (
    ClusterUnreachableError,
    FencedError,
    TaskLeavingError,
    TaskLostError,
)
_READ_S: Final = 2.0
"""For what a journal has; who invites asks again."""


class StandbyPeers(LoopPeers, Protocol):
    """A ``LoopPeers`` through which a run is inherited."""

    @property
    def incarnation(self) -> int:
        """Which start of its task the master is."""


def journal_end(row: pb.RunRow) -> JournalEnd:
    """Returns how far a task says that it knows a run."""
    is_over = row.state not in {"running", REPLACED}
    master = TaskName(row.task)
    return JournalEnd(master, row.incarnation, row.term, row.frames, is_over)


@final
class Standby:
    """Keeps what another task knows as the master of a run.

    Args:
      order: what the client said of the run; names the master.
      peers: to the tasks.
      clock: dates what happens, and limits the wait for a master.
      begins: called with who looks after the run when this task is its master.
      saves: called when the run goes on, to save it.
      before: of the master before, whose journal this one has as well once it is read.

    Attributes:
      master: whose standby this is.
      standbys: of that master; the first one that is there takes its place.
      supervisor: of the run, if this task is to be its master.
      is_over: the run is, or goes on elsewhere.
      elects: the master is lost, and this standby may take its place.
    """

    def __init__(
        self,
        order: pb.OpenRun,
        peers: StandbyPeers,
        clock: Clock,
        begins: Callable[[pb.OpenRun, RunSupervisor], Awaitable[None]],
        saves: Callable[[pb.OpenRun, RunSupervisor], None],
        before: "Standby | None" = None,
    ) -> None:
        self.master = TaskName(order.master)
        self._incarnation, self._term = order.incarnation, order.term
        self.standbys = list(map(TaskName, order.standbys))
        self._before = None if before is None else before.reader
        # It said so itself: one that is busy may not answer who asks.
        self._known = {self.master: f"{order.incarnation:x}"}
        self._order = order
        self._peers = peers
        self._clock = clock
        self._begins, self._saves = begins, saves
        self.supervisor = RunSupervisor(order, peers, clock)
        self._replay = JournalReplay(order, self.supervisor)
        self.is_over = self.elects = self._retired = False
        self._named = asyncio.Event()  # the client does not reach the master
        self._closed = asyncio.Event()

    @property
    def has_read(self) -> bool:
        """Whether all is read that there was when this standby was invited."""
        return self._replay.has_read

    @property
    def reader(self) -> "Standby | None":
        """This one if it has read all; else that of the master before, if any."""
        return self if self.has_read else self._before

    def open(self) -> None:
        """Is a standby again: the next master was lost before its journal was read."""
        self._closed.clear()

    async def wait_read(self, frames: int) -> None:
        """Waits a while until so much of the journal is read."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_READ_S):
                await self._replay.wait(frames)

    def succeed(self) -> None:
        """Takes the place of a master that a client does not reach, if it is there."""
        self._named.set()

    def retire(self) -> None:
        """Takes the place of no master any more; others may read what is known here."""
        self._retired = True

    def is_of_another(self, order: pb.OpenRun) -> bool:
        """Whether an invitation is of another master, or of one that is it again."""
        mine = self.master, self._incarnation, self._term
        return (order.master, order.incarnation, order.term) != mine

    def close(self) -> None:
        """Follows the master no more: the run has another one."""
        self._closed.set()

    async def work(self) -> None:
        """Follows the master to the end of the run, or takes its place."""
        await _unless(self._closed, self._work())

    async def _work(self) -> None:
        held, leaves = self._hold()
        self.supervisor.learn_anew()
        try:
            while not self.is_over:
                lost = await self._lost_or(leaves)
                missed_s = self._clock.now()
                if self.end_record is not None or await self._is_refused(lost):
                    return
                self.elects = not await self._is_there(lost)
                if self.elects:
                    await self._elect(lost, missed_s)
                self.elects = False
        finally:
            held.cancel()  # lets the master go

    async def _is_refused(self, error: JGError) -> bool:
        """Whether the master is there and does not tell the journal."""
        if isinstance(error, _LOSSES):
            return False
        end = None
        with suppress(JGError):  # it is lost by now, or has left the cluster
            end = await self._ask(self.master)
        if end is None or not end.is_of(self.end):
            return False  # another process, or one that has let the run go
        _LOG.warning("run '%s' has no standby: %s", self._order.run, error.message)
        return True

    @property
    def end_record(self) -> RunSupervisor | None:
        """Knows how the run ended, if that is read."""
        return self.supervisor if self.supervisor.record.is_over else None

    # ------------------------------------------------------------ the election

    @property
    def end(self) -> JournalEnd:
        """How far this standby has read."""
        return journal_end(self.supervisor.journal_end())

    async def _elect(self, lost: JGError, missed_s: float) -> None:
        """Takes the place of the master, unless it is there or another task does."""
        peers, run = self._peers, self._order.run
        elastic, waits = self._order.HasField("elastic"), ""
        election = Election(peers.task, list(peers.tasks()), missed_s, elastic=elastic)
        # It ends with the run: another master, once there is one, closes this standby.
        polling = Polling(_POLL_S, math.inf, self._clock)
        # Where not all is read, that of the master before is a standby again.
        self.is_over = self._before is not None
        while not self.is_over:
            answers, silent = await self._ask_all()
            now, read, forced = self._clock.now(), self.has_read, self._is_forced(lost)
            world = self.end, answers, silent, self.standbys, now
            match election.decide(*world, has_read=read, is_forced=forced):
                case Follow():
                    return
                case Leave():
                    self.is_over = True  # here
                case Over(task):
                    await self._read(task, answers[task].frames)
                    self.is_over = True
                case TakeOver(term):
                    takes = not self._retired
                    if not (takes and await self._take_term(election, lost, term)):
                        await polling.again()
                case Wait(task):
                    if waits != task:
                        what = "run '%s' has lost its master, %s; %s comes first"
                        _LOG.info(what, run, self.master, task)
                    waits = task
                    await self._pass_on(task)
                    await polling.again()

    async def _take_term(self, election: Election, lost: JGError, term: int) -> bool:
        """Is the master from now on; False: a task has heard of a later one."""
        world = self._peers, self._order.run, term
        try:
            known = await check_master(*world, takes_over=True)
        except FencedError as fenced:  # one that may be lost already
            election.refused(int(fenced.details.get("term", term)))
            return False
        await self._read_longer(election)
        if not self.is_over:
            await self._take_over(lost, term, known)
            self.is_over = True  # for who only follows
        return True

    def _is_forced(self, lost: JGError) -> bool:
        """Whether a master that is there is to be replaced."""
        return isinstance(lost, TaskLeavingError) or self._named.is_set()

    async def _pass_on(self, task: TaskName) -> None:
        """Tells another standby that the client does not reach the master."""
        if self._named.is_set():
            query = pb.RunQuery(run=self._order.run, master=self.master)
            with suppress(JGError):
                await self._peers.call(task, "SucceedRun", frame(run_query=query))

    async def _ask(
        self, task: TaskName, *, replaced: bool = False
    ) -> JournalEnd | None:
        """Asks a task how far it knows the run; None: not at all.

        Args:
          task: another one.
          replaced: also if it was the master, and was replaced.

        Raises:
          JGError: it does not answer.
        """
        query = frame(run_query=pb.RunQuery(run=self._order.run))
        reply = await self._peers.call(task, "JournalEnd", query, timeout_s=_ANSWER_S)
        rows = [r for r in body_of(reply).runs if replaced or r.state != REPLACED]
        return next(map(journal_end, rows), None)

    async def _ask_all(
        self, *, replaced: bool = False
    ) -> tuple[dict[TaskName, JournalEnd], set[TaskName]]:
        """Asks the other tasks; returns what they know, and which may be there."""
        answers, silent = dict[TaskName, JournalEnd](), set[TaskName]()

        async def ask(task: TaskName) -> None:
            try:
                end = await self._ask(task, replaced=replaced)
            except JGError:
                # One that has left the cluster meanwhile is there for nobody.
                is_member = task in self._peers.tasks()
                if is_member and not await is_refused(self._peers.address(task)):
                    silent.add(task)
                return
            if end is not None:
                answers[task] = end

        others = (task for task in self._peers.tasks() if task != self._peers.task)
        await asyncio.gather(*map(ask, others))
        return answers, silent

    async def _read_longer(self, election: Election) -> None:
        """Reads what others have of the journal, and this standby has not."""
        answers, _ = await self._ask_all(replaced=True)
        for task in election.longer(self.end, answers):
            self._replay.need(answers[task].frames)
            await self._read(task, answers[task].frames)

    async def _read(self, task: TaskName, until: int) -> None:
        """Reads the journal that a task has, as far as that is known to reach."""
        query = pb.RunQuery(run=self._order.run, after=self._replay.frames, until=until)
        if self._replay.frames >= until:
            return
        try:
            entries = self._peers.stream(task, "RunJournal", frame(run_query=query))
            async for entry in entries:
                self._add(entry)
        except JGError as error:
            what = "the journal of run '%s' on %s was not read: %s"
            _LOG.warning(what, self._order.run, task, error.message)

    # ------------------------------------------------------------ the master

    async def _is_there(self, lost: JGError) -> bool:
        """Whether the master still is one; a link that is silent is waited for."""
        if not isinstance(lost, _LOSSES) or self._is_forced(lost):
            return False
        world = self._peers, self._known, self._clock
        waits = wait_reconnected(self.master, lost, *world)
        return bool(await _unless(self._named, waits))

    async def _lost_or(self, leaves: asyncio.Future[JGError]) -> JGError:
        """Follows the master; returns why it is to be replaced, or how it ended."""
        following = asyncio.ensure_future(_unless(self._named, self._follow()))
        either: set[asyncio.Future[Any]] = {following, leaves}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            following.cancel()
        if leaves.done():
            return leaves.result()
        what = f"the client does not reach {self.master}"
        return following.result() or TaskLostError(what, task=self.master)

    def _hold(self) -> tuple[asyncio.Task[None], asyncio.Future[JGError]]:
        """Holds the master until the task is cancelled; tells when it is to end."""
        leaves: asyncio.Future[JGError] = asyncio.get_running_loop().create_future()

        async def hold() -> None:
            nothing = frame(empty=pb.Empty())
            call = lambda: self._peers.stream(self.master, "DrainHold", nothing)
            async for said in holding(call):
                if said == "told":
                    await self._replay.wait_whole()
                    what = f"{self.master}, the master, was told to end"
                    leaves.set_result(TaskLeavingError(what, task=self.master))

        return asyncio.ensure_future(hold()), leaves

    async def _follow(self) -> JGError:
        """Takes what the master tells; returns how its loss shows."""
        query = frame(
            run_query=pb.RunQuery(run=self._order.run, after=self._replay.frames)
        )
        try:
            async for entry in self._peers.stream(self.master, "RunJournal", query):
                self._add(entry)
        except JGError as error:  # fenced: another process has the place of the master
            return error
        what = f"{self.master} is not the master of run '{self._order.run}' any more"
        return TaskLeavingError(what, task=self.master)

    def _add(self, entry: Frame) -> None:
        self._replay.add(entry)
        if self.has_read:
            self._before = None
        self.is_over |= self.end_record is not None

    # ------------------------------------------------------------ the succession

    async def _take_over(self, error: JGError, term: int, known: KnownOfRun) -> None:
        """Goes on with the run.

        Args:
          error: how the master was lost.
          term: of this one; all tasks that answer refuse earlier ones.
          known: what these tasks know of the run.
        """
        run, record = self._order.run, self.supervisor.record
        if self.has_read and not self._replay.has_begun:
            _LOG.warning("run '%s' ended with its master before it began", run)
            return
        why, here = error.message.rstrip("."), self._peers.task
        if not isinstance(error, TaskLeavingError):
            why = f"{self.master}, the master, was lost: {why}"
            _LOG.warning("%s. %s is the master of run '%s' now", why, here, run)
        else:
            _LOG.info("%s. %s is the master of run '%s' now", why, here, run)
        if self.has_read:
            self._replay.note_position()  # until it is dealt out here
        self._order.term = term
        await self._begins(self._order, self.supervisor)
        try:
            self._check_read(known.loops)
            await check_master(self._peers, run, term)  # perhaps another one was since
            await self._go_on(term, known)
        except FencedError as fenced:  # it goes on elsewhere
            self.supervisor.fail(fenced)
        except Exception as failed:  # noqa: BLE001  # who watches it would wait for ever
            record.term = term
            self.supervisor.fail(as_error(failed, here))

    def _check_read(self, holders: Mapping[str, TaskName]) -> None:
        """Raises ``CopyLostError`` where it is known that the journal goes on."""
        unknown = sorted(
            holders[loop] for loop in holders.keys() - self._replay.began_s.keys()
        )
        if self.has_read and not unknown:
            return
        why = f"{self._replay.frames} of {self._replay.needed} entries"
        if unknown:
            why = f"nothing of a loop on {unknown[0]}"
        raise CopyLostError(
            f"{self.master} was lost before {self._peers.task} had read from it "
            f"all that the run had done ({why}), so nobody knows how to go on with "
            "it; go on with another run, from a checkpoint: trainer.restore(…)",
            task=self.master,
        )

    async def _go_on(self, term: int, known: KnownOfRun) -> None:
        """Ends the loops of the lost master, and begins the next ones."""
        orders, record = self.supervisor.loops, self.supervisor.record
        loops = orders.newest
        ends = [
            self._end_loop(order, term, is_there=order.loop in known.loops)
            for order in loops
        ]
        names = [order.loop for order in loops]
        states = dict(zip(names, await asyncio.gather(*ends), strict=True))
        if self._replay.deals:
            updates = await version_if_known(self._peers, self._order)
            self._replay.deal(self._peers.dealers, f"{self._order.run}~{term}", updates)
        record.term = term
        for order in loops:
            order.term = term
        if self.supervisor.rescaler.learn(known.switch):
            self.supervisor.learn_anew()
        self._saves(self._order, self.supervisor)
        arbiter = orders.arbiter
        if arbiter is not None and isinstance(states[arbiter.loop], JGError):
            record.is_told_all = False  # the master before may know its last updates
        events = resume_events(
            {replica: states[o.loop] for replica, o in orders.replicas.items()},
            None if arbiter is None else states[arbiter.loop],
            stopping=self.supervisor.stopping,
        )
        self.supervisor.resume(events)

    async def _end_loop(
        self, order: pb.RunLoop, term: int, *, is_there: bool
    ) -> str | JGError:
        """Ends a loop and takes what it has not told; returns how it ended.

        Args:
          order: of the loop.
          term: of this master.
          is_there: who has begun it answers. So may a master that only its client does
            not reach: its worker may have a long step under way.
        """
        task, limit_s = TaskName(order.task), bounded_s(order.step_timeout_s)
        if task == self.master and not is_there:
            limit_s = _LOST_REPLY_S
        stop = pb.StopLoop(
            loop=order.loop,
            task=task,
            account=True,
            pause=True,
            after=self._replay.last_report(order.loop),
            timeout_s=limit_s,
            run=self._order.run,
            term=term,
        )
        try:
            report = await self._peers.call(
                *(task, "StopLoop", frame(stop_loop=stop)),
                timeout_s=stop.timeout_s + 2 * CONTROL_S,
            )
        except JGError as error:
            if (
                order is self.supervisor.loops.arbiter
                and error.details.get("loop") == order.loop
            ):
                return "paused"  # it was never begun, and never will be
            _LOG.warning("%s was lost: %s", task, error.message)
            self.supervisor.record.lost(order, error)
            await self.supervisor.ready.drop(order.handle)
            return error
        body = body_of(report)
        state, body.state = str(body.state), "running"
        if state == "failed" and order is self.supervisor.loops.arbiter:
            return TaskLostError("the loop that decides had failed", task=task)
        began_s = self._replay.began_s[order.loop]
        self.supervisor.record.keep(order, report, began_s)
        self._replay.note(report)
        return state


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, _T]) -> _T | None:
    """Returns the result of work; None: an event came before, and it is cancelled."""
    working, came = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    either: set[asyncio.Future[Any]] = {working, came}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        came.cancel()
