"""State sources of a run: who saves it, and gives its parameter servers what was saved.

A client saves its run, and may have a directory that no task sees. The master saves a
run that has no client, with files that the ps write and read; and one whose client is
gone, if the tasks have the directory.
"""

import asyncio
import json
import logging
from collections.abc import Collection, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

from jgraph.cluster.methods import reading
from jgraph.coordination.run.recovery import hopeless
from jgraph.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointWriterError,
    JGError,
)
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.runtime.files.manifest import read_manifest
from jgraph.runtime.files.shard_files import check_read
from jgraph.runtime.files.step_files import our_steps, put_aside
from jgraph.server.runs.ps_setup import PsSetup
from jgraph.server.runs.run_client import RunClient
from jgraph.server.runs.saving.checkpointer import RunCheckpointer, Saved

_LOG = logging.getLogger("jgraph.recover")


@final
@dataclass(frozen=True, slots=True)
class SavedState:
    """What all ps were given.

    Attributes:
      step: updates of the model.
      position: where in the data that is; None: as the number of updates says.
    """

    step: int
    position: Mapping[str, Any] | None


class StateSource(Protocol):
    """Has checkpoints of a run."""

    @property
    def directory(self) -> str:
        """Where they are, for people."""

    def paused(self) -> AbstractAsyncContextManager[None]:
        """Saves nothing meanwhile; what comes after is another state."""

    async def save_at_rest(
        self, tasks: Collection[TaskName], position: str
    ) -> Saved | None:
        """Saves what a run came to whose loops have all ended.

        Args:
          tasks: are told to end.
          position: where in the data the run is, as JSON.

        Returns:
          What each ps can read again; None: the newest checkpoint is what there is.
        """

    async def newest(self) -> int | None:
        """Returns the updates in the newest checkpoint; None: there is none."""

    async def load(self, error: JGError, first: int) -> SavedState:
        """Gives all ps their variables from the newest checkpoint that is good.

        Args:
          error: how the loss of some showed.
          first: updates before the run; older checkpoints are none of it.
        """

    async def load_part(self, tasks: Collection[TaskName]) -> int:
        """Gives tasks that hold nothing their variables, and leaves the others alone.

        Args:
          tasks: these.

        Returns:
          The updates of what they have now: of the newest checkpoint.

        Raises:
          JGError: they may have a part of it.
        """


@final
@dataclass(frozen=True, slots=True)
class MasterSaves:
    """Checkpoints that the master takes; a ``StateSource``.

    Args:
      saver: saves it.
      ps: gives a ps what it needs.
    """

    saver: RunCheckpointer
    ps: PsSetup

    @property
    def directory(self) -> str:
        """See ``StateSource.directory``."""
        return self.saver.order.directory

    def paused(self) -> AbstractAsyncContextManager[None]:
        """See ``StateSource.paused``."""
        return self.saver.paused()

    async def save_at_rest(
        self, tasks: Collection[TaskName], position: str
    ) -> Saved | None:
        """See ``StateSource.save_at_rest``.

        Raises:
          CheckpointWriterError: another process has taken over the directory.
        """
        try:
            return await self.saver.save_at_rest()
        except CheckpointWriterError:
            raise
        except (JGError, OSError) as error:  # a ps was killed meanwhile, a disk is full
            _LOG.warning("no checkpoint before %s ends: %s", ", ".join(tasks), error)
            return None

    async def newest(self) -> int | None:
        """See ``StateSource.newest``."""
        return await self._newest_but(())

    async def _newest_but(self, others: Collection[int]) -> int | None:
        steps = await asyncio.to_thread(our_steps, Path(self.directory))
        return max((step for step in steps if step not in others), default=None)

    async def load(self, error: JGError, first: int) -> SavedState:
        """See ``StateSource.load``."""
        bad_steps: list[int] = []  # one that cannot be renamed is still there
        while True:
            newest = await self._newest_but(bad_steps)
            if newest is None or newest < first:
                why = "the checkpoints of this run are damaged"
                raise hopeless(error, why, self.directory, newest)
            path = Path(self.directory, str(newest))
            try:
                manifest = await asyncio.to_thread(read_manifest, path)
                parts = await asyncio.gather(
                    *(self.ps.load(task, path) for task in self.ps.tasks)
                )
                check_read(path, manifest.leaves, [p for each in parts for p in each])
            except CheckpointError as damaged:
                if not isinstance(damaged, CheckpointCorruptError):
                    raise
                bad_steps.append(newest)
                now = await asyncio.to_thread(put_aside, path)
                where = "stays where it is" if now == path else f"is now {now}"
                _LOG.error("%s. It %s; the step before is used", damaged, where)
            else:
                return SavedState(manifest.step, manifest.position)

    async def load_part(self, tasks: Collection[TaskName]) -> int:
        """See ``StateSource.load_part``."""
        newest = await self.newest()
        if newest is None:
            raise CheckpointError(f"there is no checkpoint in {self.directory}")
        path = Path(self.directory, str(newest))
        manifest = await asyncio.to_thread(read_manifest, path)
        # What some of them read of an array has no checksum of its own.
        all_parts = await asyncio.gather(
            *(self.ps.load(task, path, check_only=True) for task in self.ps.tasks)
        )
        check_read(path, manifest.leaves, [p for each in all_parts for p in each])
        await asyncio.gather(*(self.ps.load(task, path) for task in tasks))
        return manifest.step


@final
@dataclass(frozen=True, slots=True)
class ClientSaves:
    """Checkpoints that the client of a run has; a ``StateSource``.

    Args:
      client: of the run.
    """

    client: RunClient

    @property
    def directory(self) -> str:
        """See ``StateSource.directory``."""
        return self.client.directory

    def paused(self) -> AbstractAsyncContextManager[None]:
        """See ``StateSource.paused``: the client saves when it is asked."""
        return nullcontext()

    async def save_at_rest(
        self, tasks: Collection[TaskName], position: str
    ) -> Saved | None:
        """See ``StateSource.save_at_rest``."""
        await self.client.ask("rest", tasks=tasks, position=position)
        return None

    async def newest(self) -> int | None:
        """See ``StateSource.newest``."""
        answer = await self._ask("newest")
        return answer.step if answer.HasField("step") else None

    async def load(self, error: JGError, first: int) -> SavedState:
        """See ``StateSource.load``."""
        answer = await self._ask("state", self.client.order.ps.now)
        if answer.step < first:
            why = "the checkpoints of this run are damaged"
            raise hopeless(error, why, self.directory, answer.step)
        with reading("the position of a checkpoint"):
            position = json.loads(answer.position) if answer.position else None
        return SavedState(answer.step, position)

    async def load_part(self, tasks: Collection[TaskName]) -> int:
        """See ``StateSource.load_part``."""
        return (await self._ask("part", tasks=tasks)).step

    async def _ask(
        self, kind: str, ps: int = 0, tasks: Collection[TaskName] = ()
    ) -> pb.RunAnswer:
        if self.client.is_gone:
            raise CheckpointError(
                f"the client of run '{self.client.order.run}' is gone, which has the "
                f"checkpoints of the run in {self.directory}; go on from there with "
                f"trainer.restore('{self.directory}')",
                path=self.directory,
            )
        return await self.client.ask(kind, ps=ps, tasks=tasks)
