"""Checkpointer of a run on its master: tasks write, the master commits.

Nothing of them passes through the master: the ps copy what they hold at one moment, and
write it. The master makes the files before that, and gives the step its name after.
"""

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import numpy as np

from jgraph.clock import SystemClock
from jgraph.cluster.deadlines import COMPILE_S, bulk_timeout_s
from jgraph.cluster.polling import Polling
from jgraph.cluster.shard_messages import shard_from, sums_in
from jgraph.coordination.run.cuts import patience_s
from jgraph.errors import CheckpointError, CheckpointWriterError
from jgraph.failpoints import failpoint
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.transport import Frame
from jgraph.runtime.files.blocks import Sums
from jgraph.runtime.files.failed_saves import FailedSaves
from jgraph.runtime.files.manifest import Leaf, Manifest, directory_of
from jgraph.runtime.files.shard_files import (
    Slice,
    joined,
    make_proof,
    proven,
    read_slice,
)
from jgraph.runtime.files.step_files import (
    begin_step,
    clear_unfinished,
    commit_step,
    our_steps,
    prune,
)
from jgraph.runtime.files.writer_lease import LEASE_S, WriterLease
from jgraph.server.runs.journal import Journal

_LOG = logging.getLogger("jgraph.checkpoint")
_AGAIN_S: Final = 1.0
"""Between two tries: that a lease on a disk is free shows only by asking for it."""
STEP: Final = "global_step"
"""The leaf that says how many updates are in a step."""

Call: TypeAlias = Callable[..., Awaitable[Frame]]


@final
@dataclass(frozen=True, slots=True)
class Saved:
    """A step that was saved.

    Attributes:
      path: where.
      sums: of what each task wrote of it, in the order of its shards.
    """

    path: Path
    sums: Mapping[TaskName, Sequence[Sums]]


@final
@dataclass(slots=True)
class RunCheckpointer:
    """Saves one run as long as it goes on, and when it is over.

    Args:
      task: this one, the master.
      order: what to save, and where.
      record: how the run stands.
      call: calls a task.
      position: says where in the data the run is.
    """

    task: TaskName
    order: pb.RunSaves
    record: Journal
    call: Call
    position: Callable[[], Mapping[str, Any]]
    _lease: WriterLease = field(init=False)
    _failed: FailedSaves = field(init=False)
    _working: asyncio.Task[None] | None = field(init=False, default=None)
    _turn: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _took_s: float | None = field(init=False, default=None)
    _saved: int = field(init=False, default=0)
    """Updates that were told of when it was saved last."""

    def __post_init__(self) -> None:
        self._failed = FailedSaves(Path(self.order.directory))

    def start(self) -> None:
        """Saves from now on.

        Raises:
          CheckpointPathError: this task does not have the directory of the client.
        """
        with proven(self.order.directory, self.order.proof):
            self._lease = WriterLease(Path(self.order.directory))
        self._working = asyncio.ensure_future(self._work())

    async def save_at_rest(self) -> Saved:
        """Saves what a run came to whose loops have all ended.

        Raises:
          CheckpointError, OSError: it is not saved.
          ClusterError: a task does not answer.
        """
        async with self._turn:
            steps = self.record.row().steps
            saved = await self._save(at_rest=True)
            self._saved = steps
        return saved

    async def save_halted(
        self, in_flight: int, go_on: Callable[[], Awaitable[bool]]
    ) -> None:
        """Saves a run whose loops stand still, unless a slow save is under way.

        Args:
          in_flight: batches that may be in the state and not in the position.
          go_on: lets the loops go on; returns whether they stood still until then:
            else what was copied is of no one moment.
        """
        went_on = False

        async def let_go() -> bool:
            nonlocal went_on
            went_on = True
            return await go_on()

        try:
            async with asyncio.timeout(patience_s(self._took_s)):
                await self._turn.acquire()
            try:
                if not self.record.is_over:
                    steps = self.record.row().steps
                    await self._tried(steps, let_go, in_flight)
            finally:
                self._turn.release()
        except TimeoutError:
            _LOG.info("no checkpoint now: the one before it is not written yet")
        finally:
            if not went_on:
                await go_on()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Saves nothing meanwhile; what comes after is another state.

        Raises:
          CheckpointWriterError: another process writes to the directory.
        """
        async with self._turn:
            await self._become_writer(LEASE_S)
            yield
            self._saved = self.record.row().steps

    async def rest(self) -> None:
        """Waits until the run is over, and nothing of it is left to save."""
        if self._working is not None:
            await asyncio.wait([self._working])

    def close(self) -> None:
        """Saves no more."""
        if self._working is not None:
            self._working.cancel()

    async def _work(self) -> None:
        try:
            news = self.record.news
            while not self.record.is_over:
                await news
                news = self.record.news
            # The last step is saved when all its batches are known to be done.
            row = self.record.row()
            if row.state in {"done", "stopped"}:
                async with self._turn:
                    if row.steps > self._saved:
                        await self._tried(row.steps)
        finally:
            async with self._turn:
                await asyncio.to_thread(self._lease.release)

    async def _tried(
        self,
        steps: int,
        go_on: Callable[[], Awaitable[bool]] | None = None,
        in_flight: int = 0,
    ) -> None:
        clock = SystemClock()
        began = clock.now()
        try:
            await self._save(
                at_rest=self.record.is_over, go_on=go_on, in_flight=in_flight
            )
        except Exception as error:  # noqa: BLE001  # the run goes on, whatever it is
            self._failed.tell(error)
        else:
            self._took_s = clock.now() - began
            self._saved = self._saved if in_flight else steps
            self._failed.forget()

    async def _become_writer(self, wait_s: float) -> None:
        """Takes the lease, and clears what a master left that was killed as it saved.

        A master that was replaced may have the lease a little longer.
        """
        polling, directory = Polling(_AGAIN_S, wait_s), Path(self.order.directory)
        while not self._lease.generation:
            try:
                await asyncio.to_thread(self._lease.acquire)
                await asyncio.to_thread(clear_unfinished, directory)
            except CheckpointWriterError:
                if not await polling.again():
                    raise

    async def _save(
        self,
        *,
        at_rest: bool,
        go_on: Callable[[], Awaitable[bool]] | None = None,
        in_flight: int = 0,
    ) -> Saved:
        order, directory = self.order, Path(self.order.directory)
        run = pb.RunStep(handle=order.snapshot, timeout_s=COMPILE_S)
        driver = TaskName(order.driver)
        with proven(order.directory, order.proof):
            await self._become_writer(LEASE_S if at_rest else 0.0)
            folder, like = await asyncio.to_thread(begin_step, directory)
        try:
            position = dict(self.position())  # first: what is under way comes again
            if in_flight:
                position["again"] += in_flight
            await self.call(driver, "RunStep", frame(run_step=run), timeout_s=COMPILE_S)
            if go_on is not None and not await go_on():
                raise CheckpointError("the run went on while it was to be saved")
            failpoint("handed.snapshot_taken")
            leaves, sums = await self._write(folder, like)
            step = await asyncio.to_thread(_step_in, folder, leaves)
            check, path = self._lease.check, directory / str(step)
            # What was saved under way may be of a moment before, on another ps.
            anew = at_rest or self.record.is_over
            if step in our_steps(directory) and not anew:
                return Saved(path, sums)
            manifest = Manifest(
                step=step,
                leaves=leaves,
                position={**position, **self.record.privacy(step)},
                generation=self._lease.generation,
                saved=datetime.now(UTC).isoformat(timespec="seconds"),
            )
            await asyncio.to_thread(
                commit_step, folder, manifest, check, overwrite=anew
            )
            await asyncio.to_thread(prune, directory, order.keep, check)
            return Saved(path, sums)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            reset = frame(reset=pb.Reset(containers=[order.container]))
            tasks = [TaskName(shards.task) for shards in order.tasks]
            calls = [self.call(task, "Reset", reset) for task in tasks]
            # Of a task that is gone nothing is left.
            await asyncio.gather(*calls, return_exceptions=True)

    async def _write(
        self, folder: Path, like: Manifest
    ) -> tuple[dict[str, Leaf], dict[TaskName, list[Sums]]]:
        """Lets all tasks write what they have.

        Returns:
          What describes it, and the checksums of each task.
        """
        proof = await asyncio.to_thread(make_proof, folder)
        parts: list[tuple[str, Sums]] = []
        by_task: dict[TaskName, list[Sums]] = {}

        async def ask(shards: pb.TaskShards) -> None:
            task = TaskName(shards.task)
            mine = [shard_from(task, shard) for shard in shards.shards]
            files = pb.ShardFiles(
                directory=str(folder), proof=proof, shards=shards.shards
            )
            limit_s = bulk_timeout_s(sum(s.variable.type.nbytes for s in mine))
            request = frame(shard_files=files)
            reply = await self.call(task, "SaveShards", request, timeout_s=limit_s)
            sums = by_task[task] = sums_in(reply, len(mine))
            arrays = [shard.rows.array for shard in mine]
            parts.extend(zip(arrays, sums, strict=True))

        await asyncio.gather(*map(ask, self.order.tasks))
        sums = joined(like.leaves, parts)
        if sums is None or STEP not in like.leaves:
            raise CheckpointError(
                f"the newest checkpoint in {self.order.directory} is of another model",
                path=self.order.directory,
            )
        leaves = {name: replace(x, crc32=sums[name]) for name, x in like.leaves.items()}
        return leaves, by_task


def _whole(name: str, leaf: Leaf) -> Slice:
    return Slice.whole(directory_of(name), leaf.type, leaf.block_rows)


def _step_in(folder: Path, leaves: Mapping[str, Leaf]) -> int:
    """Returns how many updates the files of a step have in them."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        value, _ = read_slice(fd, _whole(STEP, leaves[STEP]))
    finally:
        os.close(fd)
    return int(np.asarray(value))
