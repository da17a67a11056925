"""Run supervisor on the master: starts, watches and replaces a run's replica loops."""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, final

from jgraph.clock import Clock
from jgraph.cluster.drain import told_to_end
from jgraph.cluster.events import end_of_run
from jgraph.coordination.run.loop_outcome import LoopOutcome, judge
from jgraph.coordination.run.supervisor import (
    BatchFailed,
    Begin,
    EndLoops,
    Event,
    Failed,
    Finish,
    Finished,
    FinishFailed,
    Forget,
    GoBack,
    Instruction,
    LeaveOut,
    LoopBegan,
    LoopEnded,
    LoopLost,
    MasterLeaves,
    MemberLeft,
    Over,
    Pause,
    Prepare,
    PsGone,
    Rest,
    RestartAsked,
    Restarted,
    RoundBegan,
    RoundEnded,
    StopAsked,
    Supervisor,
)
from jgraph.errors import (
    ClusterUnreachableError,
    ConfigError,
    FencedError,
    JGError,
    TaskLeavingError,
    TaskLostError,
)
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame
from jgraph.runtime.compute_errors import as_error
from jgraph.server.runs.copies import RunCopies
from jgraph.server.runs.holds import PsHolds
from jgraph.server.runs.journal import Journal, note_report
from jgraph.server.runs.links import final_report_of
from jgraph.server.runs.losses import RunLosses
from jgraph.server.runs.peers import (
    LoopPeers,
    check_master,
    holds_state,
)
from jgraph.server.runs.ps_setup import PsSetup
from jgraph.server.runs.rescaling.migration import RunMigrations
from jgraph.server.runs.rescaling.rescaler import RunRescaler
from jgraph.server.runs.rescaling.stand_ins import RunStandIns
from jgraph.server.runs.rescaling.survivors import RunSurvivors
from jgraph.server.runs.rollback import Rollback, RolledBack, position_of
from jgraph.server.runs.run_client import Restarters, RunClient
from jgraph.server.runs.run_loops import LoopOrders, RunningLoops, open_round_gates
from jgraph.server.runs.saving.checkpointer import Saved
from jgraph.server.runs.saving.run_saving import RunSaving
from jgraph.server.runs.worker_setup import WorkerSetup
from jgraph.server.runs.workers import RunJoiners, RunWorkers

_LOG = logging.getLogger("jgraph.recover")
REPLACED: Final = "replaced"
"""State of a run, where its journal is and another master goes on with it."""


@final
class RunSupervisor:
    """Acts for the ``Supervisor`` of one run.

    Args:
      order: what the client says of the run.
      peers: to the tasks.
      clock: dates what happens.

    Attributes:
      record: what the loops told.
      ready: gives workers what they need.
      stopping: its loops are asked to end.
      copies: what is kept of its ps.
      loops: what each loop does, and the data.
      restores: how often the run went on from a checkpoint.
      client: that the run ends with; None: it has none.
      saving: has it saved.
      stand_ins: have the parts of owners that are away.
    """

    def __init__(self, order: pb.OpenRun, peers: LoopPeers, clock: Clock) -> None:
        self.record = Journal(peers.task, order, clock)
        self._order = order
        self.ready = WorkerSetup(order, peers)
        ps = PsSetup(order, peers, self.ready)
        self.copies = RunCopies(order, peers, self.ready)
        self.loops = LoopOrders()
        self._peers = peers
        self._clock = clock
        self._supervisor: Supervisor | None = None
        self._running = RunningLoops(peers)
        self._losses = RunLosses(order, peers)
        self._holds = PsHolds(peers, ps, self.record, self._ps_told)
        self.client: RunClient | None = None
        if order.HasField("client"):
            self.client = RunClient(order, self.record, self._client_gone)
        self.ready.client = self.client
        self._workers = RunWorkers(
            RunJoiners(order, peers, self.ready, self.record, clock),
            *(self.loops, self.copies, self._losses, Restarters(self.client)),
            *(self._handle, self._do),
        )
        migrations = RunMigrations(
            *(order, peers, self.ready, self.loops, self.copies),
            next_name=self._next_name,
            term=lambda: self.record.term,
        )
        self.rescaler = RunRescaler(
            *(order, peers, migrations, self.record, self._losses, self.client, clock),
            fence=lambda: self._handle(RestartAsked()),
            go_on=self._rescaled,
            switched=self._release,
            do=self._do,
        )
        self.saving = RunSaving(
            *(order, peers, self.record, self.ready, ps, self.client),
            *(self._next_name, self._running.ask, self._do),
        )
        self.stand_ins = RunStandIns(
            *(order, peers, self.copies, self.loops, self.record, self.client),
            note=self._note_order,
        )
        self._survivors = RunSurvivors(
            order, peers, self.ready, self.copies, self.loops
        )
        self._rollback = Rollback(
            *(order, peers, self.ready, ps, self.copies, self.stand_ins),
            *(self._survivors, self.record, self.saving.source, self.client, clock),
            save_for_client=self.saving.begin_for_client,
            is_stopped=lambda: self.stopping,
        )
        self.restores = 0
        self._ordered: list[pb.RunLoop] = []
        self.stopping = self._leaves = self._goes_back = False
        self._working: set[asyncio.Task[None]] = set()
        self.confirm: Callable[[], Coroutine[Any, Any, None]] = _nobody
        """Returns when the standbys have read the journal of so far."""

    # ------------------------------------------------------------ from outside

    @property
    def name(self) -> str:
        """Of the run."""
        return self._order.run

    @property
    def term(self) -> int:
        """Of this master."""
        return self._order.term

    @property
    def is_of_standby(self) -> bool:
        """Whether the run is over, and this task was a standby of its master."""
        return self._order.master not in {"", self._peers.task}

    @property
    def is_replaced(self) -> bool:
        """Whether the run goes on with another master."""
        return isinstance(self.record.error, FencedError)

    def row(self) -> pb.RunRow:
        """Returns how the run stands."""
        row = self.record.row()
        row.of_standby = self.is_of_standby
        if self._supervisor is not None and not self.record.is_over:
            row.workers[:] = self._workers.standing
            row.ps, row.rescale = self.rescaler.ps, self.rescaler.why
            row.homes.number = self._order.stand_ins.number
            row.homes.homes.update(self.stand_ins.by.items())
        return row

    def journal_end(self) -> pb.RunRow:
        """Returns whose journal of the run this is, and how far it reaches."""
        return pb.RunRow(
            run=self._order.run,
            task=self._order.master,
            incarnation=self._order.incarnation,
            term=self._order.term or 1,
            frames=self.record.frames,
            state=REPLACED if self.is_replaced else self.record.row().state,
        )

    def as_known(self, standbys: Iterable[TaskName]) -> pb.OpenRun:
        """Returns what its standbys are told of the run; who comes first is first."""
        order = pb.OpenRun()
        order.CopyFrom(self._order)
        order.age_s, order.frames = self.record.seconds, self.record.frames
        order.holders.update(self._losses.holders)
        order.standbys[:] = standbys
        return order

    def order(self, order: pb.RunLoop) -> None:
        """Takes note of a loop that begins with the run."""
        self._ordered.append(order)
        self.record.begins(order)

    def begin_all(self) -> None:
        """Begins the run: all loops that were ordered."""
        ordered, self._ordered = self._ordered, []
        info = json.loads(self._order.info)
        what = f"{info['steps'] - info['first_step']} steps"
        self._peers.note("began", f"run '{self.name}' began: {what}")
        self.saving.prepare_halts()
        if self.client is not None:
            self.client.begin()
        for order in ordered:
            self._begin_ordered(order)
        self.rearranged()  # some may have left since they were ordered

    def begin(self, order: pb.RunLoop) -> None:
        """Begins a loop at once."""
        self.record.begins(order)
        self._begin_ordered(order)

    def _begin_ordered(self, order: pb.RunLoop) -> None:
        together = order.HasField("sync") or bool(order.batch_feed)
        if self._supervisor is None:
            self._supervise(together=together)
        if not self.record.is_over:
            self._start(order)
            self._handle(
                RoundBegan() if order.HasField("sync") else LoopBegan(order.replica)
            )

    def _supervise(self, *, together: bool) -> None:
        wait_s, least = self._order.wait_s, self._workers.joiners.least
        machine = Supervisor(together=together, wait_s=wait_s, least=least)
        self._supervisor = machine
        self._workers.begin(machine)
        self.rescaler.begin()

    @property
    def _is_held(self) -> bool:
        """Whether a ps that is told to end waits for the run."""
        has_state = self.saving.source() is not None or self.copies.is_kept
        return has_state or self.client is not None or self.rescaler.is_elastic

    def position(self) -> dict[str, Any]:
        """Returns where in its data the run is.

        Raises:
          ConfigError: nobody deals that out here.
        """
        return self.saving.position()

    def _client_gone(self) -> None:
        _LOG.warning(
            "the client of run '%s' is gone for %g s; the run ends",
            *(self._order.run, self._order.client.lease_s),
        )
        self.stop()

    def stop(self) -> None:
        """Asks all loops to end after their steps in flight."""
        if self.record.is_over:
            return
        self.stopping = True
        self.record.note(frame(stop_loop=pb.StopLoop()))
        self._end_loops()
        self._handle(StopAsked())
        if self._supervisor is None:  # it never began
            self._end("stopped", None)

    def resume(self, events: Iterable[Event]) -> None:
        """Goes on with the run of a master that was lost.

        Args:
          events: what became of the loops, which ``loops`` has.
        """
        self.saving.prepare_halts()
        if self.client is not None:
            self.client.begin()
        if self._is_held:  # the standby lets the master of before go, which may be a ps
            self._holds.hold()
        if self.rescaler.is_elastic:
            self._do(self._resume(list(events)))
        else:
            self._begin_again(events)

    async def _resume(self, events: Sequence[Event]) -> None:
        await self.rescaler.tidy()
        self._begin_again(events)

    def _begin_again(self, events: Iterable[Event]) -> None:
        self._supervise(together=self.loops.arbiter is not None)
        if lost := list(self._order.goes_back):
            what = f"{', '.join(lost)} was lost, and then the master that went back"
            self._handle(PsGone(TaskLostError(what, tasks=lost)))
        for event in events:
            self._handle(event)
        self.rearranged()  # some may have left meanwhile

    def rearranged(self) -> None:
        """Takes note that tasks have joined the cluster, or left it."""
        ends = self._supervisor is None or self.record.is_over or self._leaves
        joiners = self._workers.joiners
        if not ends:
            self.rescaler.look()
        if ends or not joiners.is_elastic:
            return
        known, orders = self._losses.known, self.loops.replicas
        for replica in joiners.leavers(orders):
            self._do(self._lose_member(orders[replica]))
            self._handle(MemberLeft(replica))
        for order in list(orders.values()):
            if joiners.replaced(order, known.get(TaskName(order.task), "")):
                self._do(self._lose_member(order))
        self._workers.rearranged()

    def fail(self, error: JGError) -> None:
        """Ends the run."""
        if self._supervisor is None:
            self._end("failed", error)
        self._handle(Failed(error))

    def hand_over(self) -> None:
        """Begins nothing more: the standby is to know all that was begun."""
        self._leaves = True
        self._handle(MasterLeaves())

    def close(self) -> None:
        """Looks after nobody any more."""
        for work in self._working:
            work.cancel()
        self._holds.close()
        self._workers.close()
        self.rescaler.close()
        self.saving.close()
        if self.client is not None:
            self.client.close()

    # ------------------------------------------------------------ loops

    def _start(self, order: pb.RunLoop) -> None:
        self.loops.take(order)
        self._running.begin(order)
        self.saving.began(order)
        self._do(self._follow(order, self.record.seconds))

    async def _follow(self, order: pb.RunLoop, began_s: float) -> None:
        last, asked = pb.LoopReport(state="stopped"), pb.RunLoop()
        asked.CopyFrom(order)  # the master adds to it
        try:
            await self._losses.learn()
            if self._is_held:
                self._holds.hold()
            await self._survivors.begin(asked)
            async for report in self._peers.loop(asked):
                body = body_of(report)
                if body.number:  # else it tells how far it is, and no more
                    last = self._keep(order, report, began_s)
                await self.saving.note(order, body)
                if self.stopping:  # it may have begun after the others were told
                    self._do(self._running.tell(order, pb.StopLoop()))
            event = _ended(order, last.state)
        except JGError as error:
            event = await self._event_of(error, order, last.number, began_s)
        is_known = self._running.end(order)
        self.saving.over(order)
        # Else a client has begun others, or its end is known already.
        if self.loops.has(order) and not is_known:
            self._handle(event)

    async def _event_of(
        self, error: JGError, order: pb.RunLoop, after: int, began_s: float
    ) -> Event:
        """Returns what the end of a loop by an error means for the run."""
        task = TaskName(order.task)
        sync = order.HasField("sync")
        verdict = judge(error, task, self._peers.task, decides=sync)
        if verdict is LoopOutcome.UNWELL:
            return BatchFailed(None if sync else order.replica, error)
        if not sync or verdict is not LoopOutcome.ARBITER_LOST:
            return await self._loss_of(order, error)
        world = self._peers, self._losses.known, self._clock
        try:
            account = await final_report_of(order, after, error, *world)
        except JGError as another:
            return await self._loss_of(order, another)
        state = self._keep(order, account, began_s).state
        if state == "stopped" and not self.stopping:
            state = "paused"  # it was the loss of its master that ended it
        return RoundEnded(state)

    def _keep(self, order: pb.RunLoop, report: Frame, began_s: float) -> pb.LoopReport:
        """Keeps a report, and learns from it where the next loop is to begin."""
        body: pb.LoopReport = body_of(report)
        note_report(order, report)
        self.record.keep(order, report, began_s)
        return body

    async def _leave_out(self, order: pb.RunLoop, error: JGError) -> Event:
        """Goes on without the worker of a loop, if this still is the master."""
        try:
            await check_master(self._peers, order.run, order.term)
        except FencedError as fenced:
            return Failed(fenced)
        if self.record.is_over:  # its programs are those of the client's next run
            return LoopLost(order.replica, error)
        _LOG.warning("%s was lost: %s", order.task, error.message)
        self.record.lost(order, error)
        await self.ready.drop(order.handle)
        return LoopLost(order.replica, error)

    async def _lose_member(self, order: pb.RunLoop) -> None:
        """Ends a loop whose worker is no task any more, if it has not ended soon."""
        if await self._running.write_off(order):
            what = f"{order.task} is no member of the cluster any more"
            error = TaskLostError(what, task=order.task)
            self._handle(await self._leave_out(order, error))

    def learn_anew(self) -> None:
        """Takes note of which processes the run has now, in place of those before."""
        self._losses.forget()
        self._do(self._losses.learn())

    async def _loss_of(self, order: pb.RunLoop, error: JGError) -> Event:
        """Returns what is lost where a loop ends with an error, and leaves it out."""
        event = await self._losses.of(order, error)
        lost = isinstance(event, LoopLost)
        return await self._leave_out(order, error) if lost else event

    # ------------------------------------------------------------ decisions

    def _handle(self, event: Event) -> None:
        if self._supervisor is None:
            return
        for instruction in self._supervisor.handle(event, self._clock.now()):
            self._perform(instruction)
        self._workers.seek()

    def _perform(self, instruction: Instruction) -> None:
        match instruction:
            case Prepare(replica, joins):
                self._workers.prepare(replica, joins=joins)
            case Forget(replica):
                self._workers.forget(replica)
            case Rest() if self.rescaler.is_due:
                self.rescaler.rest()
            case Rest():
                self._do(self._restart_ps())
            case GoBack(error):
                self._goes_back = True
                self._do(self._go_back(error))
            case Finish():
                self._do(self._finish())
            case Over(state, error):
                self._end(state, error)
            case _:
                self._perform_on_loops(instruction)

    def _perform_on_loops(self, instruction: Instruction) -> None:
        arbiter = self.loops.arbiter
        match instruction:
            case Begin(replicas):
                self._begin(replicas)
            case Pause():
                self._pause()
            case EndLoops():
                self._end_loops()
            case LeaveOut(replica) if arbiter is not None:
                message = pb.StopLoop(lost=self.loops.replicas[replica].task)
                self._do(self._running.tell(arbiter, message))

    def _begin(self, replicas: Sequence[int]) -> None:
        if self.loops.arbiter is not None:
            # Known from here on, as it is told what comes while the gates open.
            again = self.loops.again(self.loops.arbiter)
            self.loops.take(again)
            self._running.begin(again)
            self._do(self._begin_round(again, replicas))
            return
        for replica in replicas:
            again = self.loops.again(self.loops.replicas[replica])
            self.record.begins(again)
            self._start(again)

    def _pause(self) -> None:
        if self.loops.arbiter is not None:
            message = pb.StopLoop(pause=True)
            self._do(self._running.tell(self.loops.arbiter, message))
        else:
            self._end_loops()

    def _end_loops(self) -> None:
        for order in self._running.orders:
            self._do(self._running.tell(order, pb.StopLoop()))

    def _end(self, state: str, error: JGError | None) -> None:
        if error is not None:
            replaced = isinstance(error, FencedError)  # it goes on elsewhere
            level = logging.INFO if replaced else logging.ERROR
            _LOG.log(level, "the run failed here: %s", error.message)
            self._end_loops()
        if not isinstance(error, FencedError):
            self._peers.note(*end_of_run(self.name, error))
        self.record.end(state, error)
        if self.client is not None:
            self.client.close()
        self._workers.close()
        self.rescaler.close()
        self._do(self._let_go(dropped=not isinstance(error, FencedError)))

    def _rescaled(self, left_out: set[str]) -> None:
        """Begins loops again, on the ps that there are now."""
        if self._goes_back:
            return  # loops begin after that
        for order in list(self.loops.replicas.values()):
            if order.task in left_out:
                error = TaskLostError(f"{order.task} is lost", task=order.task)
                self._handle(LoopLost(order.replica, error))
        self.saving.prepare_halts()
        self._handle(Restarted(again=self._must_rest))

    def _ps_told(self) -> None:
        """Takes note that a ps is told to end."""
        if self._restarting:
            self._handle(RestartAsked())
        else:
            self.rescaler.look()

    @property
    def _restarting(self) -> list[TaskName]:
        """The ps that were told to end, and come back."""
        needed = [t for t in self._holds.leaving if holds_state(self._order, t)]
        return [task for task in needed if not self.rescaler.is_leaver(task)]

    @property
    def _must_rest(self) -> bool:
        """Whether no loop is to run yet."""
        return bool(self._restarting) or self.rescaler.is_due

    def _release(self, leavers: Sequence[TaskName]) -> None:
        """Holds the ps of the run, and those that are needed no more not."""
        self._holds.let_go(leavers)
        if self._is_held:
            self._holds.hold()

    async def _restart_ps(self) -> None:
        """Lets the ps end that were told to, once what they hold is kept elsewhere."""
        await self.saving.begin_for_client()
        if not (leaving := self._restarting):  # they leave for good, as is known since
            self._rescaled(set())
            return
        saved, drain = None, told_to_end(*leaving)
        source = self.saving.source()
        if source is None and not self.copies.is_kept:
            why = "and the run has nothing to go on from; give fit(checkpoint=…)"
            self._handle(
                Failed(TaskLeavingError(f"{drain.message}, {why}", **drain.details))
            )
            return
        if source is not None and (self.client is not None or not self.copies.is_kept):
            place = json.dumps(self.position())
            saved = await source.save_at_rest(leaving, place)
        elif self.client is not None:
            with suppress(JGError):  # it is gone, and holds nothing
                await self.client.ask("rest", tasks=leaving)
        self._holds.let_go(leaving)
        await self._go_back(drain, saved)

    async def _finish(self) -> None:
        """Lets the client, if there is one, do what it needs the ps for."""
        await self.rescaler.settle()
        error: JGError | None = None
        if self.client is not None:
            try:
                place = json.dumps(self.position())
                await self.client.ask("finish", position=place)
            except JGError as caught:
                error = caught
        if self.client is None or error is not None:
            event = await self._unfinished(self.client, error)
            if event is not None:
                self._handle(event)
                return
        await self.saving.begin_for_client()
        self._handle(Finished())

    async def _unfinished(
        self, client: RunClient | None, error: JGError | None
    ) -> Event | None:
        """Returns what it means that no client did so; None: it is not needed.

        Nobody reads the ps then, who would find out that one is lost.
        """
        lost = await self._losses.ps()
        if lost and (client is None or client.is_gone):
            what = f"{lost[0]} was lost at the end of the run"
            return FinishFailed(TaskLostError(what, task=lost[0]))
        if error is None or client is None or client.is_gone:
            return None
        is_loss = isinstance(error, TaskLostError | ClusterUnreachableError)
        return FinishFailed(error) if lost or is_loss else Failed(error)

    async def _let_go(self, *, dropped: bool) -> None:
        """Lets all ps go, as soon as a run that is over is saved.

        Args:
          dropped: forget what was made for tasks that came back.
        """
        await self.saving.rest()
        if self.loops.data is not None:
            with suppress(ConfigError):  # it never began
                self._peers.dealers.close(self.loops.data.run)
        self._holds.close()
        if dropped:
            await self._survivors.close()
            await self.copies.close()
            for loop in self.loops.newest:
                if "~" in loop.handle:
                    await self.ready.drop(loop.handle)

    def _note_order(self) -> None:
        """Keeps what is known of the run now, for the standby of this master."""
        order = pb.OpenRun()
        order.CopyFrom(self._order)
        order.holders.update(self._losses.holders)
        self.record.note(frame(open_run=order))

    def _next_name(self, kind: str) -> str:
        return f"{kind}.{self.record.term}.{self.loops.next_number()}"

    async def _go_back(self, error: JGError, saved: Saved | None = None) -> None:
        """Goes on from what is kept of the state, with all workers that answer."""
        await self.rescaler.lose_state()
        world = self._losses.known, self.loops.newest, self._next_name("back")
        if self.rescaler.is_elastic:  # else who comes next finds programs dropped
            named = error.details.get("tasks") or [error.details.get("task") or "a ps"]
            self._order.goes_back[:] = map(str, named)
            self._note_order()
            await self.confirm()
        try:
            back = await self._rollback.go_back(error, *world, saved)
        except JGError as hopeless:
            self._handle(Failed(hopeless))
            return
        if self.record.is_over:
            return
        info, recovery = json.loads(self._order.info), back.recovery
        step = recovery.back_to
        self.restores += 1
        restoration = pb.RunRestored(
            number=self.restores,
            lost=recovery.lost,
            step=recovery.step,
            back_to=step,
            version=back.version,
            seconds=recovery.seconds,
            told=recovery.is_drain,
            by=recovery.by,
            rest_of=recovery.rest_of,
            untold=not self.record.is_told_all,
        )
        place, remaining = self._place(back), max(0, info["steps"] - step)
        data = self.loops.data
        if self.loops.arbiter is None and data is not None:
            if back.saved is None or back.saved.position is not None:
                # Not by updates: a batch that is done again leaves out no other.
                remaining = max(0, _end_of(data) - place["done"])
            restoration.data.CopyFrom(self._deal_again(remaining, place))
        self.record.go_back(restoration, step - info["first_step"], json.dumps(place))
        remaining = self.record.may_do(remaining)
        self.loops.go_back(step, remaining, json.dumps(place))
        self._order.version = back.version
        del self._order.goes_back[:]
        self._note_order()
        self.saving.prepare_halts()
        for order in list(self.loops.replicas.values()):  # one that has left goes
            if order.task in back.left_out:
                self.record.lost(order, error)
                self._handle(LoopLost(order.replica, error))
        if self._is_held:
            self._holds.hold_again(recovery.lost)
        self._goes_back = False
        self._handle(Restarted(again=self._must_rest, done=not remaining))

    def _place(self, back: RolledBack) -> dict[str, Any]:
        """Returns where in its data a run is that went back."""
        arbiter, data = self.loops.arbiter, self.loops.data
        if back.saved is not None and arbiter is not None:
            return position_of(arbiter.data_plan, back.saved, arbiter.sync.wanted)
        if arbiter is not None:
            position = self.record.position or arbiter.sync.data_position
            return dict(json.loads(position))
        if data is None:
            raise AssertionError("a run whose data nobody deals out")
        if back.saved is not None:
            return position_of(data.plan, back.saved, 1)
        return self._peers.dealers.position(data.run)

    def _deal_again(self, batches: int, place: Mapping[str, Any]) -> pb.OpenDataRun:
        dealers, old = self._peers.dealers, self.loops.data
        run = f"{self._order.run}~{self._next_name('data')}"
        data = self.loops.deal(dealers, run, batches, place)
        self.record.data_run = data.run
        if old is not None:
            dealers.close(old.run)
        return data

    async def _begin_round(self, arbiter: pb.RunLoop, replicas: Sequence[int]) -> None:
        """Begins the next round of synchronous training."""
        if not await self._have_returned(arbiter, replicas):
            return
        orders = [self.loops.again(self.loops.replicas[r]) for r in replicas]
        wanted = self._workers.joiners.contributions(arbiter.sync.wanted, len(orders))
        arbiter.sync.wanted = wanted
        try:
            await open_round_gates(self._peers, arbiter, orders)
        except JGError as error:
            self._running.end(arbiter)  # it never began: nobody is to be told
            lost = await self._loss_of(arbiter, error)
            for order in orders:
                self._handle(LoopEnded(order.replica, "stopped"))
            self._handle(lost)
            return
        ends = self._leaves or self.record.is_over  # it may have failed meanwhile
        for order in () if ends else (arbiter, *orders):
            self.record.begins(order)
            self._start(order)

    async def _have_returned(
        self, arbiter: pb.RunLoop, replicas: Sequence[int]
    ) -> bool:
        """Gives owners that are there again their parts; False: one is lost again."""
        loops = [self.loops.replicas[replica] for replica in replicas]
        tasks = [loop.task for loop in loops]
        if not (parts := self.stand_ins.away(tasks)):
            return True
        owners, name = [part.task for part in parts], self._next_name("back")
        try:
            await self._rollback.give_back(parts, [arbiter, *loops], name)
        except JGError as error:
            self._running.end(arbiter)  # it never began
            still = [part.task for part in self.stand_ins.away(tasks)]
            lost: Event = RoundEnded("paused")
            if not still:
                lost = await self._loss_of(arbiter, error)
            for loop in loops:
                ended: Event = LoopEnded(loop.replica, "stopped")
                if loop.task in still:
                    ended = await self._leave_out(loop, error)
                self._handle(ended)
            self._handle(lost)
            return False
        self._note_order()
        if self._is_held:
            self._holds.hold_again(list(map(TaskName, owners)))
        return True

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(self._done(work))
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        return task

    async def _done(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  # nobody waits for it
            self._handle(Failed(as_error(error, self._peers.task)))


def _end_of(data: pb.OpenDataRun) -> int:
    """Returns how many batches are done when all that is dealt out are."""
    if not data.position:
        return int(data.budget)
    return int(json.loads(data.position)["done"]) + int(data.budget)


def _ended(order: pb.RunLoop, state: str) -> Event:
    if order.HasField("sync"):
        return RoundEnded(state)
    return LoopEnded(order.replica, state)


async def _nobody() -> None:
    """There is no standby."""
