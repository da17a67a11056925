"""Follower: applies the change log of another task to a copy of its state."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias, final

import numpy as np

from jgraph.cluster.shard_messages import state_of
from jgraph.coordination.run.same_version import HeldBack
from jgraph.errors import CopyLostError, JGError
from jgraph.failpoints import failpoint
from jgraph.graph.ir import TaskName
from jgraph.graph.rows.hash_spec import HashSpec
from jgraph.plan.program.nodes import ValueType
from jgraph.plan.program.program import StoredVariable
from jgraph.plan.program.replay import KeyedRowsAre, NodeRan, Record, RowsAre, changing
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.record_codec import record_from
from jgraph.runtime.compute_errors import as_error
from jgraph.runtime.loaded import LoadedPartition
from jgraph.runtime.node_work import repeat
from jgraph.runtime.store.store import VariableStore
from jgraph.server.steps.task_host import TaskHost

OnApplied: TypeAlias = Callable[[int, JGError | None], None]


@final
class ChangeApplier:
    """Does what records say; the newest update when it is known to be everywhere.

    Args:
      container: of the copies.
      loaded: by number, the recorded programs' partitions, for these variables.
      store: where they are.
      first: number of the first record; None: any.
    """

    def __init__(
        self,
        container: str,
        loaded: Sequence[LoadedPartition | None],
        store: VariableStore,
        first: int | None = 1,
    ) -> None:
        self._container = container
        self._loaded = loaded
        self._store = store
        self._due = first
        self._held_back = HeldBack[Record]()
        self.number = 0
        """Of the last record that came."""

    @property
    def versions(self) -> range:
        """Those that ``end`` can make; see ``same_version``."""
        return self._held_back.versions

    def apply(self, frame: Frame) -> None:
        """Takes the next record, and applies it or those before it.

        Raises:
          CopyLostError: it is not the next one.
          MalformedMessageError: nobody recorded this.
        """
        record = record_from(frame)
        if self._due not in (None, record.number):
            raise CopyLostError(
                f"record {record.number} of '{self._container[:80]}' came after "
                f"{self.number}: those between are lost"
            )
        for ready in self._came(record):
            self._do(ready)
        self.number, self._due = record.number, record.number + 1

    def end(self, version: int) -> None:
        """Applies what is missing of a version.

        Raises:
          CopyLostError: it is none of ``versions``.
        """
        for ready in self._held_back.end(version):
            self._do(ready)

    def _came(self, record: Record) -> list[Record]:
        match record.what:
            case NodeRan(program, node) if record.version:
                due = changing(self._of(program).partition)
                return self._held_back.update(record, record.version, node, due)
            case NodeRan():
                return self._held_back.beside(record)
            case _:
                return self._held_back.begin(record, record.version)

    def _do(self, record: Record) -> None:
        match record.what:
            case str(name):
                (value,) = record.arrays
                type_ = ValueType(value.shape, value.dtype.name)
                variable = StoredVariable(name, type_, self._container)
                self._store.write([variable], [value])
            case RowsAre(name, count):
                ids, rows = record.arrays
                type_ = ValueType((count, *rows.shape[1:]), rows.dtype.name)
                variable = StoredVariable(name, type_, self._container)
                self._store.put_rows(variable, ids, rows)
            case HashSpec() as spec:
                entry = self._store.hash_table(self._container, spec)
                with entry.lock:
                    entry.shard.restore(state_of(spec, record.arrays))
            case KeyedRowsAre(spec, ends):
                entry = self._store.hash_table(self._container, spec)
                with entry.lock:
                    put = entry.shard.put_ends if ends else entry.shard.put_copied
                    put([np.asarray(array) for array in record.arrays])
            case NodeRan(program, node):
                repeat(self._of(program), node, record.arrays, self._store)

    def _of(self, program: int) -> LoadedPartition:
        known = self._loaded[program] if program < len(self._loaded) else None
        if known is None:
            raise CopyLostError(
                f"a record of '{self._container[:80]}' is of program {program}, which "
                "is not known here"
            )
        return known


@final
class Follower:
    """Applies records as they come, off the event loop, one after the other.

    Args:
      copier: applies them.
      container: of the copy.
      src: whose records.
      task: who has the copy.
      shell: runs what is long.
      report: called with the number of the last record that is here, or with why no
        more will be.
    """

    def __init__(
        self,
        copier: ChangeApplier,
        container: str,
        src: TaskName,
        task: TaskName,
        shell: TaskHost,
        report: OnApplied,
    ) -> None:
        self.src = src
        self._container = container
        self._copier = copier
        self._task = task
        self._shell = shell
        self._report = report
        self._came: deque[Frame] = deque()
        self._work: asyncio.Task[None] | None = None
        self._error: JGError | None = None
        self._is_over = False

    def received(self, record: Frame) -> None:
        """Takes the next record."""
        if self._is_over or self._error is not None:
            self._report(self._copier.number, self._error or self._replaced())
            return
        self._came.append(record)
        if self._work is None:
            self._work = asyncio.get_running_loop().create_task(self._apply())

    async def end(self, version: int | None = None) -> tuple[int, range]:
        """Applies what came, and then nothing more.

        Args:
          version: that it is to have; None: the newest update is not applied yet.

        Returns:
          How many records came, and which versions can still be had.

        Raises:
          CopyLostError: the copy is not what its records say, or of other versions.
        """
        self._is_over = True
        if self._work is not None:
            await asyncio.shield(self._work)
        if self._error is not None:
            raise self._error
        if version is not None:
            await self._shell.run(partial(self._copier.end, version))
        return self._copier.number, self._copier.versions

    def _replaced(self) -> JGError:
        return CopyLostError(
            f"the copy '{self._container[:80]}' on {self._task} has taken the place of "
            f"what {self.src} held",
            task=self.src,
        )

    async def _apply(self) -> None:
        while self._came and self._error is None:
            came, self._came = self._came, deque()
            failpoint("copy.received")
            error = await self._shell.run(partial(self._apply_all, came))
            failpoint("copy.applied")
            if error is not None:
                self._error = CopyLostError(
                    f"{self._task} cannot keep a copy of {self.src}: {error.message}",
                    task=self._task,
                )
            self._report(self._copier.number, self._error)
        self._work = None

    def _apply_all(self, came: deque[Frame]) -> JGError | None:
        try:
            while came:
                self._copier.apply(came.popleft())  # its memory goes with it
        except Exception as error:  # noqa: BLE001  # becomes that of the sender's steps
            return as_error(error, self._task)
        return None
