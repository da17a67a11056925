"""Replay of a run's journal on a standby: orders, data and progress as it was told."""

import asyncio
import json
from typing import final

from jgraph.cluster.loop_messages import leases_of
from jgraph.coordination.data.batch_book import BatchBook
from jgraph.coordination.data.slots import SlotPlan
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame, kind_of
from jgraph.rpc.transport import Frame
from jgraph.server.loops.dealer import Dealers
from jgraph.server.runs.journal import note_report
from jgraph.server.runs.supervisor import RunSupervisor


@final
class JournalReplay:
    """Makes a supervisor know, entry by entry, what that of the master knows.

    Args:
      order: what the client said of the run; changes with what is told.
      supervisor: of the run, if this task is to be its master.

    Attributes:
      frames: entries that were read.
      needed: entries that there are, as far as is known.
      began_s: when each loop began, in seconds of the run.
    """

    def __init__(self, order: pb.OpenRun, supervisor: RunSupervisor) -> None:
        self.frames, self.needed = 0, order.frames
        self.began_s: dict[str, float] = {}
        self._order = order
        self._supervisor = supervisor
        self._numbers: dict[str, int] = {}
        """Of the last report of each loop."""
        self._book: BatchBook | None = None
        self._is_begun = False
        self._has_more = asyncio.Event()
        self._has_read = asyncio.Event()
        if not order.frames:
            self._has_read.set()

    @property
    def has_read(self) -> bool:
        """Whether all is read that is known to be there."""
        return self._has_read.is_set()

    @property
    def has_begun(self) -> bool:
        """Whether the run has begun, as far as is read."""
        return self._is_begun and bool(self._supervisor.loops.newest)

    @property
    def deals(self) -> bool:
        """Whether a master deals out the data of the run."""
        return self._book is not None

    def need(self, frames: int) -> None:
        """Takes note that there are so many entries, and that they are to be read."""
        self.needed = max(self.needed, frames)
        if self.frames < self.needed:
            self._has_read.clear()

    async def wait(self, frames: int) -> None:
        """Waits until so many entries are read."""
        while self.frames < frames:
            self._has_more.clear()
            await self._has_more.wait()

    async def wait_whole(self) -> None:
        """Waits until all is read that is known to be there."""
        await self._has_read.wait()

    def add(self, entry: Frame) -> None:
        """Takes the next entry."""
        self._take(entry)
        self.frames += 1
        self._has_more.set()
        if self.frames >= self.needed:
            self._has_read.set()

    def last_report(self, loop: str) -> int:
        """Returns the number of the last report of a loop; 0: it has told nothing."""
        return self._numbers.get(loop, 0)

    def note(self, report: Frame) -> None:
        """Takes note of a report of a loop."""
        body = body_of(report)
        self._numbers[body.loop] = max(body.number, self.last_report(body.loop))
        for order in self._supervisor.loops.newest:
            if order.loop == body.loop:
                note_report(order, report)
        if self._book is not None:
            self._book.add(leases_of(body.done))

    def note_position(self) -> None:
        """Lets the run say where in its data it is."""
        if self._book is not None:
            place = self._book.position(self._order.version)
            self._supervisor.record.position = json.dumps(place)

    def deal(self, dealers: Dealers, run: str, updates: int) -> None:
        """Deals out what is not known as done.

        Args:
          dealers: of this task.
          run: a new name of what is dealt out.
          updates: that the ps have.
        """
        assert self._book is not None
        record, place = self._supervisor.record, self._book.position(updates)
        data = self._supervisor.loops.deal(dealers, run, self._book.remaining, place)
        record.note(frame(open_data_run=data))
        record.data_run, record.position = run, None

    def _take(self, entry: Frame) -> None:
        body, record = body_of(entry), self._supervisor.record
        match kind_of(entry):
            case "run_loop":
                order = pb.RunLoop()
                order.CopyFrom(body)  # it changes with what is told
                self._supervisor.loops.take(order)
                self.began_s[order.loop] = order.began_s
                record.begins(order, order.began_s)
            case "loop_report" if body.HasField("restored"):
                self._go_back(body)
            case "loop_report" if body.HasField("rescaled"):
                if not body.rescaled.why:  # else it was given up
                    self._supervisor.rescaler.switch_as(body.rescaled)
                record.again(entry)
            case "loop_report" if body.HasField("homes"):
                record.note(entry)
            case "loop_report":
                self.note(entry)
                record.again(entry)
            case "run_table":
                self.note_position()
                record.end_as(body.runs[0])
            case kind:
                record.note(entry)  # its own standby reads it here
                self._take_fact(kind, entry)

    def _take_fact(self, kind: str, entry: Frame) -> None:
        """Takes what the run is made of."""
        body = body_of(entry)
        match kind:
            case "register_program":
                self._supervisor.ready.keep(entry)
            case "open_run":
                self._renew(body)
            case "open_data_run":
                self._open_book(body, self._order.version)
            case "stop_loop":
                self._supervisor.stopping = True
            case "run_query":
                self._is_begun = True

    def _renew(self, order: pb.OpenRun) -> None:
        """Takes what is another since a ps was started again."""
        mine = pb.OpenRun()
        mine.CopyFrom(self._order)
        self._order.CopyFrom(order)  # perhaps of a master before
        self._order.master, self._order.incarnation = mine.master, mine.incarnation
        self._order.term, self._order.standbys[:] = mine.term, mine.standbys
        self._supervisor.rescaler.adopt()
        self._supervisor.stand_ins.adopt()
        self._supervisor.learn_anew()

    def _go_back(self, report: pb.LoopReport) -> None:
        """Takes what is another since the run went back to a checkpoint."""
        restored, info = report.restored, json.loads(self._order.info)
        supervisor, step = self._supervisor, restored.back_to
        position = report.data_position
        supervisor.record.go_back(restored, step - info["first_step"], position)
        supervisor.restores = restored.number
        supervisor.copies.began = step
        remaining = supervisor.record.may_do(info["steps"] - step)
        supervisor.loops.go_back(step, remaining, position)
        if supervisor.loops.arbiter is None:
            self._open_book(restored.data, restored.version)

    def _open_book(self, order: pb.OpenDataRun, updates: int) -> None:
        plan = SlotPlan.from_dict(json.loads(order.plan))
        position = json.loads(order.position) if order.position else None
        self._supervisor.loops.data = order
        self._book = BatchBook(plan, position, budget=order.budget, updates=updates)
