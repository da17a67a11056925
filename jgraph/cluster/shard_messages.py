"""Shards of variables in checkpoint files, and their checksums, as messages."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from jgraph.errors import MalformedMessageError
from jgraph.graph.ir import TaskName
from jgraph.graph.rows.hash_spec import HashSpec
from jgraph.plan.program.nodes import ValueType
from jgraph.plan.program.program import StoredVariable
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.codec import check_type
from jgraph.runtime.files.blocks import Blocks, Sums
from jgraph.runtime.files.shard_files import Slice
from jgraph.runtime.store.hash_rows import np_dtype, shape_of
from jgraph.runtime.store.hash_shard import State


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


def sums_in(reply: Frame, shards: int) -> list[Sums]:
    """Returns the checksums that a task told, of each of so many shards."""
    sums: list[Sums] = [{} for _ in range(shards)]
    for row in body_of(reply).sums:
        sums[row.shard][row.block] = row.crc32
    return sums


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


FIELDS = ("keys", "age", "uses")


def state_of(spec: HashSpec, tensors: Any) -> State:
    """Returns the arrays of all rows of a shard as its state.

    Raises:
      MalformedMessageError: they are not of this table.
    """
    names = [*FIELDS, *(column.name for column in spec.columns)]
    state = {
        name: np.asarray(tensor) for name, tensor in zip(names, tensors, strict=False)
    }
    count = len(state["keys"]) if state.get("keys", np.array(0)).ndim else 0
    dtypes = dict(zip(FIELDS, ("int64", "int64", "uint32"), strict=True))
    types: dict[str, tuple[tuple[int, ...], Any]] = {
        name: ((count,), np.dtype(dtypes[name])) for name in FIELDS
    }
    types |= {c.name: (shape_of(c, count), np_dtype(c)) for c in spec.columns}
    found = {name: (array.shape, array.dtype) for name, array in state.items()}
    if found != types:
        raise MalformedMessageError(
            f"rows came that are not those of hash table '{spec.name}'; the sender's "
            "table is another one"
        )
    return state
