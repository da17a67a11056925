"""Arrays of a checkpoint as files: each task writes and reads its own shards.

An array is a directory with a file per block of rows, as
``runtime.files.shard_files`` says, and as Zarr has it: Orbax reads it without jgraph.
What tasks do not have, or cannot reach because the directory is on another disk for
them, the client writes and reads.
"""

import logging
import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from jgraph.client.state.shard_calls import ask_to_load, ask_to_save
from jgraph.cluster.shard_messages import Shard
from jgraph.errors import CheckpointError
from jgraph.graph.ir import TaskName
from jgraph.plan.program.nodes import ValueType
from jgraph.runtime.files.blocks import Sums
from jgraph.runtime.files.manifest import Leaf, directory_of
from jgraph.runtime.files.shard_files import (
    Slice,
    make_array,
    make_proof,
    read_proof,
    read_slice,
    write_slice,
)
from jgraph.train.state.remote_arrays import RemoteArray

_LOG = logging.getLogger("jgraph.checkpoint")
_THREADS: Final = min(8, os.cpu_count() or 1)


def write_arrays(directory: Path, arrays: Mapping[str, Any]) -> dict[str, Leaf]:
    """Writes arrays, and returns what describes them.

    Args:
      directory: of a checkpoint that is being made.
      arrays: by path, ``params/Dense_0/kernel``; NumPy's, or on tasks
        (``RemoteArray``).

    Raises:
      CheckpointError: an array has no elements, or a task cannot write.
      ClusterError: a task is lost.
      OSError: what the disk says.
    """
    slices = {name: _whole(name, array) for name, array in arrays.items()}
    for whole in slices.values():
        make_array(directory, whole)
    proof = make_proof(directory)
    sums: dict[str, list[Sums]] = {name: [] for name in arrays}
    owners, cluster = _shards_of(arrays, slices)
    sums_by_shard = ask_to_save(cluster, directory, proof, [*owners]) if owners else {}
    _tell_of(directory, [shard for shard in owners if shard not in sums_by_shard])
    here = [n for n, array in arrays.items() if not isinstance(array, RemoteArray)]
    with _opened(directory) as fd, ThreadPoolExecutor(_THREADS) as pool:
        slice_sums = pool.map(lambda n: write_slice(fd, slices[n], arrays[n]), here)
        for name, one in zip(here, slice_sums, strict=True):
            sums[name].append(one)
        for shard, name in owners.items():
            if shard in sums_by_shard:
                sums[name].append(sums_by_shard[shard])
            else:  # one at a time: there may be more of them than memory here
                value = arrays[name].snapshot.read_shard(shard)
                sums[name].append(write_slice(fd, shard.rows, value))
    return {name: _leaf(slices[name], sums[name]) for name in arrays}


def read_arrays(
    directory: Path, leaves: Mapping[str, Leaf]
) -> tuple[dict[str, Any], dict[str, Leaf]]:
    """Reads arrays; returns them, and what describes what was read.

    Args:
      directory: of a checkpoint.
      leaves: which, by path.

    Raises:
      OSError: the files are not as they should be.
    """
    slices = {name: _as_described(name, leaf) for name, leaf in leaves.items()}
    with _opened(directory) as fd, ThreadPoolExecutor(_THREADS) as pool:
        read = pool.map(lambda rows: read_slice(fd, rows), slices.values())
        by_name = dict(zip(slices, read, strict=True))
    arrays = {name: array for name, (array, _) in by_name.items()}
    return arrays, {n: _leaf(slices[n], [sums]) for n, (_, sums) in by_name.items()}


def load_arrays(
    directory: Path,
    leaves: Mapping[str, Leaf],
    targets: Mapping[str, RemoteArray],
    *,
    check_only: bool = False,
    tasks: Collection[TaskName] | None = None,
) -> dict[str, Leaf]:
    """Lets tasks read what they have to have; returns what describes what they read.

    What some task cannot read is not in it.

    Args:
      directory: of a checkpoint.
      leaves: all of it, by path.
      targets: which of it, and where it goes.
      check_only: nothing is stored.
      tasks: only these; None: all.

    Raises:
      CheckpointError: the files cannot be read.
      ClusterError: a task is lost.
    """
    slices = {name: _as_described(name, leaves[name]) for name in targets}
    owners, cluster = _shards_of(targets, slices)
    if tasks is not None:
        owners = {shard: name for shard, name in owners.items() if shard.task in tasks}
    if not owners:
        return {}
    proof = read_proof(directory)
    sums_by_shard = ask_to_load(
        cluster, directory, proof, [*owners], check_only=check_only
    )
    if not check_only:
        _tell_of(directory, [shard for shard in owners if shard not in sums_by_shard])
    sums: dict[str, list[Sums]] = {}
    for shard, name in owners.items():
        sums.setdefault(name, []).append(sums_by_shard.get(shard, {}))
    return {
        name: _leaf(slices[name], parts) for name, parts in sums.items() if all(parts)
    }


def _shards_of(
    arrays: Mapping[str, Any], slices: Mapping[str, Slice]
) -> tuple[dict[Shard, str], Any]:
    """Returns the shards of arrays that tasks have, by array; and their cluster."""
    remote = {n: a for n, a in arrays.items() if isinstance(a, RemoteArray)}
    cluster = next((array.cluster for array in remote.values()), None)
    return {s: n for n, a in remote.items() for s in a.shards(slices[n])}, cluster


def _tell_of(directory: Path, shards: list[Shard]) -> None:
    if shards:
        _LOG.info(
            "%s is not the same directory for %s; the client reads and writes for them",
            directory,
            ", ".join(sorted({shard.task for shard in shards})),
        )


def _whole(name: str, array: Any) -> Slice:
    type_ = ValueType(tuple(array.shape), array.dtype.name)
    if not type_.nbytes:
        raise CheckpointError(
            f"{name} is {type_}, which has no elements; Orbax cannot store that"
        )
    return Slice.whole(directory_of(name), type_)


def _as_described(name: str, leaf: Leaf) -> Slice:
    return Slice.whole(directory_of(name), leaf.type, leaf.block_rows)


def _leaf(whole: Slice, sums: list[Sums]) -> Leaf:
    blocks = whole.blocks
    return Leaf(
        whole.type.shape, whole.type.dtype, blocks.block_rows, blocks.joined(sums)
    )


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
