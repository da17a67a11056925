"""Rollback of a run, after a ps was lost: to its copies or logs, or to a checkpoint.

No loop runs meanwhile. Where the state of each ps is kept a second time, a lost one
gets what is kept, and no update is lost. Else all ps get their variables from one
checkpoint, also those that were not lost: what they hold is of later updates. Programs
get other names, so that what a lost task still sends for a step of before is refused.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, final

from jgraph.clock import Clock
from jgraph.cluster.polling import Polling
from jgraph.coordination.data.batch_book import BatchBook
from jgraph.coordination.data.slots import SlotPlan
from jgraph.coordination.run.recovery import GiveUp, Recoveries, Recovery, hopeless
from jgraph.errors import (
    CheckpointCorruptError,
    ClusterUnreachableError,
    CopyLostError,
    JGError,
    TaskLeavingError,
    TaskLostError,
)
from jgraph.graph.device import is_ps
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.server.runs.copies import RunCopies
from jgraph.server.runs.journal import Journal
from jgraph.server.runs.peers import LoopPeers, check_master, ready_tasks
from jgraph.server.runs.ps_setup import PsSetup, first_step_of, version_of
from jgraph.server.runs.rescaling.stand_ins import RunStandIns
from jgraph.server.runs.rescaling.survivors import RunSurvivors
from jgraph.server.runs.run_client import Restarters, RunClient
from jgraph.server.runs.saving.checkpointer import Saved
from jgraph.server.runs.saving.state_source import MasterSaves, SavedState, StateSource
from jgraph.server.runs.worker_setup import WorkerSetup

_LOG = logging.getLogger("jgraph.recover")
_POLL_S: Final = 0.5
"""Between two looks: that a ps is there again shows only by asking it."""
STOPPED_WAIT_S: Final = 60.0
"""A run that is told to stop waits no longer for a ps, whichever came first."""

Known: TypeAlias = dict[TaskName, str]
"""Which process of each task a run knows."""


@final
@dataclass(frozen=True, slots=True)
class RolledBack:
    """A run went back to a checkpoint, or goes on from copies.

    Attributes:
      recovery: what was lost, and what it goes on from.
      saved: the checkpoint; None: of copies, and no batch is to be done again but
        those that nobody told of.
      version: of what counts the updates.
      left_out: tasks that have no program of the run now.
    """

    recovery: Recovery
    saved: SavedState | None
    version: int
    left_out: frozenset[TaskName]


@final
@dataclass(slots=True)
class Rollback:
    """Takes one run back to its newest good checkpoint, or to what is kept of its ps.

    Args:
      order: what the client said of the run.
      peers: to the tasks.
      workers: gives programs, and first values.
      ps: gives a ps what it needs.
      copies: what is kept of the ps.
      stand_ins: have the parts of owners that do not answer, where they have copies.
      survivors: have what lost owners held, where nobody has copies.
      record: how the run stands.
      sources: says who has checkpoints; None: nobody, so there are none.
      client: that the run ends with; None: it has none.
      clock: limits how long a ps is waited for.
      save_for_client: lets the master have the checkpoints of a client that is gone.
      is_stopped: says whether the run was told to stop: then little is waited for.
    """

    order: pb.OpenRun
    peers: LoopPeers
    workers: WorkerSetup
    ps: PsSetup
    copies: RunCopies
    stand_ins: RunStandIns
    survivors: RunSurvivors
    record: Journal
    sources: Callable[[], StateSource | None]
    client: RunClient | None
    clock: Clock
    save_for_client: Callable[[], Awaitable[None]]
    is_stopped: Callable[[], bool]
    _recoveries: Recoveries = field(init=False)
    _restarters: Restarters = field(init=False)
    _copies_lost: bool = field(init=False, default=False)
    _saved: Saved | None = field(init=False, default=None)
    _rest_of: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._recoveries = Recoveries(first_step_of(self.order))
        self._restarters = Restarters(self.client)

    async def go_back(
        self,
        error: JGError,
        known: Known,
        loops: Sequence[pb.RunLoop],
        name: str,
        saved: Saved | None = None,
    ) -> RolledBack:
        """Waits for all ps, and gives them one state of the run.

        Args:
          error: how the loss showed.
          known: which process of each task the run knows; those of ps are changed.
          loops: what each did last; gets the handle for the next one.
          name: of this time.
          saved: the state of now, before a ps ends; None: the loss came first.

        Raises:
          FencedError: another master has the run.
          JGError: nothing is kept, or a ps does not come back; says why.
        """
        await self._check_master()
        await self.save_for_client()
        step, began, before = self._step, self.clock.now(), dict(known)
        self._copies_lost, self._saved, self._rest_of = False, saved, None
        newest = step if self._loses_nothing else await self._newest()
        is_drain = isinstance(error, TaskLeavingError)
        decision = self._recoveries.lost(newest, is_drain=is_drain)
        if isinstance(decision, GiveUp):
            raise self._hopeless(error, decision.why, newest)
        ready = await self._ready()
        lost = self._lost(error, known, ready)
        then = f"goes back to step {decision.step} in {self._directory}"
        if self.survivors.may_give:
            then = f"goes on with what workers have read, or {then}"
        if self._loses_nothing:
            then = "goes on with the copies of what was there"
        away = [task for task in self.ps.tasks if task not in ready]
        by = self._heirs(away, ready, known)
        # What to do about it is what the run does.
        why = "" if is_drain else f": {error.message.partition(';')[0]}"
        level = logging.INFO if is_drain else logging.WARNING
        how = "told to end" if is_drain else "lost"
        if by is None:
            waits = f"The run waits up to {self._wait_s():g} s until all ps answer, and"
            then = f"{waits} then {then}"
        else:
            copies = ", ".join(by[task] for task in away)
            then = f"The run goes on with the copies on {copies}"
        what = f"{_were(lost)} {how} at step {step}{why}. {then}"
        _LOG.log(level, "%s", what)
        if by is None:
            self._restarters.learned(lost, what)
        source = self.sources()
        async with nullcontext() if source is None else source.paused():
            drops = (self.workers.drop(one.handle, settle=True) for one in loops)
            await asyncio.gather(*drops)
            try:
                back_to, checkpoint, left_out, now = await self._restore(
                    error, known, loops, name
                )
            finally:
                self._restarters.close()
        changed = [task for task in self.ps.tasks if known[task] != before.get(task)]
        lost = tuple(changed) or lost
        took_s = self.clock.now() - began
        have = self.stand_ins.by
        heirs = tuple(dict.fromkeys(have[task] for task in lost if task in have))
        rest_of = self._rest_of
        recovery = Recovery(lost, step, back_to, took_s, is_drain, heirs, rest_of)
        _LOG.log(level, "%s", recovery)
        return RolledBack(recovery, checkpoint, now, left_out)

    async def give_back(
        self, parts: Sequence[pb.StandIn], loops: Sequence[pb.RunLoop], name: str
    ) -> None:
        """Gives owners that are there again their parts, while no loop runs.

        Args:
          parts: of these owners, and who has them.
          loops: the next ones, the arbiter's first; get other programs.
          name: of this time.

        Raises:
          FencedError: another master has the run.
          JGError: a task does not answer; the owners may have their parts.
        """
        await self._check_master()
        owners = [part.task for part in parts]
        await self.stand_ins.copy_back(parts)
        old = [loop.handle for loop in loops]
        give = self.workers.give
        new = [await give(handle, name, self.workers.ps, owners) for handle in old]
        self.stand_ins.returned(owners)
        for loop, handle in zip(loops, new, strict=True):
            loop.handle = handle
        if isinstance(self.sources(), MasterSaves):
            saves = self.order.saves
            saves.snapshot = await self.workers.renew(saves.snapshot, name)
        version = loops[0].sync.version
        await self._record(loops, (), name, version, self.stand_ins.by)
        await asyncio.gather(*map(self.workers.drop, old))
        await self.stand_ins.forget(parts)

    @property
    def _step(self) -> int:
        return self._recoveries.first + self.record.row().steps

    def _wait_s(self) -> float:
        """How long a ps is waited for."""
        wait_s = self.order.wait_s
        return min(wait_s, STOPPED_WAIT_S) if self.is_stopped() else wait_s

    @property
    def _from_copies(self) -> bool:
        return self.copies.is_kept and not self._copies_lost

    @property
    def _loses_nothing(self) -> bool:
        return self._saved is not None or self._from_copies

    @property
    def _directory(self) -> str:
        source = self.sources()
        return "" if source is None else source.directory

    async def _newest(self) -> int | None:
        await self.save_for_client()
        source = self.sources()
        try:
            return None if source is None else await source.newest()
        except TaskLostError:  # of the client, which was gone before it answered
            await self.save_for_client()
            source = self.sources()
            return None if source is None else await source.newest()

    def _lost(self, error: JGError, known: Known, ready: Known) -> tuple[TaskName, ...]:
        lost = [t for t in self.ps.tasks if t in known and ready.get(t) != known[t]]
        named = map(str, error.details.get("tasks", [error.details.get("task", "")]))
        return tuple(lost) or tuple(TaskName(task) for task in named if task)

    async def _restore(
        self, error: JGError, known: Known, loops: Sequence[pb.RunLoop], name: str
    ) -> tuple[int, SavedState | None, frozenset[TaskName], int]:
        step = self._step
        polling = Polling(_POLL_S, self.order.wait_s, self.clock)
        number, stopped = 0, False
        while True:
            if self.record.is_over:
                raise self._hopeless(error, "", await self._newest())
            if self.is_stopped() and not stopped:
                stopped = True
                polling.limit(STOPPED_WAIT_S)
            ready = await self._ready()
            lost = [task for task in self.ps.tasks if task not in ready]
            number += 1
            by = self._heirs(lost, ready, known)
            if waits := bool(lost) and by is None:
                await self._look_for_restarters(error, lost)
            try:
                if not waits:
                    await self._check_master()
                    await self.save_for_client()
                    once = f"{name}.{number}"
                    if by is not None:
                        step = await self._stand_in(error, lost, by, step)
                    left_out = await self._programs(ready, loops, once)
                    new = [t for t in self.ps.tasks if ready[t] != known.get(t)]
                    step, saved = await self._state(error, new, step, by)
                    zeros = new if saved is None else list(ready)
                    await self._prepare(new, zeros, loops, once)
                    await self._record(loops, left_out, once, step, by)
                    now = await version_of(self.peers, self.order)
                    known.update({task: ready[task] for task in self.ps.tasks})
                    return step, saved, left_out, now
            except (ClusterUnreachableError, TaskLostError) as again:
                _LOG.info("a task was lost meanwhile: %s", again.message)
            if not await polling.again():
                who = " and ".join(lost) or "a task that was lost again"
                why = f"{who} did not come back in {self._wait_s():g} s"
                if stopped:
                    why += " after the run was told to stop"
                raise self._hopeless(error, why, await self._newest())

    async def _ready(self) -> Known:
        """Returns the tasks that can have a part of the run.

        Of its ps also those that were told to leave it: they are held until what they
        have is elsewhere, and come back as nothing else.
        """
        leavers = self.peers.leavers() if self.order.HasField("ps") else ()
        return await ready_tasks(self.peers, list(filter(is_ps, leavers)))

    async def _look_for_restarters(
        self, error: JGError, lost: Sequence[TaskName]
    ) -> None:
        """Gives up where nobody starts lost tasks again."""
        if (missing := self._restarters.learned(lost)) is not None:
            raise self._hopeless(missing, "", await self._newest()) from error

    def _heirs(
        self, lost: Sequence[TaskName], ready: Known, known: Known
    ) -> Mapping[TaskName, TaskName] | None:
        """Returns who is to have lost owners' parts; None: these are waited for."""
        there = [task for task, one in ready.items() if known.get(task) == one]
        others = [t for t in self.ps.tasks if t not in there and t not in lost]
        if not lost or others or not self._from_copies:
            return None
        return self.stand_ins.heirs(lost, there)

    async def _stand_in(
        self,
        error: JGError,
        lost: Sequence[TaskName],
        by: Mapping[TaskName, TaskName],
        step: int,
    ) -> int:
        """Lets who has the copies of lost owners have their parts; returns the step.

        Raises:
          TaskLostError: the copies are not whole; the owners are to be waited for.
        """
        parts = await self.stand_ins.parts(lost)
        try:
            version = await self.copies.restore(lost, away=lost)
        except CopyLostError as loss:
            await self._give_up_copies(loss, error)
            raise TaskLostError(loss.message, **loss.details) from error
        self.stand_ins.take(by, parts)
        return step if version is None else version

    async def _give_up_copies(self, loss: CopyLostError, error: JGError) -> None:
        """Goes back to a checkpoint from now on.

        Raises:
          JGError: there is none.
        """
        self._copies_lost = True
        if (newest := await self._newest()) is None:
            raise self._hopeless(loss, "", None) from error
        text = "%s; the run goes back to step %d in %s"
        _LOG.warning(text, loss.message, newest, self._directory)

    async def _check_master(self) -> None:
        """Refuses to go back where another master goes on with the run."""
        await check_master(self.peers, self.order.run, self.record.term)

    async def _programs(
        self, ready: Known, loops: Sequence[pb.RunLoop], name: str
    ) -> frozenset[TaskName]:
        """Gives all programs anew; returns the workers that cannot have theirs."""
        left_out = set[TaskName]()
        for loop in loops:
            task = TaskName(loop.task)
            if task not in ready or task in self.stand_ins.by:
                left_out.add(task)
                continue
            try:
                loop.handle = await self.workers.renew(loop.handle, name)
            except (ClusterUnreachableError, TaskLostError) as error:
                if is_ps(task) or error.details.get("task") != task:
                    raise
                left_out.add(task)  # it hangs, or is gone: the others go on
        if isinstance(self.sources(), MasterSaves):
            saves = self.order.saves
            saves.snapshot = await self.workers.renew(saves.snapshot, name)
        return frozenset(left_out)

    async def _state(
        self,
        error: JGError,
        new: Sequence[TaskName],
        step: int,
        by: Mapping[TaskName, TaskName] | None,
    ) -> tuple[int, SavedState | None]:
        """Gives all ps one state; returns its updates, and the checkpoint if it is one.

        Args:
          error: how the loss showed.
          new: ps whose processes hold nothing.
          step: updates that were told of.
          by: who stands in for others now, and has their state; None: nobody.
        """
        if by is not None:
            return step, None
        if self._saved is not None:
            await asyncio.gather(*(self._read_again(t, self._saved) for t in new))
            return int(self._saved.path.name), None
        if self._from_copies:
            try:
                version = await self.copies.restore(new)
            except CopyLostError as loss:
                await self._give_up_copies(loss, error)
            else:
                return (step if version is None else version), None
        source = self.sources()
        if source is None:
            raise self._hopeless(error, "", None)
        try:
            self._rest_of = await self.survivors.give(new, step, source)
        except JGError as other:
            if isinstance(other, ClusterUnreachableError | TaskLostError):
                raise
            _LOG.warning("workers gave nothing: %s", other.message)
        if self._rest_of is not None:
            self._recoveries.kept(step)
            return step, None
        await self.stand_ins.tell_client()  # a master before may have died over it
        checkpoint = await source.load(error, self._recoveries.first)
        return checkpoint.step, checkpoint

    async def _read_again(self, task: TaskName, saved: Saved) -> None:
        """Gives a ps what its process before wrote."""
        parts = await self.ps.load(task, saved.path)
        if [sums for _, sums in parts] != list(saved.sums.get(task, ())):
            raise CheckpointCorruptError(
                f"what {task} read of {saved.path} is not what it wrote there",
                path=str(saved.path),
            )

    async def _record(
        self,
        loops: Sequence[pb.RunLoop],
        left_out: Collection[str],
        name: str,
        step: int,
        by: Mapping[TaskName, TaskName] | None,
    ) -> None:
        """Keeps what the ps hold, and what changes it from now on."""
        if not self.copies.is_kept:
            return
        await self.copies.open(name, step)
        for loop in loops:
            if loop.task not in left_out:
                await self.copies.admit(loop.handle, int(loop.HasField("sync")))
        if by is not None:
            await self.stand_ins.tell(loops)

    async def _prepare(
        self,
        new: Sequence[TaskName],
        zeros: Sequence[TaskName],
        loops: Sequence[pb.RunLoop],
        name: str,
    ) -> None:
        """Makes gates anew, what a new process lacks, and what begins from zero."""
        for task in self.ps.tasks:
            await self.ps.open_gate(task)
        for task in new:
            await self.ps.give_data(task, loops)
        for task in zeros:
            await self.workers.begin(task, f"{name}.{task}")

    def _hopeless(self, error: JGError, why: str, newest: int | None) -> JGError:
        return hopeless(error, why, self._directory, newest)


def position_of(plan: str, saved: SavedState, batches: int) -> dict[str, Any]:
    """Returns where in the data a run is that went back.

    Args:
      plan: JSON of its slots.
      saved: the checkpoint.
      batches: of an update.
    """
    slots = SlotPlan.from_dict(json.loads(plan))
    skip = saved.step * batches
    return BatchBook(slots, saved.position, skip=skip).position()


def _were(tasks: Sequence[TaskName]) -> str:
    return f"{', '.join(tasks)} {'was' if len(tasks) == 1 else 'were'}"
