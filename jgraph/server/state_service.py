"""Calls to a task that save its variables to checkpoint files, or load them."""

from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, final

import numpy as np

from jgraph.clock import Clock
from jgraph.cluster.methods import Answer
from jgraph.cluster.shard_messages import Shard, shard_from, state_of
from jgraph.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointSpaceError,
)
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.table_codec import table_from
from jgraph.runtime.files.blocks import Sums
from jgraph.runtime.files.manifest import is_of_host
from jgraph.runtime.files.shard_files import (
    FULL,
    check_slice,
    fill_slice,
    proven,
    write_rows,
)
from jgraph.runtime.store.store import VariableStore
from jgraph.server.flight_service import FlightService
from jgraph.server.steps.task_host import TaskHost
from jgraph.server.task_context import TaskContext

_THREADS = 4


@final
class SaveCounts:
    """Counts what a task writes of checkpoints.

    Args:
      clock: tells how long it takes.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._status = pb.ShardSaves()
        self._last_s = 0.0

    async def counted(
        self, request: Frame, replies: AsyncIterator[Frame]
    ) -> AsyncIterator[Frame]:
        """Passes the reply to "SaveShards" on, and counts it."""
        began = self._clock.now()
        try:
            async for reply in replies:
                yield reply
        except Exception:
            self._status.failures += 1
            raise
        shards = _shards(TaskName(""), body_of(request))
        nbytes = sum(shard.variable.type.nbytes for shard in shards)
        self._last_s = self._clock.now()
        self._status.saves += 1
        self._status.nbytes, self._status.seconds = nbytes, self._last_s - began

    def status(self) -> pb.ShardSaves:
        """Returns the counts of this moment."""
        found = pb.ShardSaves()
        found.CopyFrom(self._status)
        found.age_s = self._clock.now() - self._last_s if found.saves else 0.0
        return found


def state_methods(
    context: TaskContext,
    store: VariableStore,
    host: TaskHost,
    saves: SaveCounts,
    flight: FlightService,
) -> dict[str, Answer]:
    """Returns the methods that read and write all state of a task, in threads."""

    def in_thread(answer: Callable[[Frame], Frame]) -> Answer:
        async def replies(request: Frame) -> AsyncIterator[Frame]:
            yield await host.run(lambda: answer(request))

        return replies

    task, check = context.task, context.check_place
    save = in_thread(lambda call: save_shards(task, store, call, check))
    return {
        "ReadTable": in_thread(partial(read_table, store)),
        "LoadTable": in_thread(partial(load_table, store)),
        "SaveShards": lambda call: flight.noted(
            "checkpoint", "save", saves.counted(call, save(call))
        ),
        "LoadShards": in_thread(partial(load_shards, task, store)),
    }


def save_shards(
    task: TaskName,
    store: VariableStore,
    request: Frame,
    check_place: Callable[[], None],
) -> Frame:
    """Answers "SaveShards": writes variables to files, and tells their checksums.

    Args:
      task: this one.
      store: has the variables.
      request: the call.
      check_place: see ``TaskContext``.

    Raises:
      FencedError: another process has the place of this one.
      CheckpointPathError: this task does not have the directory that the client has.
      CheckpointSpaceError: there is no room.
      CheckpointError: the disk refuses.
      UninitializedError: a variable has no value.
    """

    def save(shard: Shard, directory: int) -> Sums:
        rows = store.reader(shard.variable)
        check_place()
        return write_rows(directory, shard.rows, rows)

    body = body_of(request)
    write = [partial(save, shard) for shard in _shards(task, body)]
    return _each(task, body, write, CheckpointError)


def load_shards(task: TaskName, store: VariableStore, request: Frame) -> Frame:
    """Answers "LoadShards": reads variables from files, and tells their checksums.

    They are read into the memory of the variables, which nobody sees until all were
    read. After an error their values are undefined: who needs them lets the files be
    looked at first.

    Raises:
      CheckpointPathError: this task does not have the directory that the client has.
      CheckpointCorruptError: the files cannot be read.
      VariableMismatchError: a stored variable has another shape or dtype.
    """
    body = body_of(request)
    shards = _shards(task, body)
    if body.check_only:
        look = [partial(check_slice, where=shard.rows) for shard in shards]
        return _each(task, body, look, CheckpointCorruptError)

    def load(places: Sequence[np.ndarray[Any, Any]]) -> Frame:
        read = [
            partial(fill_slice, where=shard.rows, array=place)
            for shard, place in zip(shards, places, strict=True)
        ]
        return _each(task, body, read, CheckpointCorruptError)

    return store.fill([shard.variable for shard in shards], load)


def _shards(task: TaskName, body: Any) -> list[Shard]:
    return [shard_from(task, message) for message in body.shards]


def _each(
    task: TaskName,
    body: Any,
    do: Sequence[Callable[[int], Sums]],
    refused: type[CheckpointError],
) -> Frame:
    """Does something with the files of each shard, several at a time."""
    try:
        with (
            proven(body.directory, body.proof) as directory,
            ThreadPoolExecutor(_THREADS, thread_name_prefix="jgraph-shards") as pool,
        ):
            sums = list(pool.map(lambda one: one(directory), do))
    except OSError as error:
        kind = CheckpointError if is_of_host(error) else refused
        kind = CheckpointSpaceError if error.errno in FULL else kind
        raise kind(
            f"{task} cannot use the files of the checkpoint in {body.directory}: "
            f"{error.strerror}",
            path=body.directory,
            task=task,
        ) from error
    rows = [
        pb.ShardSum(shard=number, block=block, crc32=crc)
        for number, blocks in enumerate(sums)
        for block, crc in blocks.items()
    ]
    return frame(shard_sums=pb.ShardSums(sums=rows))


def read_table(store: VariableStore, request: Frame) -> Frame:
    """Answers "ReadTable": what a shard did, and all of its rows if they are asked for.

    Raises:
      VariableMismatchError: the table is another one here.
    """
    body = body_of(request)
    entry = store.hash_table(body.container, table_from(body.table))
    with entry.lock:
        state = {} if body.counts_only else entry.shard.state()
        report = _report(entry.shard)
    return frame(hash_table_reply=report, tensors=list(state.values()))


def table_statuses(store: VariableStore) -> list[pb.HashTableStatus]:
    """Returns how the shards of all tables stand; waits for no update."""
    return [
        pb.HashTableStatus(
            container=container,
            name=shard.spec.name,
            capacity_bytes=shard.spec.capacity_bytes,
            report=_report(shard),
        )
        for container, shard in store.hash_tables()
    ]


def load_table(store: VariableStore, request: Frame) -> Frame:
    """Answers "LoadTable": the shard's rows are those of the request from now on.

    Raises:
      VariableMismatchError: the table is another one here.
      MalformedMessageError: rows that are not of this table.
    """
    body = body_of(request)
    spec = table_from(body.table)
    state = state_of(spec, request.tensors)
    entry = store.hash_table(body.container, spec)
    with entry.lock:
        entry.shard.restore(state)
        return frame(hash_table_reply=_report(entry.shard))


def _report(shard: Any) -> pb.HashTableReply:
    counts = asdict(shard.counts)
    return pb.HashTableReply(rows=len(shard), nbytes=shard.nbytes, **counts)
