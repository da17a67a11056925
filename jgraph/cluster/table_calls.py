"""ReadTable and LoadTable: shards of hash tables, read and replaced as a whole."""

from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np

from jgraph.cluster.calls import CONTROL_S, bulk_timeout_s
from jgraph.cluster.connection import Connection
from jgraph.errors import MalformedMessageError
from jgraph.graph.hash_spec import HashSpec
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.table_codec import table_from, table_to
from jgraph.rpc.transport import Frame
from jgraph.runtime.hash_rows import np_dtype, shape_of
from jgraph.runtime.hash_shard import HashCounts, State
from jgraph.runtime.store import VariableStore

_FIELDS = ("keys", "age", "uses")


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


def state_of(spec: HashSpec, tensors: Any) -> State:
    """Returns the arrays of all rows of a shard as its state.

    Raises:
      MalformedMessageError: they are not of this table.
    """
    names = [*_FIELDS, *(column.name for column in spec.columns)]
    state = {
        name: np.asarray(tensor) for name, tensor in zip(names, tensors, strict=False)
    }
    count = len(state["keys"]) if state.get("keys", np.array(0)).ndim else 0
    dtypes = dict(zip(_FIELDS, ("int64", "int64", "uint32"), strict=True))
    wanted: dict[str, tuple[tuple[int, ...], Any]] = {
        name: ((count,), np.dtype(dtypes[name])) for name in _FIELDS
    }
    wanted |= {c.name: (shape_of(c, count), np_dtype(c)) for c in spec.columns}
    found = {name: (array.shape, array.dtype) for name, array in state.items()}
    if found != wanted:
        raise MalformedMessageError(
            f"rows came that are not those of hash table '{spec.name}'; the sender's "
            "table is another one"
        )
    return state


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
    names = [*_FIELDS, *(column.name for column in spec.columns)]
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
