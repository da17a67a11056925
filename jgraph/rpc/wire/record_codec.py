"""Codec of change-log records: to frames, and back."""

import numpy as np

from jgraph.errors import MalformedMessageError
from jgraph.graph.rows.hash_spec import HashSpec
from jgraph.plan.program.replay import KeyedRowsAre, NodeRan, Record, RowsAre, What
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.table_codec import table_from, table_to


def record_to(stream: str, record: Record) -> Frame:
    """Returns the frame of a record.

    Example:
      >>> import numpy as np
      >>> there = record_to("train-1.ps0", Record(7, NodeRan(0, 3), [np.zeros(2)]))
      >>> record_from(there).what
      NodeRan(program=0, node=3)
    """
    body = pb.Record(stream=stream, number=record.number, version=record.version)
    match record.what:
        case str(name):
            body.variable = name
        case RowsAre(name, rows):
            body.rows.CopyFrom(pb.RowsAre(variable=name, rows=rows))
        case HashSpec() as spec:
            body.table.CopyFrom(table_to(spec))
        case KeyedRowsAre(spec, ends):
            keyed = pb.KeyedRowsAre(table=table_to(spec), ends=ends)
            body.keyed_rows.CopyFrom(keyed)
        case NodeRan(program, node):
            body.node.CopyFrom(pb.NodeRan(program=program, node=node))
    return frame(record=body, tensors=tuple(record.arrays))


def record_from(received: Frame) -> Record:
    """Returns the record of a frame.

    Raises:
      MalformedMessageError: it is none.
      InvalidProgramError: there can be no such hash table.
    """
    body = body_of(received)
    if not isinstance(body, pb.Record):
        raise MalformedMessageError("a frame that is no record came among records")
    what: What
    match body.WhichOneof("what"):
        case "variable" if len(received.tensors) == 1:
            what = str(body.variable)
        case "rows" if _are_rows(received):
            what = RowsAre(str(body.rows.variable), int(body.rows.rows))
        case "table":
            what = table_from(body.table)
        case "keyed_rows":
            what = KeyedRowsAre(table_from(body.keyed_rows.table), body.keyed_rows.ends)
        case "node":
            what = NodeRan(body.node.program, body.node.node)
        case kind:
            raise MalformedMessageError(
                f"a record of {kind or 'nothing'} came with {len(received.tensors)} "
                "arrays"
            )
    return Record(body.number, what, received.tensors, body.version)


def _are_rows(received: Frame) -> bool:
    """Whether a frame has ids, and a row for each of them."""
    if len(received.tensors) != 2:
        return False
    ids, rows = received.tensors
    return ids.dtype == np.int32 and ids.ndim == 1 and rows.shape[:1] == ids.shape
