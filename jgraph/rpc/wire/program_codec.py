"""Codec of ``Program``: to its protobuf message and tensors, and back.

The tensors of a program are, in order: the exported bytes of each segment (uint8),
then the values of the constants, partition by partition. What arrives is checked
(``program_check``) before anybody sees a ``Program``.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jgraph.errors import InvalidProgramError, MalformedMessageError
from jgraph.graph.ir import TaskName
from jgraph.graph.rows.rows import Layout
from jgraph.plan.program.nodes import (
    AggregateNode,
    CheckNode,
    ConstNode,
    ContributeNode,
    FeedNode,
    FetchNode,
    JoinNode,
    LookupNode,
    MergeNode,
    Node,
    ReadNode,
    RecvNode,
    RouteNode,
    RowMean,
    Rows,
    SegmentNode,
    SendNode,
    SplitNode,
    UnpackNode,
    ValueType,
    WriteNode,
)
from jgraph.plan.program.program import Partition, Program, SegmentCode, StoredVariable
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.transport import Tensor
from jgraph.rpc.wire.codec import check_type
from jgraph.rpc.wire.program_check import check_program
from jgraph.rpc.wire.table_codec import table_from, table_to


def encode_program(program: Program) -> tuple[pb.Program, tuple[Tensor, ...]]:
    """Returns the message of a program and the tensors that travel with it."""
    message = pb.Program(
        name=program.name,
        driver=program.driver,
        partitions=[_partition_to(p) for p in program.partitions],
        segments=[
            pb.SegmentCode(digest=s.digest, platforms=s.platforms, label=s.label)
            for s in program.segments
        ],
        feeds=[pb.NamedType(name=n, type=_type_to(t)) for n, t in program.feeds],
        fetches=[pb.NamedType(name=n, type=_type_to(t)) for n, t in program.fetches],
    )
    code = [np.frombuffer(s.exported, np.uint8) for s in program.segments]
    consts = [
        node.value
        for partition in program.partitions
        for node in partition.nodes
        if isinstance(node, ConstNode)
    ]
    return message, (*code, *consts)


def decode_program(message: pb.Program, tensors: Sequence[Tensor]) -> Program:
    """Returns the program that was encoded.

    Args:
      message: what arrived.
      tensors: all tensors of its frame; their number must fit.

    Raises:
      InvalidProgramError: bytes that do not match their digest, ids out of range, an
        order that cannot run, or types that do not fit together.
    """
    rest = iter(tensors)
    try:
        program = Program(
            name=message.name,
            driver=TaskName(message.driver),
            segments=tuple(_segment_from(s, rest) for s in message.segments),
            partitions=tuple(_partition_from(p, rest) for p in message.partitions),
            feeds=tuple((n.name, _type_from(n.type)) for n in message.feeds),
            fetches=tuple((n.name, _type_from(n.type)) for n in message.fetches),
        )
    except MalformedMessageError as error:
        raise InvalidProgramError(
            f"program '{message.name}': {error.message}"
        ) from None
    spare = sum(1 for _ in rest)
    if spare:
        raise InvalidProgramError(
            f"program '{message.name}' came with {spare} tensors too many"
        )
    check_program(program)
    return program


def _type_to(type_: ValueType) -> pb.TensorType:
    return pb.TensorType(
        dtype=type_.dtype,
        shape=type_.shape,
        ragged=type_.ragged,
        symbols=type_.symbols,
    )


def _type_from(message: pb.TensorType) -> ValueType:
    check_type(message, "a value")
    symbols = tuple(message.symbols)
    if symbols and len(symbols) != len(message.shape):
        raise MalformedMessageError(
            f"a value of {len(message.shape)} dimensions has {len(symbols)} symbols"
        )
    return ValueType(tuple(message.shape), message.dtype, message.ragged, symbols)


def _partition_to(partition: Partition) -> pb.Partition:
    return pb.Partition(
        task=partition.task,
        values=[_type_to(t) for t in partition.values],
        variables=[
            pb.StoredVariable(
                container=v.container,
                name=v.name,
                type=_type_to(v.type),
                table=None if v.table is None else table_to(v.table),
            )
            for v in partition.variables
        ],
        nodes=[_node_to(node) for node in partition.nodes],
        gate=partition.gate,
    )


def _partition_from(message: pb.Partition, tensors: Iterator[Tensor]) -> Partition:
    return Partition(
        task=TaskName(message.task),
        values=tuple(_type_from(t) for t in message.values),
        variables=tuple(
            StoredVariable(
                v.name,
                _type_from(v.type),
                v.container,
                table_from(v.table) if v.HasField("table") else None,
            )
            for v in message.variables
        ),
        nodes=tuple(_node_from(node, tensors) for node in message.nodes),
        gate=message.gate,
    )


def _segment_from(message: pb.SegmentCode, tensors: Iterator[Tensor]) -> SegmentCode:
    code = _next_tensor(tensors)
    if code.dtype != np.uint8 or code.ndim != 1:
        raise InvalidProgramError("the code of a segment must be a row of bytes")
    exported = code.tobytes()
    if hashlib.sha256(exported).hexdigest() != message.digest:
        raise InvalidProgramError(
            f"the code of segment '{message.label[:80]}' does not match its digest; "
            f"it was damaged or changed on the way"
        )
    platforms = tuple(message.platforms)
    return SegmentCode(message.digest, exported, platforms, message.label)


def _next_tensor(tensors: Iterator[Tensor]) -> Tensor:
    for tensor in tensors:
        return tensor
    raise InvalidProgramError("the program came with too few tensors")


def _node_to(node: Node) -> pb.Node:
    if isinstance(node, ConstNode):
        return pb.Node(const=pb.ConstNode(out=node.out))
    message = getattr(pb, type(node).__name__)(**_fields(node))
    return pb.Node(**{_KINDS[type(node)]: message})


def _fields(node: Node) -> dict[str, Any]:
    """Returns the fields of a node whose message has the same names."""
    return {n: _message(getattr(node, n)) for n in node.__dataclass_fields__}


def _message(value: Any) -> Any:
    """Returns a field's value as its message takes it."""
    match value:
        case Rows():
            return pb.Rows(variable=value.variable, ids=value.ids)
        case RowMean():
            return pb.RowMean(ids=value.ids, rows=value.rows)
        case Layout():
            return pb.Layout(sizes=value.sizes, kind=value.kind)
        case tuple():
            return [_message(v) for v in value]
        case _:
            return value


def _node_from(message: pb.Node, tensors: Iterator[Tensor]) -> Node:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidProgramError(
            "a node of no kind, or of a kind that this version does not know"
        )
    if kind == "const":
        return ConstNode(_next_tensor(tensors), message.const.out)
    body = getattr(message, kind)
    names = _NODES[kind].__dataclass_fields__
    node: Node = _NODES[kind](**{name: _plain(getattr(body, name)) for name in names})
    return node


_NODES: dict[str, Any] = {
    "feed": FeedNode,
    "fetch": FetchNode,
    "const": ConstNode,
    "read": ReadNode,
    "write": WriteNode,
    "segment": SegmentNode,
    "route": RouteNode,
    "check": CheckNode,
    "lookup": LookupNode,
    "merge": MergeNode,
    "split": SplitNode,
    "unpack": UnpackNode,
    "join": JoinNode,
    "send": SendNode,
    "recv": RecvNode,
    "contribute": ContributeNode,
    "aggregate": AggregateNode,
}
_KINDS = {node: kind for kind, node in _NODES.items()}


def _plain(value: object) -> object:
    match value:
        case str() | int():
            return value
        case pb.Rows():
            return Rows(value.variable, value.ids)
        case pb.RowMean():
            return RowMean(value.ids, tuple(value.rows))
        case pb.Layout():
            return Layout(tuple(value.sizes), value.kind)
        case _:
            assert isinstance(value, Sequence)
            return tuple(_plain(v) for v in value)
