"""Rollback of a run, after a ps was lost: to its copies or logs, or to a checkpoint.

No loop runs meanwhile. Where the state of each ps is kept a second time, a lost one
gets what is kept, and no update is lost. Else all ps get their variables from one
checkpoint, also those that were not lost: what they hold is of later updates. Programs
get other names, so that what a lost task still sends for a step of before is refused.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from jgraph.clock import Clock
from jgraph.cluster.polling import Polling
from jgraph.coordination.data.batch_book import BatchBook
from jgraph.coordination.data.slots import SlotPlan
from jgraph.coordination.run.recovery import GiveUp, Recoveries, hopeless
from jgraph.errors import (
    CheckpointCorruptError,
    CheckpointError,
    ClusterUnreachableError,
    CopyLostError,
    JGError,
    TaskLeavingError,
    TaskLostError,
)
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.runtime.files.manifest import Manifest, read_manifest
from jgraph.runtime.files.shard_files import check_read
from jgraph.runtime.files.step_files import our_steps, put_aside
from jgraph.server.runs.checkpointer import RunCheckpointer, Saved
from jgraph.server.runs.copies import RunCopies
from jgraph.server.runs.journal import Journal
from jgraph.server.runs.peers import Peers, check_master, ready_tasks
from jgraph.server.runs.ps_setup import PsSetup, first_step_of, version_of
from jgraph.server.runs.worker_setup import WorkerSetup

_LOG = logging.getLogger("jgraph.recover")
_POLL_S: Final = 0.5
"""Between two looks: that a ps is there again shows only by asking it."""

Known: TypeAlias = dict[TaskName, str]
"""Which process of each task a run knows."""


@final
@dataclass(frozen=True, slots=True)
class RolledBack:
    """A run went back to a checkpoint, or goes on from copies.

    Attributes:
      lost: tasks.
      step: updates that were told of.
      back_to: updates of the model.
      manifest: of the checkpoint; None: of copies, and no batch is to be done again
        but those that nobody told of.
      version: of what counts the updates.
      left_out: tasks that have no program of the run now.
    """

    lost: tuple[TaskName, ...]
    step: int
    back_to: int
    manifest: Manifest | None
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
      record: how the run stands.
      saver: saves the run; None: nobody does, and there is nothing to go back to.
      clock: limits how long a ps is waited for.
      is_stopped: says whether the run was told to stop: then nothing is waited for.
    """

    order: pb.OpenRun
    peers: Peers
    workers: WorkerSetup
    ps: PsSetup
    copies: RunCopies
    record: Journal
    saver: RunCheckpointer | None
    clock: Clock
    is_stopped: Callable[[], bool]
    _recoveries: Recoveries = field(init=False)
    _copies_lost: bool = field(init=False, default=False)
    _saved: Saved | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._recoveries = Recoveries(first_step_of(self.order))

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
        step, began, before = self._step, self.clock.now(), dict(known)
        self._copies_lost, self._saved = False, saved
        newest = step if self._loses_nothing else await self._newest()
        told = isinstance(error, TaskLeavingError)
        decision = self._recoveries.lost(newest, told=told)
        if isinstance(decision, GiveUp):
            raise self._hopeless(error, decision.why, newest)
        lost = await self._lost(error, known)
        then = f"goes back to step {decision.step} in {self._directory}"
        if self._loses_nothing:
            then = "goes on with the copies of what was there"
        # What to do about it is what the run does.
        why = "" if told else f": {error.message.partition(';')[0]}"
        level = logging.INFO if told else logging.WARNING
        _LOG.log(
            level,
            "%s %s at step %d%s. The run waits up to %g s until all ps answer, and "
            "then %s",
            *(_were(lost), "told to end" if told else "lost", step, why),
            *(self.order.wait_s, then),
        )
        async with self.saver.paused() if self.saver else nullcontext():
            drops = (self.workers.drop(one.handle, settle=True) for one in loops)
            await asyncio.gather(*drops)
            back_to, manifest, left_out = await self._restore(error, known, loops, name)
        now = await version_of(self.peers, self.order)
        changed = [task for task in self.ps.tasks if known[task] != before.get(task)]
        lost = tuple(changed) or lost
        _LOG.log(
            level,
            "%s %s at step %d; after %.1f s all ps answer, and the run goes on from "
            "step %d: %d steps are done again.",
            *(_were(lost), "told to end" if told else "lost", step),
            *(self.clock.now() - began, back_to, max(0, step - back_to)),
        )
        return RolledBack(lost, step, back_to, manifest, now, left_out)

    @property
    def _step(self) -> int:
        return self._recoveries.first + self.record.row().steps

    @property
    def _from_copies(self) -> bool:
        return self.copies.is_kept and not self._copies_lost

    @property
    def _loses_nothing(self) -> bool:
        return self._saved is not None or self._from_copies

    @property
    def _directory(self) -> str:
        return self.order.saves.directory

    async def _newest(self) -> int | None:
        if self.saver is None:
            return None
        steps = await asyncio.to_thread(our_steps, Path(self._directory))
        return steps[-1] if steps else None

    async def _lost(self, error: JGError, known: Known) -> tuple[TaskName, ...]:
        ready = await ready_tasks(self.peers)
        lost = [t for t in self.ps.tasks if t in known and ready.get(t) != known[t]]
        named = map(str, error.details.get("tasks", [error.details.get("task", "")]))
        return tuple(lost) or tuple(TaskName(task) for task in named if task)

    async def _restore(
        self, error: JGError, known: Known, loops: Sequence[pb.RunLoop], name: str
    ) -> tuple[int, Manifest | None, frozenset[TaskName]]:
        step = self._step
        stops = self.is_stopped()
        polling = Polling(_POLL_S, self.order.wait_s, self.clock)
        number = 0
        while True:
            ready = await ready_tasks(self.peers)
            lost = [task for task in self.ps.tasks if task not in ready]
            number += 1
            try:
                if not lost:
                    await self._check_master()
                    once = f"{name}.{number}"
                    left_out = await self._programs(ready, loops, once)
                    new = [t for t in self.ps.tasks if ready[t] != known.get(t)]
                    step, manifest = await self._state(error, new, step)
                    zeros = new if manifest is None else list(ready)
                    await self._prepare(new, zeros, loops, once)
                    await self._record(loops, left_out, once, step)
                    known.update({task: ready[task] for task in self.ps.tasks})
                    return step, manifest, left_out
            except (ClusterUnreachableError, TaskLostError) as again:
                _LOG.info("a task was lost meanwhile: %s", again.message)
            if self.record.is_over or (self.is_stopped() and not stops):
                why = "it was stopped while it waited for that"
                raise self._hopeless(error, why, await self._newest())
            if not await polling.again():
                who = " and ".join(lost)
                why = f"{who} did not come back in {self.order.wait_s:g} s"
                raise self._hopeless(error, why, await self._newest())

    async def _check_master(self) -> None:
        """Refuses to go back where another master goes on with the run."""
        await check_master(self.peers, self.order.run, self.record.term)

    async def _programs(
        self, ready: Known, loops: Sequence[pb.RunLoop], name: str
    ) -> frozenset[TaskName]:
        """Gives all programs anew; returns the workers that cannot have theirs."""
        left_out = set[TaskName]()
        for loop in loops:
            if loop.task in ready:
                loop.handle = await self.workers.renew(loop.handle, name)
            else:
                left_out.add(TaskName(loop.task))
        if self.saver is not None:
            saves = self.order.saves
            saves.snapshot = await self.workers.renew(saves.snapshot, name)
        return frozenset(left_out)

    async def _state(
        self, error: JGError, new: Sequence[TaskName], step: int
    ) -> tuple[int, Manifest | None]:
        """Gives all ps one state; returns its updates, and the checkpoint if it is one.

        Args:
          error: how the loss showed.
          new: ps whose processes hold nothing.
          step: updates that were told of.
        """
        if self._saved is not None:
            await asyncio.gather(*(self._read_again(t, self._saved) for t in new))
            return int(self._saved.path.name), None
        if self._from_copies:
            try:
                counted = await self.copies.restore(new)
            except CopyLostError as lost:
                self._copies_lost = True
                if await self._newest() is None:
                    raise self._hopeless(lost, "", None) from error
                _LOG.warning("%s; the run goes back to a checkpoint", lost.message)
            else:
                return (step if counted is None else counted), None
        manifest = await self._load(error)
        return manifest.step, manifest

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
    ) -> None:
        """Keeps what the ps hold, and what changes it from now on."""
        if not self.copies.is_kept:
            return
        await self.copies.open(name, step)
        for loop in loops:
            if loop.task not in left_out:
                await self.copies.admit(loop.handle, int(loop.HasField("sync")))

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

    async def _load(self, error: JGError) -> Manifest:
        """Gives all ps their variables from the newest checkpoint that is good."""
        while True:
            newest = await self._newest()
            if newest is None or newest < self._recoveries.first:
                why = "the checkpoints of this run are damaged"
                raise self._hopeless(error, why, newest)
            path = Path(self._directory, str(newest))
            try:
                manifest = await asyncio.to_thread(read_manifest, path)
                parts = await asyncio.gather(
                    *(self.ps.load(task, path) for task in self.ps.tasks)
                )
                check_read(path, manifest.leaves, [p for each in parts for p in each])
            except CheckpointError as damaged:
                if not isinstance(damaged, CheckpointCorruptError):
                    raise
                now = await asyncio.to_thread(put_aside, path)
                _LOG.error("%s. It is now %s; the step before is used", damaged, now)
            else:
                return manifest

    def _hopeless(self, error: JGError, why: str, newest: int | None) -> JGError:
        return hopeless(error, why, self._directory, newest)


def position_of(plan: str, manifest: Manifest, batches: int) -> dict[str, Any]:
    """Returns where in the data a run is that went back.

    Args:
      plan: JSON of its slots.
      manifest: of the checkpoint.
      batches: of an update.
    """
    slots = SlotPlan.from_dict(json.loads(plan))
    skip = manifest.step * batches
    return BatchBook(slots, manifest.position, skip=skip).position()


def _were(tasks: Sequence[TaskName]) -> str:
    return f"{', '.join(tasks)} {'was' if len(tasks) == 1 else 'were'}"
