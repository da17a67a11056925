"""SaveShards and LoadShards: each task writes and reads its shards of a checkpoint."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, final

from jgraph.cluster.calls import bulk_timeout_s
from jgraph.cluster.connection import Connection
from jgraph.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointPathError,
    CheckpointSpaceError,
    MalformedMessageError,
)
from jgraph.graph.ir import TaskName
from jgraph.plan.nodes import ValueType
from jgraph.plan.program import StoredVariable
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.codec import check_type
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame
from jgraph.runtime.blocks import Blocks, Sums
from jgraph.runtime.shard_files import FULL, Slice, proven, read_slice, write_slice
from jgraph.runtime.store import VariableStore

_THREADS = 4
T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
class Shard:
    """A variable of a task, and the rows of an array that it is.

    Attributes:
      task: has it.
      variable: as it is stored there.
      rows: which rows of which array.
    """

    task: TaskName
    variable: StoredVariable
    rows: Slice


Told = Mapping[Shard, Sums]
"""Checksums by shard."""


# ------------------------------------------------------------ what a task does


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
      check_place: see ``TaskHost``.

    Raises:
      FencedError: another process has the place of this one.
      CheckpointPathError: this task does not have the directory that the client has.
      CheckpointSpaceError: there is no room.
      CheckpointError: the disk refuses.
      UninitializedError: a variable has no value.
    """

    def save(directory: int, shard: Shard) -> Sums:
        (value,) = store.read([shard.variable])
        check_place()
        return write_slice(directory, shard.rows, value)

    return _each(task, body_of(request), save, CheckpointError)


def load_shards(task: TaskName, store: VariableStore, request: Frame) -> Frame:
    """Answers "LoadShards": reads variables from files, and tells their checksums.

    They are stored when all were read, unless they are only to be looked at.

    Raises:
      CheckpointPathError: this task does not have the directory that the client has.
      CheckpointCorruptError: the files cannot be read.
      VariableMismatchError: a stored variable has another shape or dtype.
    """
    body = body_of(request)
    found: dict[StoredVariable, Any] = {}

    def load(directory: int, shard: Shard) -> Sums:
        value, sums = read_slice(directory, shard.rows)
        if not body.check_only:
            found[shard.variable] = value
        return sums

    reply = _each(task, body, load, CheckpointCorruptError)
    store.write([*found], [*found.values()], owned=range(len(found)))
    return reply


def _each(
    task: TaskName,
    body: Any,
    do: Callable[[int, Shard], Sums],
    refused: type[CheckpointError],
) -> Frame:
    shards = [shard_from(task, message) for message in body.shards]
    try:
        with proven(body.directory, body.proof) as directory:
            sums = _in_threads(lambda shard: do(directory, shard), shards)
    except OSError as error:
        kind = CheckpointSpaceError if error.errno in FULL else refused
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


def _in_threads(do: Callable[[Shard], T], shards: Sequence[Shard]) -> list[T]:
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="jgraph-shards") as pool:
        return list(pool.map(do, shards))


def shard_from(task: TaskName, message: pb.ShardFile) -> Shard:
    """Returns a shard that came.

    Raises:
      MalformedMessageError: it cannot be one.
    """
    check_type(message.type, f"variable '{message.name}'")
    type_ = ValueType(tuple(message.type.shape), message.type.dtype)
    whole = (message.rows, *type_.shape[1:]) if type_.shape else ()
    blocks = Blocks.of(whole, type_.np_dtype.itemsize, message.block_rows)
    rows = Slice(message.array, type_, blocks, message.start, message.step)
    last = rows.start + (rows.count - 1) * rows.step
    if min((*type_.shape, rows.step)) < 1 or last >= blocks.rows:
        raise MalformedMessageError(
            f"{type_} does not lie in {blocks.rows:,} rows from {rows.start:,} on"
        )
    return Shard(task, StoredVariable(message.name, type_, message.container), rows)


# ------------------------------------------------------------ what a client asks


def ask_to_save(
    cluster: Connection, directory: Path, proof: bytes, shards: Sequence[Shard]
) -> Told:
    """Lets each task write its shards; those that it cannot are not in the answer.

    Raises:
      CheckpointError: a disk refuses, or has no room.
      ClusterError: a task is lost.
    """
    return _ask_all(cluster, "SaveShards", directory, proof, shards)


def ask_to_load(
    cluster: Connection,
    directory: Path,
    proof: bytes,
    shards: Sequence[Shard],
    *,
    check_only: bool = False,
) -> Told:
    """Lets each task read its shards; those that it cannot are not in the answer.

    Args:
      cluster: of the tasks.
      directory: of the checkpoint.
      proof: of the directory.
      shards: what to read.
      check_only: nothing is stored.

    Raises:
      CheckpointCorruptError: the files cannot be read.
      ClusterError: a task is lost.
    """
    return _ask_all(
        cluster, "LoadShards", directory, proof, shards, check_only=check_only
    )


def _ask_all(
    cluster: Connection,
    method: str,
    directory: Path,
    proof: bytes,
    shards: Sequence[Shard],
    *,
    check_only: bool = False,
) -> Told:
    by_task: defaultdict[TaskName, list[Shard]] = defaultdict(list)
    for shard in shards:
        by_task[shard.task].append(shard)

    def ask(task: TaskName) -> Told:
        mine = by_task[task]
        request = pb.ShardFiles(
            directory=str(directory),
            proof=proof,
            shards=[shard_to(shard) for shard in mine],
            check_only=check_only,
        )
        try:
            reply = cluster.call(
                method,
                frame(shard_files=request),
                timeout_s=bulk_timeout_s(sum(s.variable.type.nbytes for s in mine)),
                to=cluster.spec.address(task),
            )
        except CheckpointPathError:
            return {}
        return dict(zip(mine, sums_in(reply, len(mine)), strict=True))

    if not proof or not by_task:
        return {}
    with ThreadPoolExecutor(len(by_task)) as pool:
        return {s: sums for told in pool.map(ask, by_task) for s, sums in told.items()}


def sums_in(reply: Frame, shards: int) -> list[Sums]:
    """Returns the checksums that a task told, of each of so many shards."""
    told: list[Sums] = [{} for _ in range(shards)]
    for row in body_of(reply).sums:
        told[row.shard][row.block] = row.crc32
    return told


def shard_to(shard: Shard) -> pb.ShardFile:
    """Returns a shard as it travels."""
    rows, variable = shard.rows, shard.variable
    return pb.ShardFile(
        container=variable.container,
        name=variable.name,
        type=pb.TensorType(dtype=variable.type.dtype, shape=variable.type.shape),
        array=rows.array,
        rows=rows.blocks.rows,
        block_rows=rows.blocks.block_rows,
        start=rows.start,
        step=rows.step,
    )
