"""Arbiter loop of synchronous training, on the first ps: decides, deals out data."""

import asyncio
import json
import math
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias, final

import numpy as np

from jgraph.clock import Clock
from jgraph.cluster.loop_messages import (
    cut_of,
    deal_of,
    finite_check_of,
    rule_of,
    sums_of,
)
from jgraph.coordination.data.shares import Shares
from jgraph.coordination.data.slots import SlotPlan
from jgraph.coordination.data.sync_data import SyncData, rounds_for
from jgraph.coordination.liveness.master_lease import LeaseTracker
from jgraph.coordination.sync.aggregation import (
    Applied,
    Arbiter,
    AskEnded,
    BeginSum,
    Contributed,
    DataAsked,
    DealData,
    Decide,
    End,
    Event,
    Failed,
    GiveUpSum,
    GoOnAsked,
    Halt,
    Instruction,
    NotApplied,
    ReplicaLost,
    StopAsked,
    SumSays,
    TimeIsUp,
    Void,
)
from jgraph.coordination.sync.rounds import RoundRecord
from jgraph.errors import JGError, NonFiniteError, RunOverError, TaskLostError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.transport import Frame
from jgraph.runtime.compute_errors import as_error
from jgraph.server.gates.gates import Decides, Gates
from jgraph.server.loops.dealer import ANSWER_S
from jgraph.server.loops.halt_timer import HaltTimer
from jgraph.server.loops.master_lease import MasterLease
from jgraph.server.loops.reports import LoopReports
from jgraph.server.loops.sum_desk import Compute, SumDesk
from jgraph.server.steps.driver import Fetches, StepDriver

AskMaster: TypeAlias = Callable[[], Awaitable[object]]


@final
class ArbiterLoop:
    """Decides and applies the updates of one order of ``RunLoop`` with ``sync``.

    Args:
      order: what to run; ``handle`` is the program that applies an update.
      driver: drives the steps of that program.
      gates: of this task; the order's is open.
      clock: time for reports and the deadline.
      compute: runs work in a thread.
      ask_master: asks whether the master is there; None: it is here.

    Attributes:
      record: what it reports.
    """

    def __init__(
        self,
        order: pb.RunLoop,
        driver: StepDriver,
        gates: Gates,
        clock: Clock,
        compute: Compute,
        ask_master: AskMaster | None = None,
    ) -> None:
        sync = order.sync
        tasks = map(TaskName, sync.tasks)
        self._order = order
        self._gate = sync.gate
        self._driver = driver
        self._gates = gates
        self._clock = clock
        self._replicas = dict(zip(sync.handles, tasks, strict=True))
        cut = cut_of(sync)
        self._data = SyncData(
            SlotPlan.from_dict(json.loads(order.data_plan)),
            self._replicas,
            json.loads(sync.data_position),
            shares=None if cut is None else Shares(cut),
            own=sync.HasField("rounds"),
            rounds=rounds_for(len(self._replicas)),
        )
        self._answers: dict[str, asyncio.Future[pb.DataDeal]] = {}
        self._rounds: list[pb.RoundReport] = []  # not reported yet
        self._first_at: float | None = None  # when the first of a round contributed
        self._finite = finite_check_of(order)
        sums = sums_of(sync)
        self._desk: SumDesk | None = None
        if sums is not None:
            self._desk = SumDesk(
                *(sums, self._replicas, self._take, compute, order.step_timeout_s)
            )
        self._number = 0  # of the secure sum under way
        self._machine = Arbiter(
            map(TaskName, sync.shards),
            self._replicas,
            self._data,
            wanted=sync.wanted,
            version=sync.version,
            steps=order.steps,
            halt_every=sync.halt_every,
            rule=rule_of(sync),
            sums=sums,
            draw=lambda: secrets.randbits(64),
        )
        self._halts = HaltTimer(order.loop, self.go_on)
        self._events: deque[Event] = deque()
        self._handling = False
        self._progress_at = clock.now()
        self.record = LoopReports(clock)
        self._timer: asyncio.TimerHandle | None = None
        self._lease: MasterLease | None = None
        if ask_master is not None:
            lease = self._lease = MasterLease(
                lambda: lease.ask(ask_master, lambda answer: None),
                LeaseTracker(clock.now()),
                clock,
                self._give_up,
                self._take,
            )

    def stop(self, *, pause: bool = False) -> None:
        """Asks the loop to end after the update under way; see ``StopAsked``."""
        self._take(StopAsked(pause))

    def go_on(self, version: int) -> bool:
        """Ends a halt; returns whether no update was decided since it began."""
        stood = self._machine.halted == version
        if stood:
            self._halts.end()
            self._progress_at = self._clock.now()  # nobody was late meanwhile
        self._take(GoOnAsked(version))
        return stood

    def peer_lost(self, peer: TaskName) -> None:
        """Learns that a task went away: one that has contributions, or makes them."""
        if peer in self._order.sync.shards:
            # What it was about to tell of may be lost, and it would be waited for.
            error = TaskLostError(f"{peer} is out of reach for the arbiter", task=peer)
            self._take(Failed(error))
        self.replica_lost(peer)

    def replica_lost(self, peer: TaskName) -> None:
        """Learns that a task makes no contributions any more; it may have some yet."""
        for handle, task in self._replicas.items():
            if task == peer:
                self._take(ReplicaLost(handle))

    async def ask(self, question: pb.AskData) -> pb.DataDeal:
        """Answers a worker that asks for batches: at once, unless some are invited."""
        handle = question.handle
        answer = asyncio.get_running_loop().create_future()
        self._answers[handle] = answer
        asked = question.batches, question.idle, question.piece_s, question.done
        self._take(DataAsked(handle, *asked))
        try:
            return await asyncio.wait_for(answer, ANSWER_S)
        except TimeoutError:
            return deal_of(())
        finally:
            if self._answers.get(handle) is answer:
                del self._answers[handle]
                self._take(AskEnded(handle))

    async def sum(self, message: pb.SumMessage) -> pb.SumAnswer:
        """Answers a member of a secure sum."""
        if self._desk is None:
            return pb.SumAnswer(step="void")
        return await self._desk.take(message)

    async def reports(self) -> AsyncIterator[Frame]:
        """Runs the loop to its end; yields reports, the last with its final state.

        Raises:
          JGError: an update failed, or too much time passed without one.
        """
        self._gates.listen(self._gate, Decides(self._take, self.peer_lost))
        self._watch_time()
        if self._lease is not None:
            self._lease.begin()
        try:
            async for report in self.record.stream():
                yield report
        finally:
            self.stop()  # the watcher may be gone
            if self._timer is not None:
                self._timer.cancel()
            if self._lease is not None:
                self._lease.close()

    def _give_up(self, error: Exception) -> None:
        self._take(Failed(as_error(error, TaskName(self._order.task))))

    def _watch_time(self) -> None:
        ended = self._lease is not None and self._lease.has_ended
        if ended or self._machine.halted is not None:
            self._progress_at = self._clock.now()  # it is not this update's fault
        limit = self._order.step_timeout_s
        remaining_s = self._progress_at + limit - self._clock.now()
        if remaining_s <= 0:
            self._take(TimeIsUp(limit))
            if self._machine.is_over:
                return
            # A round goes on without those who are late.
            self._progress_at, remaining_s = self._clock.now(), limit
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(remaining_s, self._watch_time)

    def _take(self, event: Event) -> None:
        # One after the other: carrying out an instruction may bring the next event.
        self._events.append(event)
        if isinstance(event, Contributed) and self._first_at is None:
            self._first_at = self._clock.now()
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                for instruction in self._machine.handle(self._events.popleft()):
                    self._perform(instruction)
        finally:
            self._handling = False

    def _perform(self, instruction: Instruction) -> None:
        match instruction:
            case Decide(version, steps):
                round_made = self._reports_of(self._machine.round)
                self._gates.decide(self._gate, steps)
                self._apply(version, len(steps), round_made)
            case Void(step):
                self._gates.void(self._gate, step)
            case DealData(replica, leases):
                answer = self._answers.get(replica)
                if answer is not None and not answer.done():
                    answer.set_result(deal_of(leases, self._number))
            case Halt(version):
                self._halts.begin(version, self._order.sync.halt_s)
                self._report("running", version)
            case End(state, error):
                self._end(state, error)
            case BeginSum() | SumSays() | GiveUpSum():
                self._sum(instruction)

    def _sum(self, instruction: BeginSum | SumSays | GiveUpSum) -> None:
        assert self._desk is not None  # who asks has a rule
        match instruction:
            case BeginSum(number, members):
                self._number = number
                self._desk.begin(number, members)
            case SumSays(_, what):
                self._desk.perform(what)
            case GiveUpSum(record):
                self._rounds += self._reports_of(record)
                self._desk.end()

    def _reports_of(self, record: RoundRecord | None) -> list[pb.RoundReport]:
        """Returns who takes part in the update that was decided now, or given up."""
        if record is None:
            return []
        now, task = self._clock.now(), self._replicas
        first = now if self._first_at is None else self._first_at
        self._first_at = None
        report = pb.RoundReport(
            number=record.number,
            members=[task[name] for name in record.members],
            dropped={task[name]: why for name, why in record.dropped.items()},
            wait_s=now - first,
            void=record.void,
        )
        return [report]

    def _apply(
        self, version: int, count: int, round_made: Sequence[pb.RoundReport]
    ) -> None:
        unwell, applied = list[JGError](), list[Fetches]()

        def computed(fetches: Fetches, _: object) -> None:
            if self._finite is not None:
                where = f"in the mean of {count} worker{'s' if count > 1 else ''}"
                error = self._finite.take(fetches, version, where)
                unwell.extend([error] if error else [])
            if not unwell:
                applied.append([*fetches, np.array(count, np.int32)])

        def over(error: JGError | None) -> None:
            if error is not None:
                self._take(Failed(error))
            elif unwell:
                self._take(NotApplied(unwell[0]))
            elif not self._machine.is_over:  # else its batches are dealt again
                self._note_made(version, applied, round_made)

        try:
            self._driver.start(
                self._order.handle,
                {**_entropy(self._order.sync.entropy), **self._unmasking()},
                computed,
                over,
                timeout_s=self._order.step_timeout_s,
            )
        except JGError as error:
            self._take(Failed(error))

    def _note_made(
        self,
        version: int,
        applied: Sequence[Fetches],
        round_made: Sequence[pb.RoundReport],
    ) -> None:
        """Takes note of an update that all have applied, and tells of it at times."""
        self._progress_at = self._clock.now()
        for fetches in applied:
            self.record.add(version, fetches)
        self._rounds += round_made
        self._take(Applied())
        silent_s = self._progress_at - self.record.reported_at
        if silent_s >= self._order.report_every_s:
            self._report("running")

    def _unmasking(self) -> dict[str, np.ndarray[Any, Any]]:
        """Returns the feed of an update that takes masks away; ends the sum."""
        if self._desk is None:
            return {}
        correction = self._desk.correction
        self._desk.end()
        return {"unmask": correction}

    def _end(self, state: str, error: JGError | None) -> None:
        self._halts.end()
        if self._desk is not None:
            self._desk.end()
        over = RunOverError("the training run has all its updates, or was stopped")
        in_order = error is None or isinstance(error, NonFiniteError)
        self._gates.close(self._gate, over if in_order else error or over)
        # What all tasks have applied is told, whatever happened then.
        self._report("running" if error else state)
        self.record.end(error)

    def _report(self, state: str, halted: int = 0) -> None:
        dropped: dict[str, int] = {
            self._replicas[handle]: count
            for handle, count in self._machine.dropped.items()
        }
        position = json.dumps(self._data.state())
        rounds, self._rounds = self._rounds, []
        self.record.send(
            pb.LoopReport(
                state=state,
                dropped=dropped,
                data_position=position,
                halted=halted,
                rounds=rounds,
            )
        )


def _entropy(shape: Sequence[int]) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the feed of an update that draws noise: nobody knows it before."""
    if not shape:
        return {}
    words = np.frombuffer(secrets.token_bytes(4 * math.prod(shape)), np.uint32)
    return {"entropy": words.reshape(shape)}
