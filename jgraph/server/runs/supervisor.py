"""Run supervisor on the master: starts, watches and replaces a run's replica loops."""

import asyncio
import json
import logging
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, final

from jgraph.clock import Clock
from jgraph.cluster.deadlines import DRAIN_S
from jgraph.cluster.drain import told_to_end
from jgraph.coordination.run.loop_outcome import LoopOutcome, is_link_loss, judge
from jgraph.coordination.run.supervisor import (
    BatchFailed,
    Begin,
    EndLoops,
    Event,
    Failed,
    GoBack,
    Instruction,
    LeaveOut,
    LoopBegan,
    LoopEnded,
    LoopFailed,
    LoopLost,
    Over,
    Pause,
    Prepare,
    Rest,
    RestartAsked,
    Restarted,
    RoundBegan,
    RoundEnded,
    StateLost,
    StopAsked,
    Supervisor,
    TimePassed,
    WorkerAnswered,
    WorkerNotReady,
    WorkerReady,
)
from jgraph.errors import (
    ClusterUnreachableError,
    ConfigError,
    DataSlotError,
    FencedError,
    InvalidProgramError,
    JGError,
    TaskLostError,
    UninitializedError,
)
from jgraph.graph.device import is_ps
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame
from jgraph.runtime.compute_errors import as_error
from jgraph.server.runs.checkpointer import RunCheckpointer, Saved
from jgraph.server.runs.copies import RunCopies
from jgraph.server.runs.halts import RunHalts
from jgraph.server.runs.holds import PsHolds
from jgraph.server.runs.journal import Journal, note_report
from jgraph.server.runs.links import final_report_of
from jgraph.server.runs.peers import (
    LoopPeers,
    Peers,
    check_master,
    reaches_every_ps,
    ready_tasks,
)
from jgraph.server.runs.ps_setup import PsSetup
from jgraph.server.runs.rollback import Rollback, RolledBack, position_of
from jgraph.server.runs.worker_setup import WorkerSetup

_LOG = logging.getLogger("jgraph.recover")
_POLL_S: Final = 0.5
"""Between two looks: that a worker answers again shows only by asking it."""


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
      data: what is dealt out in asynchronous training, once that is known.
      restores: how often the run went on from a checkpoint.
    """

    def __init__(self, order: pb.OpenRun, peers: LoopPeers, clock: Clock) -> None:
        self.record = Journal(peers.task, order, clock)
        self._order = order
        self.ready = WorkerSetup(order, peers)
        self._ps = PsSetup(order, peers, self.ready)
        self.copies = RunCopies(order, peers, self.ready)
        self.data: pb.OpenDataRun | None = None
        self._peers = peers
        self._clock = clock
        self._supervisor: Supervisor | None = None
        self._orders: dict[int, pb.RunLoop] = {}
        """What the loop of each replica does next, or does."""
        self._arbiter: pb.RunLoop | None = None
        self._under_way: dict[str, pb.RunLoop] = {}
        self._known: dict[TaskName, str] = {}
        self._learning: asyncio.Future[dict[TaskName, str]] | None = None
        self._number = 0
        told = lambda: self._handle(RestartAsked())
        self._holds = PsHolds(peers, self._ps, self.record, told)
        self._rollback = self._make_rollback(None)
        self.restores = 0
        self._halts: RunHalts | None = None
        self._saver: RunCheckpointer | None = None
        self.stopping = False
        self._looking = False
        self._working: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ from outside

    def begin(self, order: pb.RunLoop) -> None:
        """Begins a loop as a client asks."""
        together = order.HasField("sync") or bool(order.batch_feed)
        if self._supervisor is None:
            self._supervisor = self._make_supervisor(together=together)
        if not self.record.is_over:
            self._start(order)
            self._handle(
                RoundBegan() if order.HasField("sync") else LoopBegan(order.replica)
            )

    def _make_supervisor(self, *, together: bool) -> Supervisor:
        return Supervisor(together=together, wait_s=self._order.wait_s)

    def be_saved(self, saver: RunCheckpointer) -> None:
        """Lets ``saver`` save the run now and then, and before a ps ends."""
        self._halts = RunHalts(self._order, saver, self._ask, self._do)
        self._saver, self._rollback = saver, self._make_rollback(saver)

    def _make_rollback(self, saver: RunCheckpointer | None) -> Rollback:
        return Rollback(
            *(self._order, self._peers, self.ready, self._ps, self.copies),
            *(self.record, saver, self._clock),
            is_stopped=lambda: self.stopping,
        )

    def stop(self) -> None:
        """Asks all loops to end after their steps in flight."""
        self.stopping = True
        self.record.note(frame(stop_loop=pb.StopLoop()))
        self._end_loops()
        self._handle(StopAsked())

    def resume(
        self,
        orders: Mapping[int, pb.RunLoop],
        arbiter: pb.RunLoop | None,
        events: Iterable[Event],
    ) -> None:
        """Goes on with the run of a master that was lost.

        Args:
          orders: what the loop of each replica did last.
          arbiter: likewise the loop that decides; None: training is asynchronous.
          events: what became of them.
        """
        self._orders, self._arbiter = dict(orders), arbiter
        self._supervisor = self._make_supervisor(together=arbiter is not None)
        for event in events:
            self._handle(event)

    def fail(self, error: JGError) -> None:
        """Ends the run."""
        if self._supervisor is None:
            self._end("failed", error)
        self._handle(Failed(error))

    def close(self) -> None:
        """Looks after nobody any more."""
        for work in self._working:
            work.cancel()
        self._holds.close()

    # ------------------------------------------------------------ loops

    def _start(self, order: pb.RunLoop) -> None:
        if order.HasField("sync"):
            self._arbiter = order
        else:
            self._orders[order.replica] = order
        self._under_way[order.loop] = order
        if self._halts is not None:
            self._halts.began(order)
        self.record.begins(order)
        self._do(self._follow(order, self.record.seconds))

    async def _follow(self, order: pb.RunLoop, began_s: float) -> None:
        last, asked = pb.LoopReport(state="stopped"), pb.RunLoop()
        asked.CopyFrom(order)  # the master adds to it
        try:
            await self._learn()
            if self._saver is not None or self.copies.is_kept:
                self._holds.hold()
            async for report in self._peers.loop(asked):
                body = body_of(report)
                if body.number:  # else it tells how far it is, and no more
                    last = self._keep(order, report, began_s)
                await self._note_halt(order, body)
                if self.stopping:  # it may have begun after the others were told
                    self._tell(order, pb.StopLoop())
            event = _ended(order, last.state)
        except JGError as error:
            event = await self._event_of(error, order, last.number, began_s)
        del self._under_way[order.loop]
        if self._halts is not None:
            self._halts.over(order)
        sync = order.HasField("sync")
        newest = self._arbiter if sync else self._orders.get(order.replica)
        if order is newest:  # else a client has begun others
            self._handle(event)

    async def _note_halt(self, order: pb.RunLoop, body: pb.LoopReport) -> None:
        if self._halts is not None:
            self._halts.note(order, body)
        elif body.halted:  # it cannot be saved
            await self._ask(order.loop, pb.StopLoop(go_on=body.halted))

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
        world = self._peers, self._known, self._clock
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
        _LOG.warning("%s was lost: %s", order.task, error.message)
        self.record.lost(order, error)
        await self.ready.drop(order.handle)
        return LoopLost(order.replica, error)

    def learn_anew(self) -> None:
        """Takes note of which processes the run has now, in place of those before."""
        self._learning, self._known = None, {}
        self._do(self._learn())

    async def _learn(self) -> None:
        if self._learning is None:
            self._learning = asyncio.ensure_future(ready_tasks(self._peers))
        self._known = {**await self._learning, **self._known}

    async def _loss_of(self, order: pb.RunLoop, error: JGError) -> Event:
        """Returns what is lost where a loop ends with an error: a worker, or the state.

        Or nothing, and the run fails.
        """
        decides = order.HasField("sync")
        replica = None if decides else order.replica
        failed = LoopFailed(replica, error)
        if isinstance(error, DataSlotError | FencedError):
            return failed
        task = TaskName(order.task)
        named = TaskName(str(error.details.get("task", "")))
        ready = await ready_tasks(self._peers)
        if isinstance(error, TaskLostError | ClusterUnreachableError):
            # A ps that is where it was, or only the worker does not reach it.
            link = is_link_loss(named, self._known, ready)
            if not decides and (named == task or link):
                return await self._leave_out(order, error)
            return StateLost(replica, error) if is_ps(named) else failed
        changed = {t for t, one in self._known.items() if ready.get(t) != one}
        # It has lost what it had, though it may be the one that was known last.
        is_new = isinstance(error, InvalidProgramError | UninitializedError)
        if any(map(is_ps, changed)) or (is_new and is_ps(named)):
            return StateLost(replica, error)
        return await self._leave_out(order, error) if task in changed else failed

    def _tell(self, order: pb.RunLoop, told: pb.StopLoop) -> None:
        told.loop, told.task = order.loop, order.task
        told.run, told.term = order.run, order.term
        self._do(self._tell_loop(told))

    async def _ask(self, loop: str, told: pb.StopLoop) -> int:
        """Tells a loop something once; returns the halt that it has ended, if any."""
        order = self._under_way.get(loop)
        if order is None:
            return 0
        told.loop, told.task = order.loop, order.task
        told.run, told.term = order.run, order.term
        try:
            request = frame(stop_loop=told)
            reply = await self._peers.call(TaskName(told.task), "StopLoop", request)
        except JGError as error:
            _LOG.info("loop %s is not reached: %s", told.loop, error.message)
            return 0
        return int(body_of(reply).halted) if told.go_on else 0

    async def _tell_loop(self, told: pb.StopLoop) -> None:
        """Tells a loop something, unless it ends before it can be told."""
        request = frame(stop_loop=told)
        while told.loop in self._under_way:
            try:
                await self._peers.call(TaskName(told.task), "StopLoop", request)
            except FencedError:
                return  # another master looks after it
            except JGError as error:
                _LOG.info("loop %s is not reached yet: %s", told.loop, error.message)
                await asyncio.sleep(_POLL_S)
            else:
                return

    # ------------------------------------------------------------ decisions

    def _handle(self, event: Event) -> None:
        if self._supervisor is None:
            return
        for instruction in self._supervisor.handle(event, self._clock.now()):
            self._perform(instruction)
        if self._supervisor.missing and not self._looking:
            self._looking = True
            self._do(self._look())

    def _perform(self, instruction: Instruction) -> None:
        arbiter = self._arbiter
        match instruction:
            case Prepare(replica):
                self._do(self._prepare(replica))
            case Begin(replicas):
                self._begin(replicas)
            case Pause():
                self._pause()
            case EndLoops():
                self._end_loops()
            case Rest():
                self._do(self._restart_ps())
            case GoBack(error):
                self._do(self._go_back(error))
            case LeaveOut(replica) if arbiter is not None:
                self._tell(arbiter, pb.StopLoop(lost=self._orders[replica].task))
            case Over(state, error):
                self._end(state, error)

    def _begin(self, replicas: Sequence[int]) -> None:
        if self._arbiter is not None:
            # Known from here on, as it is told what comes while the gates open.
            self._arbiter = again = self._again(self._arbiter)
            self._under_way[again.loop] = again
            self._do(self._begin_round(again, replicas))
            return
        for replica in replicas:
            self._start(self._again(self._orders[replica]))

    def _pause(self) -> None:
        if self._arbiter is not None:
            self._tell(self._arbiter, pb.StopLoop(pause=True))
        else:
            self._end_loops()

    def _end_loops(self) -> None:
        for loop in list(self._under_way.values()):
            self._tell(loop, pb.StopLoop())

    def _end(self, state: str, error: JGError | None) -> None:
        if error is not None:
            replaced = isinstance(error, FencedError)  # it goes on elsewhere
            level = logging.INFO if replaced else logging.ERROR
            _LOG.log(level, "the run failed here: %s", error.message)
            for loop in self._under_way.values():
                self._tell(loop, pb.StopLoop())
        self.record.end(state, error)
        self._do(self._let_go())

    async def _restart_ps(self) -> None:
        """Lets the ps end that were told to, once what they hold is kept elsewhere."""
        saved = None
        if not self.copies.is_kept:
            assert self._saver is not None  # or no ps is held
            saved = await self._saver.save_at_rest()
        await self._go_back(told_to_end(*self._holds.release()), saved)

    async def _let_go(self) -> None:
        """Lets all ps go, as soon as a run that is over is saved."""
        if self._saver is not None:
            await self._saver.rest()
        if self.data is not None:
            with suppress(ConfigError):  # it never began
                self._peers.dealers.close(self.data.run)
        self._holds.close()

    def _note_order(self) -> None:
        """Keeps what is known of the run now, for the standby of this master."""
        order = pb.OpenRun()
        order.CopyFrom(self._order)
        self.record.note(frame(open_run=order))

    @property
    def _newest(self) -> list[pb.RunLoop]:
        """The last order of each replica, and of the loop that decides."""
        return [*self._orders.values(), *filter(None, [self._arbiter])]

    def _next_name(self, kind: str) -> str:
        self._number += 1
        return f"{kind}.{self.record.term}.{self._number}"

    async def _go_back(self, error: JGError, saved: Saved | None = None) -> None:
        """Goes on from what is kept of the state, with all workers that answer."""
        world = self._known, self._newest, self._next_name("back")
        try:
            back = await self._rollback.go_back(error, *world, saved)
        except JGError as hopeless:
            self._handle(Failed(hopeless))
            return
        if self.record.is_over:
            return
        info, step = json.loads(self._order.info), back.back_to
        self.restores += 1
        told = pb.RunRestored(
            number=self.restores,
            lost=back.lost,
            step=back.step,
            back_to=step,
            version=back.version,
        )
        place = self._place(back)
        if self._arbiter is not None:
            self._arbiter.steps = info["steps"] - step
            self._arbiter.sync.version = step
            self._arbiter.sync.data_position = json.dumps(place)
        elif self.data is not None:
            left = info["steps"] - step
            if back.manifest is None:
                left = _end_of(self.data) - place["done"]
            self._deal_again(left, place)
            told.data.CopyFrom(self.data)
        self.record.go_back(told, step - info["first_step"], json.dumps(place))
        self._order.version = back.version
        self._note_order()
        if self._saver is not None:
            self._halts = RunHalts(self._order, self._saver, self._ask, self._do)
        for order in self._orders.values():
            if order.task in back.left_out:
                self._handle(LoopLost(order.replica, error))
        if self._saver is not None or self.copies.is_kept:
            self._holds.hold_again(back.lost)
        self._handle(Restarted(again=self._holds.is_asked))

    def _place(self, back: RolledBack) -> dict[str, Any]:
        """Returns where in its data a run is that went back."""
        arbiter, data = self._arbiter, self.data
        if back.manifest is not None and arbiter is not None:
            return position_of(arbiter.data_plan, back.manifest, arbiter.sync.wanted)
        if arbiter is not None:
            told = self.record.position or arbiter.sync.data_position
            return dict(json.loads(told))
        if data is None:
            raise AssertionError("a run whose data nobody deals out")
        if back.manifest is not None:
            return position_of(data.plan, back.manifest, 1)
        return self._peers.dealers.position(data.run)

    def _deal_again(self, batches: int, place: Mapping[str, Any]) -> None:
        assert self.data is not None  # of asynchronous training
        dealers, old = self._peers.dealers, self.data.run
        data = pb.OpenDataRun()
        data.CopyFrom(self.data)
        data.run = f"{self._order.run}~{self._next_name('data')}"
        data.budget = batches
        data.position = json.dumps(place)
        dealers.open(data)
        dealers.close(old)
        self.data, self.record.data_run = data, data.run
        for order in self._orders.values():
            order.data_run = data.run

    async def _look(self) -> None:
        """Looks for workers that are missing, as long as there are any."""
        assert self._supervisor is not None
        try:
            while self._supervisor.missing:
                await asyncio.sleep(_POLL_S)
                self._handle(TimePassed())
                ready = await ready_tasks(self._peers)
                for replica in self._supervisor.missing:
                    task = TaskName(self._orders[replica].task)
                    if task in ready and await reaches_every_ps(self._peers, task):
                        self._known[task] = ready[task]
                        self._handle(WorkerAnswered(replica))
        finally:
            self._looking = False

    async def _prepare(self, replica: int) -> None:
        order = self._orders[replica]
        self._number += 1
        try:
            await check_master(self._peers, order.run, order.term)
            order.handle = await self.ready.prepare(order, self._number)
            await self.copies.admit(order.handle, 0)
        except FencedError as error:
            self._handle(Failed(error))
            return
        except JGError as error:  # it went away again; the next look tells
            _LOG.info("%s does not take part yet: %s", order.task, error.message)
            self._handle(WorkerNotReady(replica))
            return
        _LOG.warning("%s answers again and takes part in the run", order.task)
        self._handle(WorkerReady(replica))

    def _again(self, order: pb.RunLoop) -> pb.RunLoop:
        self._number += 1
        return next_order(order, self._number)

    async def _begin_round(self, arbiter: pb.RunLoop, replicas: Sequence[int]) -> None:
        """Begins the next row of loops of synchronous training."""
        orders = [self._again(self._orders[r]) for r in replicas]
        try:
            await open_round_gates(self._peers, arbiter, orders)
        except JGError as error:
            del self._under_way[arbiter.loop]  # it never began: nobody is to be told
            lost = await self._loss_of(arbiter, error)
            for order in orders:
                self._handle(LoopEnded(order.replica, "stopped"))
            self._handle(lost)
            return
        for order in (arbiter, *orders):
            self._start(order)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(self._done(work))
        self._working.add(task)
        task.add_done_callback(self._working.discard)

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


def next_order(order: pb.RunLoop, number: int) -> pb.RunLoop:
    """Returns the order of the loop that comes after another one, the next of a run."""
    after = pb.RunLoop()
    after.CopyFrom(order)
    first = order.loop.partition("~")[0]
    after.loop = f"{first}~{order.term}.{number}"
    return after


async def open_round_gates(
    peers: Peers, deciding: pb.RunLoop, orders: Sequence[pb.RunLoop]
) -> None:
    """Opens the gates for the next row of loops of synchronous training.

    Args:
      peers: to the tasks.
      deciding: of the loop that decides; is told who takes part.
      orders: of those that do.

    Raises:
      JGError: a gate does not open.
    """
    sync = deciding.sync
    sync.handles[:] = [order.handle for order in orders]
    sync.tasks[:] = [order.task for order in orders]
    gate = pb.OpenGate(
        gate=sync.gate,
        shards=sync.shards,
        synchronous=True,
        version=sync.version,
        opening=deciding.loop,
        run=deciding.run,
        term=deciding.term,
    )
    for shard in map(TaskName, sync.shards):
        request = frame(open_gate=gate)
        await peers.call(shard, "OpenGate", request, timeout_s=DRAIN_S)
    for order in (deciding, *orders):
        order.data_run = deciding.loop
