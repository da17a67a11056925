"""ReadTable and LoadTable: shards of hash tables, read and replaced as a whole."""

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from jgraph.client.connection import Connection
from jgraph.cluster.deadlines import CONTROL_S, bulk_timeout_s
from jgraph.cluster.shard_messages import FIELDS, state_of
from jgraph.graph.ir import TaskName
from jgraph.graph.rows.hash_spec import HashSpec
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.table_codec import table_to
from jgraph.runtime.store.hash_shard import HashCounts, State


@final
@dataclass(frozen=True, slots=True)
class TableReport:
    """How a shard of a hash table stands.

    Attributes:
      rows: keys that have one.
      nbytes: in use.
      counts: what happened to keys since the shard was made.
    """

    rows: int
    nbytes: int
    counts: HashCounts


def state_of_shard(
    cluster: Connection, task: TaskName, container: str, spec: HashSpec
) -> State:
    """Returns all rows of a shard: ``keys``, ``age``, ``uses`` and each column."""
    reply = _call(cluster, "ReadTable", task, container, spec)
    return state_of(spec, reply.tensors)


def load_shard(
    cluster: Connection, task: TaskName, container: str, spec: HashSpec, state: State
) -> None:
    """Replaces all rows of a shard."""
    names = [*FIELDS, *(column.name for column in spec.columns)]
    tensors = [np.ascontiguousarray(state[name]) for name in names]
    _call(cluster, "LoadTable", task, container, spec, tensors)


def report_of_shard(
    cluster: Connection, task: TaskName, container: str, spec: HashSpec
) -> TableReport:
    """Returns how a shard stands."""
    reply = body_of(
        _call(cluster, "ReadTable", task, container, spec, counts_only=True)
    )
    names = HashCounts.__dataclass_fields__
    counts = HashCounts(**{name: getattr(reply, name) for name in names})
    return TableReport(reply.rows, reply.nbytes, counts)


def _call(
    cluster: Connection,
    method: str,
    task: TaskName,
    container: str,
    spec: HashSpec,
    tensors: Any = (),
    *,
    counts_only: bool = False,
) -> Frame:
    call = pb.HashTableCall(
        task=task, container=container, table=table_to(spec), counts_only=counts_only
    )
    return cluster.call(
        f"Master.{method}",
        frame(hash_table_call=call, tensors=list(tensors)),
        timeout_s=bulk_timeout_s(spec.capacity_bytes) + CONTROL_S,
    )
