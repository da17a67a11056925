"""SaveShards and LoadShards: each task writes and reads its shards of a checkpoint."""

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jgraph.client.connection import Connection
from jgraph.cluster.deadlines import bulk_timeout_s
from jgraph.cluster.shard_messages import Shard, Told, shard_to, sums_in
from jgraph.errors import (
    CheckpointPathError,
)
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame

# ------------------------------------------------------------ what a task does


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
        return {
            s: sums for answer in pool.map(ask, by_task) for s, sums in answer.items()
        }
